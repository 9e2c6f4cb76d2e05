"""The one-file report."""

import json
import re

import pytest

from sim.results.result import Result
from tests.support.pages import Page, loads_nothing
from tests.support.results import ACCOUNT, GIB, Account, Line, good, make, printed, request, step


def page_of(result, tmp_path):
    return result.report(tmp_path / "report.html").read_text()


def figures_of(page):
    return json.loads(
        re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL).group(1)
    )


def words_of(page):
    """The page without plotly.js and the style sheet."""
    return re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page, flags=re.DOTALL)


def test_the_report_embeds_plotly_once_and_loads_nothing(tmp_path):
    from plotly.offline import get_plotlyjs

    page = page_of(good(), tmp_path)
    assert page.count(get_plotlyjs()) == 1
    assert loads_nothing(page)
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
