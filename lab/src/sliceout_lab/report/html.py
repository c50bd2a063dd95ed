"""The page as one HTML file that needs nothing else: styles and pictures inside, no script, no network."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from importlib import resources

from .page import Bullets, Figures, Heading, Page, Table, Text

_MARKS = (
    (re.compile(r"`([^`]+)`"), r"<code>\1</code>"),
    (re.compile(r"\*\*([^*]+)\*\*"), r"<strong>\1</strong>"),
    (re.compile(r"(?<![\w*])\*([^*]+)\*(?![\w*])"), r"<em>\1</em>"),
    (re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)"), r'<a href="\2">\1</a>'),
)


def inline(text: str) -> str:
    """A text with its little Markdown as HTML.

    Example:
        >>> inline("**2** < `n`")
        '<strong>2</strong> &lt; <code>n</code>'
    """
    text = html.escape(text, quote=False)
    for pattern, made in _MARKS:
        text = pattern.sub(made, text)
    return text.replace("\n", "<br>")


def render(pages: Sequence[Page], title: str) -> str:
    """All pages below one another in one file, with a table of contents."""
    body, contents, number = [], [], 0
    for page in pages:
        number += 1
        anchor = f"s{number}"
        contents.append(f'<a href="#{anchor}" class="top">{inline(page.title)}</a>')
        body.append(f'<h1 id="{anchor}">{inline(page.title)}</h1>')
        for block in page.blocks:
            match block:
                case Heading():
                    number += 1
                    anchor = f"s{number}"
                    if block.level == 2:
                        contents.append(f'<a href="#{anchor}">{inline(block.text)}</a>')
                    body.append(f'<h{block.level} id="{anchor}">{inline(block.text)}</h{block.level}>')
                case Text():
                    body.append(f"<p>{inline(block.text)}</p>")
                case Bullets():
                    body.append("<ul>" + "".join(f"<li>{inline(item)}</li>" for item in block.items) + "</ul>")
                case Table():
                    body.append(_table(block))
                case Figures():
                    body.append(
                        '<div class="figures">'
                        + "".join(_figure(d.inline_svg(), d.alt, d.caption) for d in block.drawn)
                        + "</div>"
                    )
    style = (resources.files("sliceout_lab.report") / "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<nav>{''.join(contents)}</nav>\n<main>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )


def _figure(svg: str, alt: str, caption: str) -> str:
    return (
        f'<figure role="img" aria-label="{html.escape(alt)}">{svg}<figcaption>{inline(caption)}</figcaption></figure>'
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{inline(c)}</th>" for c in table.columns)
    rows = "".join(
        "<tr>" + "".join(f"<{tag}>{inline(c)}</{tag}>" for c, tag in _tagged(row)) + "</tr>" for row in table.rows
    )
    notes = "".join(f"<p class=note>{inline(note)}</p>" for note in table.notes)
    made = f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{notes}'
    if table.folded:
        return f"<details><summary>{inline(table.caption)}</summary>{made}</details>"
    return (f"<p class=caption>{inline(table.caption)}</p>" if table.caption else "") + made


def _tagged(row: Sequence[str]) -> list[tuple[str, str]]:
    return [(cell, "td" if i else "th") for i, cell in enumerate(row)]
