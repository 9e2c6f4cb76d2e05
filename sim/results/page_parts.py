"""What pages are made of besides pictures: a frame that loads nothing, cards, tables, panels, lists.

Text is escaped here; what is HTML already says so by being `Markup`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .report_format import escape
from .report_template import STYLE


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def html_page(title: str, body: str) -> str:
    """A whole page without scripts; `body` is HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>{body}</main></body></html>\n"
    )


def verdict(tone: str, eyebrow: Sequence[str], headline: str, *sentences: str) -> str:
    """The answer at the top of a page; `tone` is good, strained or bad, `eyebrow` says what was asked."""
    first, *others = (escape(text) for text in eyebrow)
    facts = "".join(f"<span>{text}</span>" for text in others)
    reasons = "".join(f'<p class="headline">{escape(text)}</p>' for text in sentences)
    return (
        f'<section class="answer {tone}"><div class="eyebrow"><b>{first}</b>{facts}</div>'
        f"<h1>{escape(headline)}</h1>{reasons}</section>\n"
    )


def card(title: str, *parts: str, note: str = "") -> str:
    """A section with its title and a note in small print; empty when all `parts`, which are HTML, are."""
    if not any(parts):
        return ""
    said = f'<p class="soft small">{escape(note)}</p>' if note else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{said}{"".join(parts)}</section>\n'


def bullets(sentences: Sequence[str]) -> str:
    """Sentences as a list; empty when there are none."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def panels(plots: Sequence[str]) -> str:
    """Pictures side by side where the page is wide enough; empty ones are left out."""
    cells = "".join(f"<div>{plot}</div>" for plot in plots if plot)
    return f'<div class="panels wide">{cells}</div>' if cells else ""


def html_table(
    head: Sequence[str], rows: Sequence[Sequence[object]], *, words: Collection[int] = (0,), wrap: Collection[int] = ()
) -> str:
    """A table: the columns `words` are text (left), the others numbers (right); text in the columns `wrap` may break lines.

    A head of empty titles is left out.
    """

    def cell(tag: str, column: int, value: object) -> str:
        names = ["text"] * (column in words) + ["wrap"] * (column in wrap and tag == "td")
        classes = f' class="{" ".join(names)}"' if names else ""
        return f"<{tag}{classes}>{value if isinstance(value, Markup) else escape(value)}</{tag}>"

    titles = "".join(cell("th", column, value) for column, value in enumerate(head)) if any(head) else ""
    top = f"<thead><tr>{titles}</tr></thead>" if titles else ""
    body = "".join(
        f"<tr>{''.join(cell('td', column, value) for column, value in enumerate(row))}</tr>\n" for row in rows
    )
    return f'<div class="scroll"><table>{top}<tbody>\n{body}</tbody></table></div>'


def toned(text: str, tone: str) -> Markup:
    """A word of a verdict in its colour; `tone` is good, strained or bad."""
    return Markup(f'<b class="{tone}">{escape(text)}</b>')
