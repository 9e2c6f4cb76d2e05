"""What a run gives back: tables, files, the terminal summary and the one-file report."""

import html.parser
import io
import json
import re
import subprocess
import sys
from dataclasses import dataclass

import pandas as pd
import pytest
from rich.console import Console

from sim.results.console import print_summary
from sim.results.report_answers import answer, binding_limit
from sim.results.report_format import count, figure, gib, seconds, share
from sim.results.result import MARK_COLUMNS, REQUEST_COLUMNS, TIMELINE_COLUMNS, Result

GIB = 2**30


@dataclass(frozen=True)
class Line:
    name: str
    bytes: int
    formula: str
    inside_budget: bool


@dataclass(frozen=True)
class Account:
    lines: tuple[Line, ...]


ACCOUNT = Account((
    Line("outside the budget", 6 * GIB, "(1 - 0.925) x 80 GiB", False),
    Line("weights", 15 * GIB, "8 G parameters x 2 bytes <b>", True),
    Line("KV pool", 59 * GIB, "rest", True),
))  # fmt: skip


def request(number, outcome="finished", **changes):
    row = dict.fromkeys(REQUEST_COLUMNS)
    row |= {
        "request_id": f"req-{number}", "arrival_s": 0.1 * number, "input_tokens": 100 * (number % 30 + 1), "output_tokens_requested": 50,
        "output_tokens": 50, "priority": 0, "outcome": outcome, "degraded": False, "prefix_hit_tokens": 0, "preemptions": 0,
        "recomputed_tokens": 0, "peak_blocks": 12, "kv_block_seconds": 3.5, "queued_s": 0.1 * number,
    }  # fmt: skip
    if outcome == "finished":
        arrival = row["arrival_s"]
        row |= {
            "finish_reason": "length",
            "scheduled_s": arrival + 0.01,
            "first_token_s": arrival + 0.05,
            "finished_s": arrival + 1.03,
        }
        row |= {"ttft_s": 0.05 + 1e-4 * number, "tpot_s": 0.02, "e2el_s": 1.03 + 1e-3 * number}
    return row | changes


def step(number, **changes):
    row = {
        "time_s": 0.1 * number, "duration_s": 0.1, "steps": 4, "running": 8, "waiting": 0, "used_blocks": 50, "used_blocks_end": 52,
        "cached_blocks": 20, "free_blocks": 30, "quarantined_blocks": 0, "prefill_tokens": 0, "decode_tokens": 32, "replica": 0,
    }  # fmt: skip
    return row | changes


def columns(rows, contract):
    return {name: [row[name] for row in rows] for name in contract}


SPREAD = {"mean": 0.06, "p50": 0.05, "p90": 0.09, "p95": 0.1, "p99": 0.12, "max": 0.2}


def make(requests=(), steps=(), marks=(), ledger=ACCOUNT, **summary):
    outcomes = [row["outcome"] for row in requests]
    known = {"num_requests": len(outcomes)}
    known |= {name: outcomes.count(name) for name in ("finished", "rejected", "aborted", "timed_out", "failed")}
    known |= {
        "num_gpu_blocks": 100,
        "block_size": 16,
        "engine_steps": 4 * len(steps),
        "simulated_time_s": 1.0,
        "wall_time_s": 0.25,
    }
    if known["finished"]:
        known |= dict.fromkeys(("ttft_s", "tpot_s", "itl_s", "e2el_s", "queue_s"), SPREAD)
    return Result(
        summary=known | {"warnings": []} | summary,
        request_columns=columns(requests, REQUEST_COLUMNS),
        timeline_columns=columns(steps, TIMELINE_COLUMNS),
        mark_columns=columns([dict(zip(MARK_COLUMNS, mark, strict=True)) for mark in marks], MARK_COLUMNS),
        ledger=ledger,
        provenance={"kvtwin_version": "0.1.0", "scenario_hash": "9f3ab2", "date": "2026-01-05", "command": "kvtwin run --seed 0"},
        scenario={
            "model": {"model": "llama-3.1-8b"}, "gpu": {"gpu": "h100-sxm-80gb"},
            "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
            "workload": {"trace": "a/b/[red]chat.csv"}, "slo": {"ttft_p99": 0.06}, "run": {"seed": 0},
        },
    )  # fmt: skip


