"""Pages without scripts: text stays text, HTML says so, nothing is loaded."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from sim.results.page_parts import Markup, bullets, card, html_page, html_table, panels, toned, verdict
from tests.support.pages import loads_nothing

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("C",)), min_size=1)


def read(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html)


@given(WORDS, WORDS)
def test_words_come_out_as_they_went_in(first: str, second: str) -> None:
    table = read(html_table((first, "n"), [(second, 1)]))
    assert [cell.text for cell in table.iter("th")] == [first, "n"]
    assert [cell.text for cell in table.iter("td")] == [second, "1"]
    assert ["".join(item.itertext()) for item in read(bullets([first, second]))] == [first, second]
    top = read(verdict("bad", (first,), second))
    assert top.findtext(".//b") == first and top.findtext("h1") == second
    assert read(card(first, "<p/>", note=second)).findtext("p") == second


def test_html_in_a_table_says_that_it_is() -> None:
    table = read(html_table(("a", "b"), [(Markup("<i>x</i>"), toned("ok", "good"))]))
    assert table.findtext(".//i") == "x"
    assert table.find(".//b").attrib == {"class": "good"}


def test_words_stand_left_and_may_wrap() -> None:
    table = read(html_table(("a", "b", "c"), [("x", 1, "y")], words=(0, 2), wrap=(2,)))
    assert [cell.get("class") for cell in table.iter("th")] == ["text", None, "text"]
    assert [cell.get("class") for cell in table.iter("td")] == ["text", None, "text wrap"]


def test_what_is_empty_is_left_out() -> None:
    assert card("title", "", "") == bullets([]) == panels(["", ""]) == ""
    assert read(html_table(("", ""), [("a", "b")])).find(".//thead") is None


def test_a_page_may_load_nothing() -> None:
    page = html_page("<title>", "<p>body</p>")
    assert page.startswith("<!doctype html>") and loads_nothing(page)
    assert "<title>&lt;title&gt;</title>" in page
