"""The judge: intervals from blocks of neighbouring requests, gaps between tokens, and preemptions that may be too few to tell."""

import csv
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sim
from calibration.errors import CalibrationError
from calibration.judging.judge import Judgement, Margins, judge
from calibration.judging.page import page
from calibration.judging.preemptions import judge_preemptions, poisson_ratio
from calibration.judging.trajectories import CANNOT_TELL, DIFFERENT, EQUIVALENT, mean_ratio, ratio_verdict
from calibration.numerics.resampling import Pooled, block_resamples, central_90
from calibration.recorded.own_run import read_own_run
from calibration.recorded.runs import RecordedRun
from calibration.recorded.twin import SimulatedRun, simulate_requests
from sim.core.request import RequestSpec
from tests.support.pages import loads_nothing

SCENARIO = {
    "model": "llama-3.1-8b",
    "gpu": "rtx-4090",
    "profile": "auto",
    "max_model_len": 8192,
    "num_gpu_blocks_override": 900,
}


# ── resampling ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_resample_is_made_of_neighbours_and_always_the_same() -> None:
    chosen = block_resamples(27, resamples=40)
    assert chosen.shape == (40, 27)
    assert (chosen == block_resamples(27, resamples=40)).all()
    inside = (np.diff(chosen.reshape(40, 9, 3), axis=2) % 27 == 1).all()
    assert inside, "blocks of 27^(1/3) = 3, the last followed by the first"
    assert block_resamples(1).tolist() == [[0]] * 500
    assert set(np.bincount(block_resamples(64, resamples=500).ravel()) > 0) == {True}, "nobody is left out"


def test_blocks_hold_the_truth_where_neighbours_are_alike_and_single_draws_do_not() -> None:
    """Means of 125 values, each the mean of 5 neighbours of noise: 90 % intervals, 300 series."""
    rng = np.random.default_rng(5)
    held = {1: 0, 5: 0}
    for _ in range(300):
        series = np.convolve(rng.standard_normal(129), np.ones(5) / 5, mode="valid")
        for length in held:
            low, high = central_90(series[block_resamples(125, length=length)].mean(axis=1))
            held[length] += low <= 0 <= high
    assert held[1] / 300 < 0.62, "as if there were five times as many witnesses: 1.645 / sqrt(5) deviations hold 54 %"
    assert held[5] / 300 > 0.78


@given(
    st.lists(st.lists(st.floats(0.001, 10), max_size=6), min_size=1, max_size=8).filter(lambda groups: any(groups)),
    st.data(),
)
def test_pooled_statistics_are_those_of_all_values_written_out(groups: list[list[float]], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(groups) - 1), min_size=1, max_size=10))
    written = [value for place in chosen for value in groups[place]]
    found = Pooled([np.asarray(group, dtype=float) for group in groups]).statistics(
        np.asarray(chosen), (50.0, 90.0, 99.0)
    )
    if not written:
        assert np.isnan(found).all()
        return
    assert found == pytest.approx([np.mean(written), *np.percentile(written, (50, 90, 99))], rel=1e-9)


# ── counts ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_ratio_of_two_counts_has_an_exact_interval() -> None:
    """10 and 10: of 20 events 10, whose 90 % interval by Clopper and Pearson is 0.3020 to 0.6980."""
    low, high = poisson_ratio(10, 10)
    assert (low, high) == pytest.approx((0.3020 / 0.6980, 0.6980 / 0.3020), rel=2e-3)
    low, high = poisson_ratio(10_000, 10_000)
    assert (math.log(low), math.log(high)) == pytest.approx(
        (-1.645 * math.sqrt(2e-4), 1.645 * math.sqrt(2e-4)), rel=0.01
    )
    assert poisson_ratio(5, 0)[0] == 0.0
    assert poisson_ratio(0, 5)[1] == math.inf


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.81, 1.24, EQUIVALENT),
        (0.79, 1.0, CANNOT_TELL),
        (1.0, 1.26, CANNOT_TELL),
        (1.26, 2.0, DIFFERENT),
        (0.1, 0.79, DIFFERENT),
        (0.0, math.inf, CANNOT_TELL),
    ],
)
def test_a_ratio_is_judged_by_its_interval(low: float, high: float, verdict: str) -> None:
    assert ratio_verdict(low, high, 0.25) == verdict


