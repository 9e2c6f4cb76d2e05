"""Intervals of predictions: every source of uncertainty moves what it should, always alike, and intervals hold at their stated rate."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calibration.errors import CalibrationError
from calibration.judging.speed import at_speed
from calibration.judging.uncertainty import LEAST_DRAWS, SHARE, drawn, draws, next_value, sources_of
from calibration.recorded.host import Correction, fit_correction
from calibration.timed_steps.fit_run import fit_run_profile
from experiments.cli import main
from experiments.interval_coverage import coverage, noisy_run, true_cost
from sim.catalog.gpus import gpu
from sim.catalog.models import model_shape
from sim.core.batch_shape import BatchShape
from sim.core.config import ConfigError
from sim.costs.fitted import FOLDER, fitted_cost
from sim.costs.profile import FittedProfile
from sim.costs.profile_file import read_profile
from tests.support.refusals import Refusals

DECODE = BatchShape(decode_seqs=8, decode_context_tokens=8000, decode_max_context_tokens=1000, sampled_seqs=8)
LLAMA = "llama-3.1-8b"


# ── the interval ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_interval_is_students() -> None:
    """Of five logarithms 0, 1, 2, 3, 4: mean 2, deviation sqrt(2.5), t of 4 degrees at 95 % is 2.1318."""
    half = 2.131847 * math.sqrt(2.5) * math.sqrt(1.2)
    low, high = next_value([math.exp(x) for x in range(5)])
    assert (math.log(low), math.log(high)) == pytest.approx((2 - half, 2 + half), rel=1e-5)
    assert next_value([-1.0, 0.0, 1.0, 2.0]) == pytest.approx(
        (0.5 - 2.353363 * math.sqrt(5 / 3 * 1.25), 0.5 + 2.353363 * math.sqrt(5 / 3 * 1.25)), rel=1e-5
    ), "values around 0 are taken as they are"


@pytest.mark.parametrize("count", [LEAST_DRAWS, 12, 40])
def test_the_next_value_lies_in_it_as_often_as_is_said(count: int) -> None:
    rng = np.random.default_rng(3)
    held = 0
    for values in np.exp(0.2 * rng.standard_normal((2000, count + 1))):
        low, high = next_value(values[:-1].tolist())
        held += low <= values[-1] <= high
    assert held / 2000 == pytest.approx(SHARE, abs=0.02)  # three standard errors of 2,000 trials


# ── its sources ──────────────────────────────────────────────────────────────────────────────────────────────────────
def embedded(name: str, model: str = LLAMA, device: str = "h100") -> FittedProfile:
    return fitted_cost(name, model_shape(model), gpu(device))


def with_only(cost: FittedProfile, **kept: object) -> FittedProfile:
    """The prices with no uncertainty but what is given."""
    bare = {"samples": {}, "drawn": (), "spreads": {}, "host_samples": ()}
    return FittedProfile(replace(cost.terms, **{**bare, **kept}), name=cost.name)


def test_what_is_uncertain_of_a_profile_is_what_it_does_not_know() -> None:
    composed, measured = embedded("h100-sxm-80gb"), embedded("rtx-4090-24gb.llama-3.1-8b.tp1", device="rtx-4090")
    assert sources_of(composed) == ("terms", "composition", "gap")
    assert sources_of(measured) == ("terms", "gap"), "tables of this very model: nothing is composed"
    axis = read_profile(FOLDER / "h100-sxm-80gb.json").data["error"]["held_out_axis: sequences > 128"]["median"]
    assert composed.terms.spreads["composition"] == pytest.approx(axis / 0.67449)
    assert composed.terms.spreads["gap"] == pytest.approx(math.log(2) / 1.96, rel=1e-4)
    card = embedded("rtx-4090-24gb", device="rtx-4090")
    shapes = read_profile(FOLDER / "rtx-4090-24gb.json").data["error"]["held_out_gemm_shape"]["median"]
    assert card.terms.spreads["composition"] == pytest.approx(shapes / 0.67449)


def test_the_gap_alone_moves_the_gap_by_a_factor_of_two_either_way() -> None:
    cost = embedded("rtx-4090-24gb.llama-3.1-8b.tp1", device="rtx-4090")
    only = with_only(cost, spreads={"gap": cost.terms.spreads["gap"]})
    factors = np.asarray([drawn(only, number).terms.gap_s / cost.terms.gap_s for number in range(400)])
    assert np.quantile(factors, [0.025, 0.5, 0.975]) == pytest.approx([0.5, 1.0, 2.0], rel=0.15)
    assert drawn(only, 0).terms.dense == cost.terms.dense


@pytest.mark.parametrize("source", ["step", "composition"])
def test_a_whole_step_moves_by_one_factor(source: str) -> None:
    cost = with_only(embedded("h100-sxm-80gb"), spreads={source: 0.05})
    bare = FittedProfile(replace(cost.terms, gap_s=0.0), name="bare")
    chunk = BatchShape(prefill=((512, 0),), sampled_seqs=1)
    ratios = [
        [drawn(bare, number).step_fs(shape) / bare.step_fs(shape) for shape in (DECODE, chunk)] for number in range(200)
    ]
    assert all(one == pytest.approx(other, rel=1e-6) for one, other in ratios)
    assert np.std(np.log([one for one, _ in ratios])) == pytest.approx(0.05, rel=0.2)


def test_fitted_host_times_are_drawn_together() -> None:
    pairs = tuple((1e-3 + i * 1e-5, 0.0, 5e-5 - i * 1e-6) for i in range(40))
    cost = with_only(embedded("h100-sxm-80gb"), host_samples=pairs)
    found = {
        (one.terms.step_s, one.terms.seq_s, one.terms.token_s) for one in (drawn(cost, number) for number in range(60))
    }
    assert found <= set(pairs)
    assert len(found) > 20


def test_the_same_number_is_the_same_draw_and_another_is_another() -> None:
    cost = embedded("h100-sxm-80gb")
    assert [one.step_fs(DECODE) for one in draws(cost, 6)] == [one.step_fs(DECODE) for one in draws(cost, 6)]
    assert len({one.step_fs(DECODE) for one in draws(cost, 60)}) == 60, (
        "beyond the 40 of the file in other combinations"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"error": {"misfit": -0.1}}, "the spread of its step is -0.1"),
        ({"error": {"misfit": "small"}}, "the spread of its step is 'small'"),
        ({"host": {"samples": {"step_us": [-1.0]}}}, r"host\.samples\.step_us\[0\] is -1\.0"),
    ],
)
def test_a_spread_that_is_none_is_refused(tmp_path: Path, change: dict[str, dict[str, object]], words: str) -> None:
    data = json.loads((FOLDER / "rtx-4090-24gb.llama-3.1-8b.tp1.json").read_text())
    for section, values in change.items():
        data[section].update(values)
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=words):
        fitted_cost(str(tmp_path / "p.json"), model_shape(LLAMA), gpu("rtx-4090"))


def test_a_correction_is_drawn_by_its_slopes() -> None:
    """Two observations, 20 ms + a step and 300 ms + 900 tokens: one that is measured 1 % longer asks for 1 % of it more."""

    def predict(times: Correction) -> np.ndarray:
        return np.asarray([0.02 + times.step_s, 0.3 + 900 * times.token_s])

    measured = predict(Correction(step_s=1e-3, token_s=2e-5))
    fit = fit_correction(predict, measured)
    more = fit.drawn(np.asarray([-0.01, 0.0]))
    assert more.step_s == pytest.approx(1e-3 + 0.01 * measured[0], rel=1e-4)
    assert more.token_s == pytest.approx(2e-5, rel=1e-4)
    assert fit.drawn(np.asarray([0.5, 0.5])) == Correction(), "never below 0"


# ── what a fit to timed steps leaves ─────────────────────────────────────────────────────────────────────────────────
def test_a_misfit_is_found_beside_the_noise_and_none_where_there_is_none() -> None:
    left = [fit_run_profile(noisy_run(seed), date="", command="")["error"]["misfit"] for seed in range(4)]
    assert sorted(left)[:3] == [0.0, 0.0, 0.0]
    bent = [fit_run_profile(noisy_run(seed, bend=0.06), date="", command="")["error"]["misfit"] for seed in range(3)]
    assert bent == pytest.approx([0.06] * 3, rel=0.25)


def test_a_profile_of_timed_steps_keeps_whole_draws_of_its_tables(tmp_path: Path) -> None:
    from calibration.document import write
    from sim.catalog.host import HOST

    profile = fit_run_profile(noisy_run(0), date="today", command="test")
    write(profile, tmp_path / "p.json")
    cost = fitted_cost(str(tmp_path / "p.json"), model_shape("tiny-llama-test"), HOST)
    assert len(cost.terms.drawn) == 40
    first = drawn(cost, 0).terms
    assert first.dense.y == pytest.approx([us * 1e-6 for us in profile["drawn_terms"][0]["dense"]["us"]])
    assert first.prefill.z[3][1] == pytest.approx(profile["drawn_terms"][0]["prefill"]["us"][3][1] * 1e-6)


def test_intervals_of_weights_and_of_a_whole_run_hold_the_truth_at_about_their_stated_rate() -> None:
    """10 sets: 90 % of 40 predictions, 95 % of about 190 weights; `python -m experiments.interval_coverage` counts 40 sets."""
    found = coverage(10)
    assert 0.80 <= found.all_predictions <= 1.0
    assert 0.88 <= found.weights <= 0.99


def test_they_do_not_hold_what_is_wrong() -> None:
    """A device whose steps all take 5 % longer than was measured lies outside: the error of these fits is well below that."""
    found = coverage(5, truth=at_speed(true_cost(), 1.05))
    assert found.predictions["tpot_s"] <= 0.2


# ── as a user types it ───────────────────────────────────────────────────────────────────────────────────────────────
RUN = ["run", "--model", LLAMA, "--gpu", "h100-sxm-80gb", "--workload", "uniform", "--num-requests", "5"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*RUN, "--profile", "auto", "--profile-draws", "3"], ["--profile-draws is 3", "at least 4"]),
        ([*RUN, "--profile", "auto", "--profile-draws", "1", "--out", "o"], ["--profile-draws is 1", "at least 4"]),
        ([*RUN, "--profile-draws", "8", "--out", "o"], ["say nothing of their uncertainty", "--profile auto"]),
        (
            ["calibrate", "judge", "--run", "nothing", "--model", LLAMA, "--gpu", "h100", "--draws", "2"],
            ["--draws is 2", "at least 4"],
        ),
    ],
)
def test_draws_that_span_no_interval_are_refused_before_anything_runs(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refusals,
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(arguments, *words)
    assert not list(tmp_path.iterdir()), "nothing was made"


def test_a_run_says_which_uncertainty_is_in_its_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--profile", "auto", "--profile-draws", "5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = document["prediction_intervals"]
    assert found["sources"] == ["terms", "composition", "gap"]
    low, high = found["tpot_s"]["mean"]
    assert low < document["tpot_s"]["mean"] < high
    assert main([*RUN, "--profile", "auto", "--profile-draws", "5"]) == 0
    assert "another model's shape" in capsys.readouterr().out


def test_too_few_draws_are_refused_in_python_too() -> None:
    with pytest.raises(CalibrationError, match="at least 4"):
        draws(embedded("h100-sxm-80gb"), 3)
