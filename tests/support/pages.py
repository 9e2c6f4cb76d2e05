"""HTML pages as a browser would see them."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Elements, text and the addresses a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str | None] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str | None] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        self.ids.append(found.get("id"))
        self.loads += [value for name, value in found.items() if name in ("src", "href", "srcset", "action")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def loads_nothing(text: str) -> bool:
    """No element names an address, and the page's own policy forbids every request."""
    page = Page(text)
    return not page.loads and "link" not in page.tags and "default-src 'none'" in text