@pytest.fixture(scope="module")
def pressed() -> tuple[RecordedRun, SimulatedRun]:
    """A run under KV pressure that is its own twin: what was measured is what the simulation says."""
    scenario = sim.Scenario.from_flags(SCENARIO)
    rng = np.random.default_rng(2)
    requests = tuple(
        RequestSpec(
            request_id=str(i),
            arrival_s=0.05 * i,
            input_tokens=int(rng.integers(50, 600)),
            output_tokens=int(rng.integers(20, 300)),
        )
        for i in range(160)
    )
    twin = simulate_requests(scenario, requests)
    assert twin.preemptions.sum() == twin.summary["num_preemptions"] > 40
    ticks = np.linspace(0.0, twin.makespan_s, 400, endpoint=False)
    state = twin.at(ticks)
    run = RecordedRun(
        name="itself", provenance="made up", requests=requests, ttft_s=twin.ttft_s, tpot_s=twin.tpot_s, e2el_s=twin.e2el_s,
        finished_s=twin.finished_s, scheduled_s=twin.scheduled_s, ticks_s=ticks,
        trajectories={name: state[name] for name in ("running", "waiting", "kv_usage")},
        itl_s={name: twin.summary["itl_s"][name] for name in ("mean", "p50", "p90", "p99")}, itl_gaps_s=twin.itl_gaps_s,
        num_preemptions=int(twin.preemptions.sum()), preemptions=twin.preemptions,
    )  # fmt: skip
    return run, twin


def counted(run: RecordedRun, by_request: np.ndarray | None, total: int | None) -> RecordedRun:
    return dataclasses.replace(run, preemptions=by_request, num_preemptions=total)


def test_preemptions_of_a_run_and_itself_are_equivalent_and_twice_as_many_are_different(
    pressed: tuple[RecordedRun, SimulatedRun],
) -> None:
    run, twin = pressed
    assert judge_preemptions(run, twin, 0.25).verdict == EQUIVALENT
    doubled = judge_preemptions(counted(run, 2 * twin.preemptions, 2 * int(twin.preemptions.sum())), twin, 0.25)
    assert (doubled.ratio, doubled.verdict) == (0.5, DIFFERENT)
    assert doubled.low == doubled.high == 0.5, "every block has twice as many"


def test_few_preemptions_cannot_tell_even_where_they_are_equal(pressed: tuple[RecordedRun, SimulatedRun]) -> None:
    run, twin = pressed
    few = dataclasses.replace(twin, summary={**twin.summary, "num_preemptions": 5})
    for measured in (2, 5):
        found = judge_preemptions(counted(run, None, measured), few, 0.25)
        assert found.verdict == CANNOT_TELL
        assert (found.low, found.high) == pytest.approx(poisson_ratio(measured, 5))
        assert "two Poisson counts" in found.why
    assert judge_preemptions(counted(run, None, 60), few, 0.25).verdict == DIFFERENT
    none = dataclasses.replace(twin, summary={**twin.summary, "num_preemptions": 0})
    assert judge_preemptions(counted(run, None, 0), none, 0.25).verdict == EQUIVALENT
    assert judge_preemptions(counted(run, None, 1), none, 0.25).verdict == CANNOT_TELL
    assert judge_preemptions(counted(run, None, 8), none, 0.25).verdict == DIFFERENT


def test_what_was_not_counted_is_not_judged_and_decides_nothing(pressed: tuple[RecordedRun, SimulatedRun]) -> None:
    run, twin = pressed
    found = judge(counted(run, None, None), twin)
    assert (found.preemptions.verdict, found.preemptions.measured) == (CANNOT_TELL, None)
    assert found.verdict == EQUIVALENT
    assert "preemptions" not in found.untold


def test_what_there_is_too_little_of_is_said_and_left_out_of_the_verdict(
    pressed: tuple[RecordedRun, SimulatedRun],
) -> None:
    run, twin = pressed
    few = dataclasses.replace(twin, summary={**twin.summary, "num_preemptions": 4})
    found = judge(counted(run, None, 5), few)
    assert found.verdict == EQUIVALENT
    assert "preemptions" in found.untold
    assert found.as_dict()["cannot_tell"] == list(found.untold)
    many = judge(run, twin, Margins(preemptions=0.9))
    assert many.as_dict()["preemptions"]["margin"] == 0.9
    with pytest.raises(CalibrationError, match="margin preemptions is 1"):
        Margins(preemptions=1.0)


def test_occupancy_is_judged_by_the_interval_of_its_mean(pressed: tuple[RecordedRun, SimulatedRun]) -> None:
    run, twin = pressed
    state = twin.at(run.ticks_s)["preempted"]
    assert mean_ratio(state, state) == (1.0, 1.0)
    low, high = mean_ratio(state, 1.5 * state)
    assert (low, high) == pytest.approx((1.5, 1.5))
    shifted = mean_ratio(state, np.roll(state, 40))
    assert shifted[0] < 1 < shifted[1], "the same occupancy at other times: the interval holds 1"


