"""One run's KV cache held in several ways: what "paged" is compared with, and the page that shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.why_paged import holdings_of, main, page, rows_of, small_busy_card, spans_of
from sim import Result, simulate
from tests.support.pages import loads_nothing
from tests.support.refusals import Refusals


@pytest.fixture(scope="module")
def result() -> Result:
    return simulate(small_busy_card().with_(num_requests=60))


def test_every_finished_request_holds_its_prompt_and_all_but_its_last_answer(result: Result) -> None:
    spans = {span.request_id: span for span in spans_of(result, 8192)}
    rows = result.requests[result.requests["outcome"] == "finished"]
    assert set(spans) == set(rows["request_id"])
    for row in rows.itertuples():
        span = spans[row.request_id]
        assert span.growth[0] == (row.scheduled_s, row.input_tokens)
        assert span.growth[-1][1] == row.input_tokens + row.output_tokens - 1
        assert span.end_s == pytest.approx(row.finished_s)


def test_paged_wastes_less_than_a_block_a_request_and_never_fails_for_want_of_one_piece(result: Result) -> None:
    found = {row["name"]: row for row in rows_of(holdings_of(result))}
    assert len(found) == 6
    paged = found.pop("paged")
    assert paged["external"] == 0.0 and paged["in_pieces"] == 0
    assert paged["internal"] < 0.05
    assert all(paged["served"] >= other["served"] for other in found.values())
    # A reservation for 8,192 tokens is mostly empty; ranges of exactly the right length leave holes instead.
    assert found["worst-case reservation"]["internal"] > 0.5
    assert found["exact reservation"]["external"] > 0.1


def test_all_ways_have_the_bytes_of_the_run_s_own_pool(result: Result) -> None:
    ledger = result.ledger
    assert {one.capacity_bytes for one in holdings_of(result)} == {ledger.num_gpu_blocks * ledger.block_bytes}


def test_the_page_has_a_picture_of_each_way_and_loads_nothing(result: Result) -> None:
    html = page(holdings_of(result), "<a title>")
    assert html.count("<svg") == 6
    assert "&lt;a title&gt;" in html
    ticks = {tuple(re.findall(r"<text [^>]*>([^<]*)</text>", plot)) for plot in html.split("<svg")[1:]}
    assert len(ticks) == 1, "all on the same axes"
    assert loads_nothing(html)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[model]\nmodel = 'nobody'\n[gpu]\ngpu = 'l4-24gb'\n", "nobody"),
        ("[modle]\n", "modle"),
        ("not toml", "not valid TOML"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(text: str, said: str, tmp_path: Path, refused: Refusals) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(text)
    refused([file], said, by=main)


def test_the_script_prints_the_table_and_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.why_paged.small_busy_card", lambda: small_busy_card().with_(num_requests=20))
    assert main(["--out", str(tmp_path / "why.html")]) == 0
    assert "PyTorch's allocator" in capsys.readouterr().out
    assert (tmp_path / "why.html").read_text().startswith("<!doctype html>")
