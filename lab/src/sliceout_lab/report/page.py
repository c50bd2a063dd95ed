"""A page as data: headings, texts, tables and figures, which :mod:`html` and :func:`markdown` turn into files.

Texts use a little Markdown (``code``, **strong**, *emphasis*, [links](to)); a line break in a cell is a newline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .figures import Drawn


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Bullets:
    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Cells are texts; ``notes`` stand below, ``folded`` tables are closed on the HTML page until one opens them."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    notes: Sequence[str] = ()
    folded: bool = False


@dataclass(frozen=True)
class Figures:
    """Pictures that stand side by side where there is room."""

    drawn: Sequence[Drawn]


Block = Heading | Text | Bullets | Table | Figures


@dataclass
class Page:
    title: str
    blocks: list[Block] = field(default_factory=list)

    def add(self, *blocks: Block) -> None:
        self.blocks += blocks

    @property
    def figures(self) -> list[Drawn]:
        return [drawn for block in self.blocks if isinstance(block, Figures) for drawn in block.drawn]


def markdown(page: Page, figures: str = "figures") -> str:
    """The page in Markdown, its pictures in the folder ``figures`` beside it."""
    parts = [f"# {page.title}"]
    for block in page.blocks:
        match block:
            case Heading():
                parts.append(f"{'#' * block.level} {block.text}")
            case Text():
                parts.append(block.text)
            case Bullets():
                parts.append("\n".join(f"- {_breaks(item)}" for item in block.items))
            case Table():
                parts.append(_table(block))
            case Figures():
                parts += [f"![{d.alt}]({figures}/{d.name}.svg)\n\n{d.caption}" for d in block.drawn]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(table: Table) -> str:
    rows = [list(table.columns), ["---"] * len(table.columns), *map(list, table.rows)]
    lines = ["| " + " | ".join(_cell(c) for c in row) + " |" for row in rows]
    caption = [f"**{table.caption}**\n"] if table.caption else []
    notes = ["", *(f"{note}  " for note in table.notes)] if table.notes else []
    return "\n".join([*caption, *lines, *notes]).rstrip()


def _cell(text: str) -> str:
    return _breaks(text.replace("|", "\\|"))


def _breaks(text: str) -> str:
    return text.replace("\n", "<br>")