# ── gaps between tokens ──────────────────────────────────────────────────────────────────────────────────────────────
def test_gaps_of_a_request_span_its_decode_and_together_they_are_those_of_the_summary(
    pressed: tuple[RecordedRun, SimulatedRun],
) -> None:
    _, twin = pressed
    for gaps, tpot in zip(twin.itl_gaps_s, twin.tpot_s.tolist(), strict=True):
        assert gaps.mean() == pytest.approx(tpot, rel=1e-9), "TPOT is the mean gap"
    together = np.concatenate(twin.itl_gaps_s)
    assert together.mean() == pytest.approx(twin.summary["itl_s"]["mean"], rel=1e-9)
    assert np.percentile(together, 99) == pytest.approx(twin.summary["itl_s"]["p99"], rel=1e-9)


def metric_of(judged: Judgement, name: str):
    return next(metric for metric in judged.metrics if metric.name == name)


def test_itl_has_an_interval_that_moves_with_the_error(pressed: tuple[RecordedRun, SimulatedRun]) -> None:
    run, twin = pressed
    rng = np.random.default_rng(4)
    jittered = tuple(gaps * 1.04 * np.exp(0.02 * rng.standard_normal()) for gaps in run.itl_gaps_s)
    slower = dataclasses.replace(run, itl_gaps_s=jittered)
    mean = metric_of(judge(slower, twin), "itl_mean_s")
    assert mean.low < mean.error < mean.high
    assert mean.error == pytest.approx(1 / 1.04 - 1, abs=0.005)
    assert mean.high - mean.low < 0.02
    assert metric_of(judge(run, twin), "itl_p99_s").error == 0.0


def test_without_every_gap_itl_is_a_single_value(pressed: tuple[RecordedRun, SimulatedRun]) -> None:
    run, twin = pressed
    metric = metric_of(judge(dataclasses.replace(run, itl_gaps_s=None), twin), "itl_p90_s")
    assert metric.low == metric.high == metric.error == 0.0


def test_the_page_has_every_verdict_and_every_state(pressed: tuple[RecordedRun, SimulatedRun]) -> None:
    run, twin = pressed
    text = page(judge(counted(run, None, None), twin))
    for words in (
        "inter-token latency (ITL), p99",
        "cannot tell",
        "Preempted requests",
        "measured, s</text>",
        "equivalent",
    ):
        assert words in text, words
    assert loads_nothing(text)


# ── runs of our own ──────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch", reason="a real run needs torch")
    from experiments.real_run import run_scenario

    scenario = sim.Scenario(
        model={"model": "tiny-llama-test"},
        engine={"num_gpu_blocks_override": 40, "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64},
        workload={
            "workload": "uniform",
            "num_requests": 20,
            "rate": 500.0,
            "input_tokens": [8, 100],
            "output_tokens": [2, 30],
        },
        run={"executor": "torch", "device": "cpu"},
    )
    folder = tmp_path_factory.mktemp("own") / "real"
    run_scenario(scenario).save(folder)
    return folder


def test_a_real_run_keeps_every_gap_and_is_read_with_them(real: Path) -> None:
    run = read_own_run(real)
    assert run.itl_gaps_s is not None
    outputs = [spec.target_tokens for spec in run.requests]
    assert [gaps.size for gaps in run.itl_gaps_s] == [count - 1 for count in outputs]
    spans = [gaps.sum() for gaps in run.itl_gaps_s]
    assert spans == pytest.approx((run.e2el_s - run.ttft_s).tolist(), abs=1e-6)
    assert run.preemptions is not None
    assert int(run.preemptions.sum()) == run.num_preemptions
    assert run.scenario is not None
    assert run.scenario.engine.num_gpu_blocks_override == 40, "the twin gets the pool that was there"


@pytest.mark.parametrize(
    ("gap", "words"),
    [("soon", "holds seconds, separated by spaces"), ("-0.1", "a gap that is no time"), ("inf", "no time")],
)
def test_gaps_that_are_no_times_are_refused(real: Path, tmp_path: Path, gap: str, words: str) -> None:
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(real, folder)
    rows = list(csv.DictReader((folder / "itl.csv").read_text().splitlines()))
    rows[3]["itl_s"] = gap
    with (folder / "itl.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(CalibrationError, match=words):
        read_own_run(folder)


def test_a_simulation_writes_no_gaps(tmp_path: Path) -> None:
    result = sim.simulate(sim.Scenario.from_flags({**SCENARIO, "workload": "uniform", "num_requests": 3}))
    result.save(tmp_path / "out")
    assert not (tmp_path / "out" / "itl.csv").exists()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["finished"] == 3
