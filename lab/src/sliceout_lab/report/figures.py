"""How the pictures look, and how they become files: the same drawing for paper, for GitHub and for the HTML page.

Everything is drawn once with matplotlib, one panel a figure, so that a phone can stack them. On the HTML page ink takes
the colour of the text around it, light or dark. SVGs hold no date, no version and no random name, and say in
``data-of`` which numbers they show: so a test can tell whether a committed picture is still that of the results.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # writes files; needs no display

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.figure import Figure

INK = "#1f2328"
GROUND = "#fffffe"
GREY = "#8a8f98"
COLOURS = {
    "none": GREY, "standard": "#d9822b", "controlled": "#a06cd5", "sliceout-circular": "#2a7fd4",
    "sliceout-flow": "#17a08a", "sliceout-probabilistic": "#d0508f", "patch": "#b0892a", "floor": "#6b7a3a",
    "spatial": "#c25b4e", "dropblock": "#7d6b5d",
}  # fmt: skip
STYLE: Any = {
    "figure.figsize": (5.6, 3.9), "figure.constrained_layout.use": True, "font.size": 10, "font.family": "DejaVu Sans",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 8,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.grid": True, "grid.alpha": 0.25,
    "grid.color": GREY, "legend.frameon": False, "legend.fontsize": 8.5, "lines.linewidth": 1.6, "lines.markersize": 5,
    "svg.fonttype": "none", "axes.axisbelow": True, "axes.facecolor": "none",
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A picture with its name, what it shows in a word (``alt``) and in a sentence (``caption``)."""

    name: str
    alt: str
    caption: str
    figure: Figure

    @cached_property
    def _drawing(self) -> str:
        """SVG on a background of the colour GROUND, equal to the byte for equal numbers and an equal matplotlib."""
        buffer = io.StringIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        with plt.rc_context({**STYLE, "svg.hashsalt": self.name}):
            self.figure.savefig(buffer, format="svg", facecolor=GROUND, metadata=nothing)
        text = buffer.getvalue()
        text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
        text = re.sub(r"(\bid=\"|url\(#|href=\"#)", rf"\g<1>{self.name}-", text)  # many pictures share one page
        text = re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", text)  # a hundredth of a point
        text = text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")  # else serifs where it is missing
        return text.replace("<svg ", f'<svg data-of="{self.fingerprint()}" ', 1)

    def svg(self) -> str:
        """The picture as a file of its own, on white."""
        return self._drawing.replace(GROUND, "#ffffff")

    def inline_svg(self) -> str:
        """For the HTML page: no background, ink in the colour of the text."""
        text = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", self._drawing, count=1)
        text = re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", text, count=1)
        return text.replace(GROUND, "none").replace(INK, "currentColor")

    def save(self, folder: Path, *, png: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.svg").write_text(self.svg(), encoding="utf-8")
        if png:
            with plt.rc_context(STYLE):
                self.figure.savefig(
                    folder / f"{self.name}.png", dpi=150, facecolor="white", metadata={"Software": None}
                )

    def fingerprint(self) -> str:
        """Of all numbers and words in the picture; independent of matplotlib's version."""
        seen: list[Any] = []
        for axes in self.figure.axes:
            seen += [axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()]
            seen += [t.get_text() for t in axes.texts]
            for line in axes.lines:
                seen += [str(line.get_label()), _rounded(line.get_xydata())]
            for bar in axes.patches:
                if hasattr(bar, "get_width"):
                    seen.append(_rounded([[bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()]]))  # type: ignore[attr-defined]
            for collection in axes.collections:
                if isinstance(collection, PathCollection):
                    seen.append(_rounded(collection.get_offsets()))
                elif isinstance(collection, PolyCollection):
                    seen += [_rounded(path.vertices) for path in collection.get_paths()]
            legend = axes.get_legend()
            seen += [t.get_text() for t in legend.get_texts()] if legend else []
        return hashlib.sha1(repr(seen).encode()).hexdigest()[:16]


def _rounded(points: Any) -> list[list[str]]:
    return [[f"{float(v):.5g}" for v in point] for point in points]


@contextmanager
def panel(name: str, alt: str, caption: str, into: list[Drawn], title: str = "", **size: Any) -> Iterator[Axes]:
    """Draw on the axes that this gives; at the end the picture is appended to ``into``."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(**size)
        yield axes
        axes.set_title(title)
        plt.close(figure)  # the figure itself lives on, only pyplot forgets it
    into.append(Drawn(name, alt, caption, figure))


def legend(axes: Axes, columns: int = 2) -> None:
    """Below the axes, where it hides no data."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    by_label = dict(zip(labels, handles, strict=True))
    axes.figure.legend(  # type: ignore[union-attr]
        by_label.values(), by_label.keys(), loc="outside lower center", ncols=min(columns, len(by_label)), fontsize=8.5
    )


def colour(match: Mapping[str, Any]) -> str:
    """Of a scheme, the same in every picture."""
    scheme = match["scheme"]
    if scheme == "sliceout":
        scheme += f"-{match.get('norm') or 'probabilistic'}" if match.get("sampling") == "window" else "-circular"
    return COLOURS.get(scheme, GREY)


def percent_axis(axes: Axes, values: Sequence[float]) -> None:
    """Starts at zero where bars or ratios are read by their height."""
    axes.set_ylim(0, max([*values, 100]) * 1.12)
