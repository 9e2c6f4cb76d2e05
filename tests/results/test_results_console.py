"""The summary in the terminal."""

import io
import re

from rich.console import Console

from sim.results.console import print_summary
from tests.support.results import good, make, printed, request, step


def test_the_terminal_summary_fits_80_columns_and_has_no_control_codes():
    text = printed(make([request(n) for n in range(40)], [step(0)], warnings=["word " * 60]))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\x1b" not in text


def test_the_terminal_answers_first():
    lines = printed(good()).splitlines()
    assert "llama-3.1-8b, h100-sxm-80gb" in lines[0]
    assert "Kept up. All 40 requests finished." in lines[1]


def test_the_terminal_shows_outcomes_latencies_and_warnings():
    text = printed(
        make(
            [request(0), request(1, "rejected")], [step(0)], rejected_by_reason={"too_long": 1}, warnings=["look here"]
        )
    )
    assert re.search(r"Requests +1 finished, 1 rejected, 0 aborted, 0 timed out, 0 failed", text)
    assert re.search(r"rejected for +too_long \(1\)", text)
    for metric in ("TTFT", "TPOT", "ITL", "E2EL", "Queue"):
        assert re.search(rf"{metric} +60\.0 ms +50\.0 ms +90\.0 ms +120 ms +200 ms", text)
    assert re.search(r"warning: +look here", text)


def test_square_brackets_in_a_path_are_printed_and_not_obeyed():
    assert "[red]chat.csv" in printed(good())


def test_the_terminal_summary_survives_an_output_without_unicode():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_summary(good(), Console(file=stream, width=80))
    stream.flush()
