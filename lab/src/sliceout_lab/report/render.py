"""Pages as Markdown and HTML files, from the templates in ``templates/``.

Texts use a little Markdown (``code``, **strong**, *emphasis*, [links](to)); a newline in a cell breaks its line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from .page import Page

_MARKS = (
    (re.compile(r"`([^`]+)`"), r"<code>\1</code>"),
    (re.compile(r"\*\*([^*]+)\*\*"), r"<strong>\1</strong>"),
    (re.compile(r"(?<![\w*])\*([^*]+)\*(?![\w*])"), r"<em>\1</em>"),
    (re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)"), r'<a href="\2">\1</a>'),
)


def inline(text: str) -> Markup:
    """A text with its little Markdown as HTML.

    Example:
        >>> inline("**2** < `n`")
        Markup('<strong>2</strong> &lt; <code>n</code>')
    """
    made = str(escape(text))
    for pattern, tag in _MARKS:
        made = pattern.sub(tag, made)
    return Markup(made.replace("\n", "<br>"))


def breaks(text: str) -> str:
    """Line breaks in a list or a cell of Markdown."""
    return text.replace("\n", "<br>")


def cell(text: str) -> str:
    return breaks(text.replace("|", "\\|"))


_environment = Environment(
    loader=PackageLoader("sliceout_lab.report"),
    autoescape=lambda name: name is not None and ".html" in name,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=StrictUndefined,
)
_environment.filters |= {"inline": inline, "breaks": breaks, "cell": cell}


def render(template: str, **values: Any) -> str:
    """A template of ``templates/`` filled in."""
    return _environment.get_template(template).render(**values)


def markdown(page: Page, figures: str = "figures") -> str:
    """The page in Markdown, its pictures in the folder ``figures`` beside it."""
    return render("page.md.jinja", page=page, figures=figures)


def grid(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A plain table in Markdown, the first ``left`` columns left-aligned, without a line break behind it."""
    return render("grid.md.jinja", headings=headings, rows=rows, left=left).rstrip("\n")


def html(pages: Sequence[Page], title: str) -> str:
    """All pages below one another in one file that needs nothing else, with a table of contents."""
    return render("page.html.jinja", pages=pages, title=title)
