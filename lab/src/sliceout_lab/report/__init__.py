"""From result files to pages: the paper's tables with our numbers in them, curves, the frontier, and CO2.

:func:`write` makes one self-contained HTML page with Markdown and pictures beside it; :func:`docs` brings the committed
pages up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sliceout.cli import UserError

from .co2 import Carbon
from .reading import Measured, load

__all__ = ["Carbon", "Measured", "load", "write"]

TITLE = "SliceOut: results"


def write(
    results: Sequence[Path],
    out: Path,
    *,
    bench: Sequence[Path] = (),
    carbon: Carbon | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> Path:
    """Make the report.

    Args:
        results: training results (``*.json``), or folders that hold them.
        out: folder for ``report.html``, its pages as Markdown and ``figures/``; made if it is not there.
        bench: results of ``sliceout-lab bench`` (``*.json``), or folders that hold them.
        carbon: carbon intensity of the electricity, with its source.
        say: called with a message for every file that was left out.

    Returns:
        The HTML page.
    """
    from .build import NAMES, pages
    from .render import html, markdown

    measured = load(results, bench)
    for warning in measured.warnings:
        say(warning)
    if not measured.runs and not measured.benches:
        looked = ", ".join(map(str, [*results, *bench])) or "nowhere"
        raise UserError(f"no results to report in {looked}: run sliceout-lab train, reproduce or bench first")
    made = pages(measured, carbon or Carbon())
    try:
        out.mkdir(parents=True, exist_ok=True)
        for page, name in zip(made, NAMES, strict=True):
            (out / f"{name}.md").write_text(markdown(page), encoding="utf-8")
            for drawn in page.figures:
                drawn.save(out / "figures")
        target = out / "report.html"
        target.write_text(html(made, TITLE), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: cannot write there ({error.strerror})") from error
    return target