def good():
    return make([request(n) for n in range(40)], [step(n) for n in range(40)])


class Page(html.parser.HTMLParser):
    """Elements, text and the addresses a page would load."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.text, self.tags, self.ids = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        found = dict(attrs)
        self.ids.append(found.get("id"))
        self.loads += [value for name, value in found.items() if name in ("src", "href", "srcset", "action")]

    def handle_data(self, data):
        self.text.append(data)


def page_of(result, tmp_path):
    return result.report(tmp_path / "report.html").read_text()


def figures_of(page):
    return json.loads(
        re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL).group(1)
    )


def words_of(page):
    """The page without plotly.js and the style sheet."""
    return re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page, flags=re.DOTALL)


def printed(result, width=80):
    stream = io.StringIO()
    print_summary(result, Console(file=stream, width=width))
    return stream.getvalue()


# ── the value ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tables_have_the_contract_columns_in_order_and_stable_types():
    result = make([request(0), request(1, "rejected", reason="needs 200 blocks, the pool has 100")], [step(0)])
    assert list(result.requests.columns) == list(REQUEST_COLUMNS)
    assert list(result.timeline.columns) == list(TIMELINE_COLUMNS)
    assert list(result.marks.columns) == list(MARK_COLUMNS)
    assert result.requests["retry_after_s"].dtype == "float64"
    assert result.requests["ttft_s"].isna().tolist() == [False, True]
    assert result.requests["peak_blocks"].dtype == "int64"
    empty = Result(summary={}, request_columns={}, timeline_columns={}, mark_columns={})
    assert empty.requests.dtypes["ttft_s"] == "float64"
    assert len(empty.requests) == 0


def test_a_table_is_built_once():
    result = good()
    assert result.requests is result.requests


def test_a_missing_or_short_column_is_named():
    whole = columns([step(0)], TIMELINE_COLUMNS)
    lacking = {name: values for name, values in whole.items() if name != "waiting"}
    with pytest.raises(ValueError, match="timeline_columns lacks waiting"):
        Result(summary={}, request_columns={}, timeline_columns=lacking, mark_columns={})
    with pytest.raises(ValueError, match=r"time_s has 1 rows, but .'waiting': 2"):
        Result(summary={}, request_columns={}, timeline_columns=whole | {"waiting": [1, 2]}, mark_columns={})


def test_further_columns_follow_those_of_the_contract():
    rows = {"tenant": ["a"]} | columns([request(0)], REQUEST_COLUMNS)
    result = Result(summary={}, request_columns=rows, timeline_columns={}, mark_columns={})
    assert list(result.requests.columns) == [*REQUEST_COLUMNS, "tenant"]


def test_making_a_result_imports_no_heavy_library():
    code = (
        "import sys; from sim.results.result import Result; import sim.results.report_template, sim.results.files\n"
        "Result(summary={}, request_columns={}, timeline_columns={}, mark_columns={})\n"
        "print([name for name in ('pandas', 'plotly', 'scipy', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_save_writes_five_files_and_the_same_bytes_each_time(tmp_path):
    good().save(tmp_path / "a")
    good().save(tmp_path / "b")
    names = ["marks.csv", "report.html", "requests.csv", "summary.json", "timeline.csv"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_saved_tables_read_back_as_the_tables_of_the_result(tmp_path):
    result = make([request(0), request(1, "aborted", reason="client, gone")], [step(0)], [(0.1, "aborted", "req-1", 0)])
    result.save(tmp_path)
    read = pd.read_csv(tmp_path / "requests.csv")
    assert list(read.columns) == list(REQUEST_COLUMNS)
    assert read["e2el_s"].tolist()[0] == result.requests["e2el_s"].tolist()[0]
    assert read["reason"].tolist()[1] == "client, gone"
    assert pd.read_csv(tmp_path / "timeline.csv")["used_blocks_end"].tolist() == [52]
    assert json.loads((tmp_path / "summary.json").read_text())["num_requests"] == 2


def test_without_plotly_the_data_is_saved_and_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ModuleNotFoundError, match="pip install plotly"):
        good().save(tmp_path)
    assert (tmp_path / "summary.json").exists()
    assert not (tmp_path / "report.html").exists()


# ── the answers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_without_a_queue_kept_up_and_met_no_limit():
    found = answer(good())
    assert (found.status, found.verdict, found.limit) == ("good", "Kept up", "nothing")
    assert found.headline.startswith("All 40 requests finished. Half had their first token within 50.0 ms")


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"waiting": 3, "running": 8}, "sequences"),
        ({"waiting": 3, "running": 4, "prefill_tokens": 240, "decode_tokens": 16}, "token budget"),
        (
            {
                "waiting": 3,
                "running": 4,
                "used_blocks": 90,
                "used_blocks_end": 95,
                "free_blocks": 5,
                "cached_blocks": 5,
            },
            "KV blocks",
        ),
        ({"waiting": 3, "running": 2, "used_blocks": 5, "used_blocks_end": 5, "free_blocks": 75}, "admission"),
    ],
)
def test_the_limit_is_what_the_waiting_steps_had_used_up(changes, limit):
    result = make([request(0)], [step(0), *(step(n, **changes) for n in range(1, 9)), step(9)])
    assert binding_limit(result)[0] == limit
    assert "80.0 % of the busy time" in binding_limit(result)[1]


@pytest.mark.parametrize("waiting", [0, 3])
def test_steps_that_ran_out_of_memory_are_a_limit_whoever_waits(waiting):
    few = {"waiting": waiting, "running": 2, "used_blocks": 5, "used_blocks_end": 5, "free_blocks": 75}
    found = answer(make([request(0)], [step(n, **few) for n in range(10)], oom_events=3))
    assert found.limit_title == "Limited by step memory"
    assert found.limit_detail.startswith("3 steps ran out of memory. Requests were left in the queue")


def test_the_limit_weighs_time_and_not_rows():
    blocked = {
        "waiting": 1,
        "running": 4,
        "used_blocks": 99,
        "used_blocks_end": 99,
        "free_blocks": 0,
        "cached_blocks": 1,
    }
    rows = [step(n, waiting=1, duration_s=0.001) for n in range(20)]
    result = make([request(0)], [*rows, step(20, duration_s=9.0, **blocked)])
    assert binding_limit(result)[0] == "KV blocks"


def test_a_request_that_comes_while_a_step_runs_was_not_left_waiting():
    requests = [request(n, arrival_s=0.1 * n + 0.05) for n in range(10)]
    assert binding_limit(make(requests, [step(n, waiting=1, running=8) for n in range(10)]))[0] == "nothing"
    assert binding_limit(make(requests, [step(n, waiting=2, running=8) for n in range(10)]))[0] == "sequences"


def test_no_steady_state_is_said_first():
    result = make([request(0)], [step(0)], warnings=["no steady state: the queue grew by 0.3 requests/s"])
    assert answer(result).verdict == "Did not keep up"
    assert "no steady state" in answer(result).headline


def test_rejections_time_outs_and_preemptions_are_told_apart():
    finished = [request(n) for n in range(5)]
    assert answer(make([*finished, request(5, "rejected")], [step(0)])).verdict == "Turned requests away"
    assert answer(make([*finished, request(5, "timed_out")], [step(0)])).verdict == "Clients gave up waiting"
    pressed = answer(
        make(finished, [step(0)], num_preemptions=3, recomputed_tokens=10, input_tokens=900, output_tokens=100)
    )
    assert pressed.verdict == "Kept up, under memory pressure"
    assert "3 preemptions, which cost 1.0 % of all tokens again." in pressed.headline
    assert answer(make(finished, [step(0)], slo_attainment=0.9)).verdict == "Kept up, but missed its objectives"


# ── the terminal ─────────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_report_embeds_plotly_once_and_loads_nothing(tmp_path):
    from plotly.offline import get_plotlyjs

    page = page_of(good(), tmp_path)
    assert page.count(get_plotlyjs()) == 1
    parsed = Page(page)
    assert parsed.loads == []
    assert "link" not in parsed.tags
    assert "default-src 'none'" in page
    assert len(page) - len(get_plotlyjs()) < 200_000


def test_every_figure_has_its_place_and_every_place_its_figure(tmp_path):
    page = page_of(good(), tmp_path)
    figures = figures_of(page)
    assert set(figures) == {"ttft", "tpot", "e2el", "memory", "queue", "batch", "class-ttft", "class-tpot"}
    assert {f"plot-{name}" for name in figures} == {
        name for name in Page(page).ids if name and name.startswith("plot-")
    }
    for name, drawn in figures.items():
        assert drawn["layout"]["xaxis"]["title"]["text"], name


def test_the_report_answers_before_it_shows(tmp_path):
    words = words_of(page_of(make([request(0)], [step(0)], warnings=["extrapolated"]), tmp_path))
    order = ["<h1>Kept up</h1>", "No limit was met", "extrapolated", 'aria-label="key figures"', "<h2>Latency</h2>", "<h2>Over time</h2>",
             "<h2>Where the memory goes</h2>", "<h2>Slowest requests</h2>", "<h2>Provenance</h2>"]  # fmt: skip
    places = [words.index(text) for text in order]
    assert places == sorted(places)


def test_user_text_cannot_become_markup_or_script(tmp_path):
    attack = '</script><script>alert("x")</script><img src=x>'
    result = make(
        [request(0, request_id=attack), request(1, "rejected", request_id=attack, reason=attack)],
        [step(0)],
        [(0.0, "rejected", attack, 0)],
        warnings=[attack],
        rejected_by_reason={attack: 1},
    )
    page = page_of(result, tmp_path)
    assert "alert(" not in "".join(re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[1:])
    assert Page(page).loads == []
    assert Page(page).tags.count("script") == 3
    assert Page(page).tags.count("img") == 0


def test_the_waterfall_starts_each_line_where_the_last_one_ended(tmp_path):
    words = words_of(page_of(good(), tmp_path))
    bars = re.findall(r'<i class="(\w+)" style="left:([\d.]+)%;width:([\d.]+)%">', words)
    assert bars == [
        ("total", "0.000", "100.000"),
        ("outside", "0.000", "7.500"),
        ("inside", "7.500", "18.750"),
        ("pool", "26.250", "73.750"),
    ]
    assert "8 G parameters x 2 bytes &lt;b&gt;" in words


def test_an_account_that_opens_with_its_total_is_not_counted_twice(tmp_path):
    account = Account((Line("GPU memory", 80 * GIB, "80 GiB", False), *ACCOUNT.lines))
    bars = re.findall(r'<i class="(\w+)"', words_of(page_of(make([request(0)], [step(0)], ledger=account), tmp_path)))
    assert bars == ["total", "outside", "inside", "pool"]


def test_marks_share_the_axis_of_the_pool_and_count_all_their_requests(tmp_path):
    marks = [(0.5 + 1e-6 * n, "preempted", f"req-{n}", 0) for n in range(5000)] + [(1.0, "rejected", "req-9", 0)]
    drawn = figures_of(page_of(make([request(0)], [step(n) for n in range(40)], marks), tmp_path))["memory"]
    named = {trace["name"]: trace for trace in drawn["data"]}
    assert "Preempted (5,000)" in named
    assert len(named["Preempted (5,000)"]["x"]) < 10
    assert named["Rejected (1)"]["text"] == ["req-9"]
    assert min(min(named[name]["y"]) for name in ("Preempted (5,000)", "Rejected (1)")) > 100


def test_the_pool_adds_up_to_100_percent_at_every_instant(tmp_path):
    steps = [step(n, used_blocks=n, used_blocks_end=n + 1, free_blocks=80 - n) for n in range(60)]
    drawn = figures_of(page_of(make([request(0)], steps), tmp_path))["memory"]
    areas = [trace["y"] for trace in drawn["data"] if trace.get("stackgroup")]
    assert [sum(values) for values in zip(*areas, strict=True)] == pytest.approx([100.0] * len(areas[0]), abs=0.01)


def test_a_long_run_is_drawn_with_at_most_two_thousand_points_a_line(tmp_path):
    steps = [step(n, running=n % 9) for n in range(20_000)]
    for drawn in figures_of(page_of(make([request(0)], steps), tmp_path)).values():
        assert all(len(trace["x"]) <= 2000 for trace in drawn["data"])


def test_an_objective_within_reach_is_a_line_and_its_verdict_is_written(tmp_path):
    page = page_of(good(), tmp_path)
    assert figures_of(page)["ttft"]["layout"]["shapes"][0]["x0"] == pytest.approx(60.0)
    assert "objective p99 60.0 ms: missed" in page


def test_classes_of_fewer_than_100_requests_have_no_p99(tmp_path):
    requests = [request(n, input_tokens=10) for n in range(99)] + [request(n, input_tokens=300) for n in range(100)]
    rows = re.findall(
        r'<tr><td class="text">(below 256|256 to 1,023)</td>(.*?)</tr>', page_of(make(requests, [step(0)]), tmp_path)
    )
    cells = {name: re.findall(r"<td>(.*?)</td>", row) for name, row in rows}
    assert cells["below 256"][0] == "99"
    assert cells["below 256"][5] == "-"
    assert cells["256 to 1,023"][5].endswith("ms")


@pytest.mark.parametrize(
    "result",
    [
        Result(summary={}, request_columns={}, timeline_columns={}, mark_columns={}),
        make(),
        make([request(0)], [step(0)], ledger=None),
        make([request(0, tpot_s=None, output_tokens=1)], [step(0, duration_s=0.0)]),
        make([request(0, "rejected", reason="too long")], [], [(0.0, "rejected", "req-0", 0)]),
        make([request(0, "aborted")], [step(0)], [(5.0, "aborted", "req-0", 0)]),
        make([request(0)], [step(0, replica=0), step(0, replica=1), step(3, replica=1, quarantined_blocks=4)]),
        make([request(0, ttft_s=0.0, tpot_s=0.0, e2el_s=0.0)], [step(0)], ledger=Account(())),
    ],
    ids=[
        "nothing",
        "no request",
        "one request, no account",
        "one token",
        "all rejected",
        "all aborted",
        "two replicas",
        "zero latency",
    ],
)
def test_a_report_and_a_summary_exist_for_every_kind_of_run(result, tmp_path):
    page = page_of(result, tmp_path)
    assert "<h1>" in page
    assert not re.search(r">[^<]*\b(nan|None|inf)\b", words_of(page))
    assert {f"plot-{name}" for name in figures_of(page)} == {
        name for name in Page(page).ids if name and name.startswith("plot-")
    }
    assert printed(result)


def test_provenance_tells_how_to_repeat_the_run(tmp_path):
    words = words_of(page_of(good(), tmp_path))
    assert "<pre>kvtwin run --seed 0</pre>" in words
    assert "<dt>scenario hash</dt><dd>9f3ab2</dd>" in words
    assert "<dt>date</dt><dd>2026-01-05</dd>" in words


# ── numbers in words ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0 s"), (0.00045, "450 us"), (0.01234, "12.3 ms"), (0.99961, "1.00 s"), (12.5, "12.5 s"), (299.4, "299 s"),
     (725.0, "12 min 5 s"), (3599.9, "60 min 0 s"), (12000.0, "3 h 20 min"), (float("nan"), "-")],
)  # fmt: skip
def test_durations_take_the_unit_that_suits_them(value, text):
    assert seconds(value) == text


def test_shares_say_zero_and_all_only_when_it_is_so():
    assert [share(value) for value in (0.0, 1e-5, 0.366, 0.99999, 1.0)] == [
        "0 %",
        "< 0.1 %",
        "36.6 %",
        "> 99.9 %",
        "100 %",
    ]


def test_counts_and_figures_separate_thousands():
    assert (count(19366), figure(19366), figure(4.567), figure(0.01234), gib(GIB * 1234)) == (
        "19,366", "19,366", "4.57", "0.0123", "1,234.00 GiB",
    )  # fmt: skip
