"""The design of experiments, and what can be learned from steps whose cost is known beforehand."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.errors import CalibrationError
from calibration.measuring.design import DesignPoint, Limits, design, pass_order
from calibration.measuring.quality import assess
from calibration.measuring.step_log import Step, StepRun
from calibration.numerics.max_affine import fit_max_affine, predict_max_affine
from calibration.timed_steps.fit_run import fit_run_profile
from calibration.timed_steps.model import TERMS, StepModel, dense_knots, fit_model, names, told_apart, weight_samples
from calibration.timed_steps.points import points_of, workspaces
from sim.core.batch_shape import BatchShape
from sim.costs.profile import FittedProfile
from sim.costs.profile_file import ProfileFile, model_terms

LIMITS = Limits(
    max_num_batched_tokens=512, max_num_seqs=32, max_model_len=1024, block_size=16, num_gpu_blocks=4000, num_cpu_blocks=128
)  # fmt: skip
KNOTS = dense_knots(512)
TRUTH = StepModel(
    knots=KNOTS,
    values={
        "step": 600.0, "sample_launch": 80.0, "rows": 25.0, "decode_launch": 60.0, "decode_seq": 150.0, "decode_context": 0.1,
        "decode_excess": 0.02, "chunk_launch": 80.0, "chunk_seq": 140.0, "chunk_pair": 0.013, "chunk_masked": 0.03,
        "chunk_context": 0.09, "copied_block": 5.0, "swapped_block": 4.0,
        "dense_1_4": 40.0, "dense_4_16": 130.0, "dense_16_64": 490.0, "dense_64_256": 2200.0, "dense_256_512": 2900.0,
    },
)  # fmt: skip
"""Weights about those of a two-layer model on one core, none of them 0."""


def timed(points: list[DesignPoint], *, noise: float = 0.0, repeats: int = 5, factor=lambda at: 1.0) -> StepRun:
    """A run folder as if steps cost what `TRUTH` says; `factor` is how slow the device is at a time, in [0, 1] of the run."""
    rng = np.random.default_rng(3)
    steps: list[Step] = []
    total = repeats * len(points) * 9 // 8
    for number in range(repeats):
        for count, point in enumerate(pass_order(points, 0, number)):
            for pass_, one in [(-1, points[0])] * (count % 8 == 0) + [(number, point)]:
                at = len(steps) / total
                us = float(TRUTH.predict([one.shape])[0]) * np.exp(rng.normal(0.0, noise)) * factor(at)
                steps.append(
                    Step(
                        session=0, pass_=pass_, point=one.point, group=one.group, elapsed_s=10 * at, duration_us=us,
                        shape=one.shape, workspace_bytes=1000 + 4352 * one.shape.num_tokens, process_bytes=10**8,
                    )
                )  # fmt: skip
    provenance = {
        "kvtwin_version": "0", "device": "cpu", "gpu": "cpu", "device_name": "a CPU", "torch": "2", "date": "2026-01-05", "command": "test",
    }  # fmt: skip
    attention = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    return StepRun(
        name="known",
        document={
            "provenance": provenance,
            "model": {
                "name": "tiny-llama-test", "num_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,
                "attention": [attention],
            },
            "settings": {"dtype": "float32", "kv_cache_dtype": "float32", "clock": "wall"},
            "limits": LIMITS.as_dict(),
            "memory": {"weights_bytes": 1, "device_reserved_bytes": None},
        },
        steps=tuple(steps),
    )  # fmt: skip


# ── the design ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_design_holds_every_corner_and_fills_the_space_between() -> None:
    points = design(LIMITS, 0)
    shapes = [point.shape for point in points]
    assert [point.point for point in points] == list(range(len(points)))
    assert BatchShape(
        decode_seqs=32, decode_context_tokens=32 * 1024, decode_max_context_tokens=1024, sampled_seqs=32
    ) in shapes  # fmt: skip
    assert BatchShape(prefill=((512, 511),)) in shapes
    assert BatchShape(prefill=((512, 0),), sampled_seqs=1) in shapes
    space = [point.shape for point in points if point.group == "space"]
    octaves = {int(np.log2(shape.num_tokens)) for shape in space if shape.prefill}
    assert octaves >= set(range(2, 9))
    assert {int(np.log2(shape.decode_seqs)) for shape in space if shape.decode_seqs} >= {0, 1, 2, 3, 4}
    assert any(shape.decode_max_context_tokens * shape.decode_seqs > 2 * shape.decode_context_tokens for shape in space)
    assert {point.kind for point in points} == {"decode", "prefill", "mixed"}


@given(
    tokens=st.integers(16, 5000), seqs=st.integers(4, 300), longest=st.integers(64, 9000), size=st.sampled_from([1, 16, 32]),
    blocks=st.integers(1, 20_000), seed=st.integers(0, 5),
)  # fmt: skip
@settings(max_examples=40)
def test_no_step_leaves_the_limits(tokens: int, seqs: int, longest: int, size: int, blocks: int, seed: int) -> None:
    if seqs > tokens:
        return
    limits = Limits(
        max_num_batched_tokens=tokens, max_num_seqs=seqs, max_model_len=longest, block_size=size, num_gpu_blocks=blocks
    )  # fmt: skip
    if max(1, seqs // 8) * -(-(longest // 8 + 1) // size) > blocks:  # the reference step
        with pytest.raises(CalibrationError, match="no room for the reference step"):
            design(limits, seed)
        return
    points = design(limits, seed)
    for point in points:
        assert 1 <= point.shape.num_tokens <= tokens
        assert len(point.shares) <= seqs
        assert all(share.context_tokens + share.num_tokens <= longest for share in point.shares)
        assert all(share.num_tokens == 1 for share in point.shares if share.decode)
        assert point.blocks(size) <= blocks
    assert len({(point.shares, point.copied_blocks, point.swapped_blocks) for point in points}) == len(points)
    assert design(limits, seed) == points


def test_each_pass_has_every_step_once_in_another_order_corners_first() -> None:
    points = design(LIMITS, 0)
    first, second = pass_order(points, 0, 0), pass_order(points, 0, 1)
    assert first != second
    assert {point.point for point in first} == {point.point for point in second} == {p.point for p in points} - {0}
    groups = [point.group for point in first]
    assert groups == sorted(groups, key=("corner", "space", "moves").index)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"max_num_seqs": 2}, "max_num_seqs is 2"), ({"max_model_len": 8}, "at least 64"), ({"max_num_seqs": 600}, "above max_num_batched")],
)  # fmt: skip
def test_limits_that_tell_nothing_apart_are_refused(change: dict[str, int], words: str) -> None:
    with pytest.raises(CalibrationError, match=words):
        dataclasses.replace(LIMITS, **change)


# ── known costs ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_injected_weights_are_recovered_exactly_without_noise() -> None:
    shapes = [point.shape for point in design(LIMITS, 0)]
    assert fit_model(shapes, TRUTH.predict(shapes), KNOTS).values == pytest.approx(TRUTH.values, rel=1e-3)


def test_with_noise_steps_are_priced_within_a_hundredth_and_intervals_hold_the_truth() -> None:
    points = points_of(timed(design(LIMITS, 0), noise=0.02))
    fit = fit_model(points.shapes, points.time_us, KNOTS)
    truth = TRUTH.predict(points.shapes)
    assert np.median(np.abs(fit.predict(points.shapes) / truth - 1)) < 0.01
    samples = weight_samples(points.shapes, points.time_us, KNOTS, resamples=100)
    inside = 0
    for name in names(KNOTS):
        low, high = np.quantile([one.values[name] for one in samples], [0.025, 0.975])
        inside += bool(low <= TRUTH.values[name] <= high)
    assert inside >= 0.8 * len(names(KNOTS))


def test_the_profile_prices_steps_as_the_model_behind_it_does() -> None:
    """Tables and closed forms of the simulator against the sum of terms, over the whole design."""
    run = timed(design(LIMITS, 0))
    profile = fit_run_profile(run, date="2026-01-05", command="test")
    file = ProfileFile(
        name="x", kind="model", gpu="cpu", model="tiny-llama-test", tensor_parallel_size=1, data=profile, where="x"
    )  # fmt: skip
    cost = FittedProfile(model_terms(file, 2, copy_block_s=1.0, swap_block_s=1.0), name="x")
    shapes = [point.shape for point in design(LIMITS, 0)]
    priced = np.asarray([cost.step_fs(shape) * 1e-9 for shape in shapes])
    error = np.abs(priced / TRUTH.predict(shapes) - 1)
    assert error.max() < 0.005
    stretch = cost.decode_stretch(8, 8 * 100, 40, 100)
    stepped = sum(
        cost.step_fs(
            BatchShape(
                decode_seqs=8, decode_context_tokens=8 * (100 + i), decode_max_context_tokens=100 + i, sampled_seqs=8
            )
        )
        for i in range(40)
    )
    assert stretch.total_fs == stepped


def test_what_the_steps_cannot_tell_apart_is_named() -> None:
    shapes = [point.shape for point in design(LIMITS, 0) if point.kind == "decode" and not point.copied_blocks]
    found = told_apart(shapes, TRUTH.predict(shapes), KNOTS)
    assert found["rows"][0] < 1e-6, "every decode samples: a row and a decode are the same column"
    assert found["copied_block"] == (0.0, "")
    whole = [point.shape for point in design(LIMITS, 0)]
    told = told_apart(whole, TRUTH.predict(whole), KNOTS)
    assert min(share for share, _ in told.values()) > 0.02, told


def test_a_profile_says_how_wrong_it_is_and_what_it_does_not_know() -> None:
    swapless = [point for point in design(LIMITS, 0) if not point.swapped_blocks]
    profile = fit_run_profile(timed(swapless, noise=0.02), date="2026-01-05", command="test")
    assert 0 < profile["error"]["held_out"]["median"] < 0.02
    assert {"held_out_decode", "held_out_prefill", "held_out_mixed", "held_out_axis: decodes > 16"} <= set(
        profile["error"]
    )
    assert any(note.startswith("swapped_block: not measured") for note in profile["identifiability"])
    assert profile["range"] == {"max_tokens": 512, "max_seqs": 32, "max_context_tokens": 1024}
    assert set(profile["weights"]) == {*TERMS, *(name for name in names(KNOTS) if name.startswith("dense"))}
    assert profile["memory"]["workspace_error"]["median"] < 0.01


def test_too_few_steps_of_a_kind_are_refused() -> None:
    points = [point for point in design(LIMITS, 0) if point.kind == "decode" or point.point % 9 == 0]
    with pytest.raises(CalibrationError, match="different prefill steps cannot identify"):
        points_of(timed(points))


def test_a_gpu_that_the_catalogue_does_not_know_must_be_named() -> None:
    run = timed(design(LIMITS, 0))
    provenance = {
        **run.document["provenance"],
        "device": "cuda",
        "gpu": None,
        "device_name": "NVIDIA Quadro 1",
        "triton": "3",
    }
    unknown = dataclasses.replace(run, document={**run.document, "provenance": provenance})
    with pytest.raises(CalibrationError, match="NVIDIA Quadro 1, which is not in the catalogue"):
        fit_run_profile(unknown, date="2026-01-05", command="test")
    named = fit_run_profile(unknown, date="2026-01-05", command="test", gpu="h200")
    assert named["gpu"] == "h200-sxm-141gb"


# ── a device that does not keep still ────────────────────────────────────────────────────────────────────────────────
def test_a_wild_repeat_is_left_out() -> None:
    run = timed(design(LIMITS, 0), noise=0.02)
    steps = list(run.steps)
    steps[100] = dataclasses.replace(steps[100], duration_us=steps[100].duration_us * 5)
    quality, kept = assess(steps)
    assert not kept[100]
    assert kept.sum() >= len(steps) - 20
    assert quality.noise_floor == pytest.approx(0.02, rel=0.25)
    assert quality.drift == pytest.approx(0.0, abs=0.01)
    assert quality.flags == ()


def test_steps_timed_while_the_device_was_throttled_are_left_out_and_the_fit_is_as_without_them() -> None:
    run = timed(design(LIMITS, 0), noise=0.01, factor=lambda at: 1.5 if 0.5 < at < 0.7 else 1.0)
    quality, kept = assess(run.steps)
    assert quality.slowest == pytest.approx(1.5, rel=0.05)
    assert 0.15 < 1 - kept.mean() < 0.25
    assert "slow when they were timed" in quality.flags[0]
    points = points_of(run)
    error = fit_model(points.shapes, points.time_us, KNOTS).predict(points.shapes) / TRUTH.predict(points.shapes) - 1
    assert np.median(error) == pytest.approx(0.0, abs=0.01)


def test_how_slow_the_device_was_changes_nothing_in_what_a_step_needs() -> None:
    steady, throttled = (
        timed(design(LIMITS, 0), repeats=1, factor=factor)
        for factor in (lambda at: 1.0, lambda at: 1.5 if at > 0.8 else 1.0)
    )
    assert len(points_of(throttled).shapes) < len(points_of(steady).shapes), (
        "some steps were only timed while it was slow"
    )
    ours, theirs = workspaces(steady), workspaces(throttled)
    assert ours[0] == theirs[0]
    assert ours[1].tolist() == theirs[1].tolist() == [1000 + 4352 * shape.num_tokens for shape in ours[0]]


def test_a_device_without_a_usual_speed_is_flagged_and_nothing_is_left_out() -> None:
    quality, kept = assess(timed(design(LIMITS, 0), noise=0.01, factor=lambda at: 1.0 if at < 0.55 else 1.4).steps)
    assert kept.all() or quality.slow == 0
    assert "changed its speed" in quality.flags[0]
    drifting, _ = assess(timed(design(LIMITS, 0), noise=0.01, factor=lambda at: 1.0 + 0.2 * at).steps)
    assert drifting.drift == pytest.approx(0.18, abs=0.04)
    assert any("drifted" in flag for flag in drifting.flags)


def test_without_the_reference_step_nothing_is_known_of_the_speed() -> None:
    run = timed(design(LIMITS, 0), repeats=1)
    with pytest.raises(CalibrationError, match="reference step was timed 0 times"):
        assess([step for step in run.steps if step.group != "reference"])


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_widest_of_several_phases_is_recovered() -> None:
    rng = np.random.default_rng(0)
    design_ = np.stack([np.ones(300), rng.uniform(1, 512, 300), rng.uniform(1, 2048, 300)], axis=1)
    phases = np.asarray([[500.0, 4352.0, 0.0], [4000.0, 1400.0, 390.0]])
    y = predict_max_affine(phases, design_)
    found = fit_max_affine(design_, y, 3)
    assert predict_max_affine(found, design_) == pytest.approx(y, rel=1e-3)
    one = fit_max_affine(design_, design_ @ phases[0], 1)
    assert one[0] == pytest.approx(phases[0], rel=1e-6, abs=1e-6)
