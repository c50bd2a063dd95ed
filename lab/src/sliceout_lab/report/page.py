"""A page as data: headings, texts, tables and figures, which :mod:`render` turns into files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from .figures import Drawn


@dataclass(frozen=True)
class Heading:
    kind: ClassVar[str] = "heading"
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Code:
    """Lines of Python."""

    kind: ClassVar[str] = "code"
    text: str


@dataclass(frozen=True)
class Bullets:
    kind: ClassVar[str] = "bullets"
    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Cells are texts; ``notes`` stand below, ``folded`` tables are closed on the HTML page until one opens them."""

    kind: ClassVar[str] = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    notes: Sequence[str] = ()
    folded: bool = False


@dataclass(frozen=True)
class Figures:
    """Pictures that stand side by side where there is room."""

    kind: ClassVar[str] = "figures"
    drawn: Sequence[Drawn]


Block = Heading | Text | Code | Bullets | Table | Figures


@dataclass
class Page:
    title: str
    blocks: list[Block] = field(default_factory=list)

    def add(self, *blocks: Block) -> None:
        self.blocks += blocks

    @property
    def figures(self) -> list[Drawn]:
        return [drawn for block in self.blocks if isinstance(block, Figures) for drawn in block.drawn]
