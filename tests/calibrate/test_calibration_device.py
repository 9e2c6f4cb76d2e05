"""Measuring a GPU, as far as it can be tried without one: graphs against eager steps, steps that run out of memory, lowered clocks."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from calibration.errors import CalibrationError, StepTooLargeError
from calibration.measuring.design import design
from calibration.measuring.measure import first_pass, measure
from calibration.measuring.quality import assess, clock_flags
from calibration.measuring.settings import MeasureSettings
from calibration.measuring.step_log import StepRun, read_run
from calibration.timed_steps.fit_run import fit_run_profile
from calibration.timed_steps.points import eager_decode_us, points_of
from experiments.interval_coverage import LIMITS, noisy_run
from sim.catalog.host import HOST
from sim.catalog.models import model_shape
from sim.core.batch_shape import BatchShape
from sim.costs.fitted import fitted_cost

pytest.importorskip("torch", reason="measuring needs torch")

SMALL = MeasureSettings(
    model="tiny-llama-test", max_num_batched_tokens=128, max_num_seqs=8, max_model_len=128, clock="thread"
)  # fmt: skip


def rig_of(**settings: Any):
    from calibration.measuring.rig import StepRig

    shape = model_shape(SMALL.model)
    return StepRig(shape, SMALL.limits(shape), source=SMALL.model, clock="thread", **settings)


# ── graphs and eager steps ───────────────────────────────────────────────────────────────────────────────────────────
def test_with_graphs_the_corners_of_decodes_are_timed_without_them_too() -> None:
    plain, both = design(LIMITS, 0), design(LIMITS, 0, graphs=True)
    assert both[: len(plain)] == plain
    twins = both[len(plain) :]
    corners = [point for point in plain if point.group == "corner" and point.kind == "decode"]
    assert [point.shape for point in twins] == [point.shape for point in corners] != []
    assert {(point.group, point.eager) for point in twins} == {("eager", True)}
    assert len({point.point for point in both}) == len(both)


def test_a_rig_with_graphs_serves_decodes_by_them_and_eager_points_without(tmp_path: Path) -> None:
    """The CPU's graphs are buckets that are called again: the same path through buffers, padding and choice as on a GPU."""
    rig = rig_of(decode_graphs=True)
    assert rig.has_graphs
    points = design(rig.limits, 0, graphs=True)
    eager = next(point for point in points if point.group == "eager")
    graphed = next(point for point in points if point.group == "corner" and point.shape == eager.shape)
    chunk = next(point for point in points if point.kind == "prefill")
    assert rig.run(graphed).served_by.startswith("graph of")
    assert rig.run(eager).served_by == "eager"
    assert rig.run(graphed).served_by.startswith("graph of"), "graphs are there again"
    assert rig.run(chunk).served_by == "eager"
    run = measure(SMALL, 4.0, tmp_path / "run", command="test", rig=rig)
    done, whole = first_pass(run, SMALL)
    assert done == whole == len(points) - 1
    profile = fit_run_profile(run, date="today", command="test")
    assert profile["host"]["eager_decode_us"] >= 0.0
    assert any("timed both ways" in note for note in profile["identifiability"])


def with_eager(run: StepRun, longer_us: float) -> StepRun:
    """The run with every corner of decodes timed without its graph as well."""
    number = {point.shape: point.point for point in design(LIMITS, 0, graphs=True) if point.group == "eager"}
    twins = [
        dataclasses.replace(step, point=number[step.shape], group="eager", duration_us=step.duration_us + longer_us)
        for step in run.steps
        if step.group == "corner" and step.shape in number
    ]
    return dataclasses.replace(run, steps=(*run.steps, *twins))


def test_what_a_graph_saves_is_found_and_priced_for_decode_steps_alone(tmp_path: Path) -> None:
    from calibration.document import write

    run = with_eager(noisy_run(0), 700.0)
    assert eager_decode_us(run, points_of(run)) == pytest.approx(700.0, rel=0.02)
    plain = fit_run_profile(noisy_run(0), date="today", command="test")
    profile = fit_run_profile(run, date="today", command="test")
    assert profile["terms"] == plain["terms"], "steps without graphs are not mixed with the others"
    assert "eager_decode_us" not in plain["host"]
    write(profile, tmp_path / "p.json")
    shape = model_shape("tiny-llama-test")
    graphs, eager = (fitted_cost(str(tmp_path / "p.json"), shape, HOST, enforce_eager=flag) for flag in (False, True))
    decode = BatchShape(decode_seqs=8, decode_context_tokens=800, decode_max_context_tokens=100, sampled_seqs=8)
    chunk = BatchShape(prefill=((64, 0),), sampled_seqs=1)
    found = profile["host"]["eager_decode_us"]
    assert (eager.step_fs(decode) - graphs.step_fs(decode)) / 1e9 == pytest.approx(found, rel=1e-6)
    assert eager.step_fs(chunk) == graphs.step_fs(chunk), "chunks are launched one by one either way"
    assert any("as timed both ways" in text for text in eager.warnings())


# ── steps that run out of memory ─────────────────────────────────────────────────────────────────────────────────────
def test_a_step_that_runs_out_of_memory_leaves_the_device_as_it_was() -> None:
    rig = rig_of()
    points = design(rig.limits, 0)
    largest = max(points, key=lambda point: point.shape.num_tokens)
    moved = next(point for point in points if point.swapped_blocks)
    needed = rig.run(largest).workspace_bytes
    rig.executor.workspace.num_bytes = needed - 1
    for _ in range(3):
        with pytest.raises(StepTooLargeError, match=r"ran out of memory: [\d,]+ bytes for .*, [\d,]+ were free"):
            rig.run(largest)
        assert rig.executor.leaked_blocks == 0
        rig.run(points[0])
        rig.run(moved)
    assert rig.executor.leaked_blocks == 0


def test_steps_that_run_out_of_memory_are_skipped_and_said_and_not_tried_again(tmp_path: Path) -> None:
    rig = rig_of()
    points = design(rig.limits, 0)
    sizes = sorted((rig.run(point).workspace_bytes for point in points), reverse=True)
    rig.executor.workspace.num_bytes = sizes[len(points) // 10]
    run = measure(SMALL, 3.0, tmp_path / "run", command="test", rig=rig)
    skipped = run.document["skipped"]
    assert 0 < len(skipped) < len(points) // 4
    assert {step.point for step in run.steps}.isdisjoint(one["point"] for one in skipped)
    done, whole = first_pass(run, SMALL)
    assert done == whole
    profile = fit_run_profile(run, date="today", command="test")
    assert any(f"{len(skipped)} designed steps ran out of memory" in note for note in profile["identifiability"])
    rig.executor.workspace.num_bytes = sizes[0]
    again = measure(SMALL, run.spent_s + 1.0, tmp_path / "run", command="test", rig=rig)
    assert again.document["skipped"] == skipped


def test_a_range_too_wide_for_the_device_is_refused_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    rig = rig_of()
    rig.executor.workspace.num_bytes = rig.run(design(rig.limits, 0)[0]).workspace_bytes
    with pytest.raises(
        CalibrationError, match=r"designed steps ran out of memory, the last: .*; lower --max-num-batched-tokens"
    ):
        measure(SMALL, 3.0, tmp_path / "run", command="test", rig=rig)
    rig.executor.workspace.num_bytes = 512
    with pytest.raises(StepTooLargeError, match="step 0"):
        measure(SMALL, 3.0, tmp_path / "other", command="test", rig=rig)


# ── clocks ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class FakeNvml(SimpleNamespace):
    """As much of `pynvml` as clocks need; what is not given is not supported."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid


def clocks_of(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> dict[str, Any]:
    from gpu import nvml

    monkeypatch.setattr(nvml, "_uuid", lambda device: "GPU-1")
    return nvml.nvml_clocks("cuda", module=FakeNvml(**answers))


def test_clocks_are_read_with_what_slows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = clocks_of(
        monkeypatch,
        nvmlDeviceGetCurrentClocksEventReasons=lambda handle: 0x1 | 0x4 | 0x20,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1410,
        nvmlDeviceGetTemperature=lambda handle, kind: 88,
        nvmlDeviceGetPowerUsage=lambda handle: 699_500,
    )
    assert found == {
        "sm_clock_mhz": 1410,
        "temperature_c": 88,
        "power_w": 699.5,
        "slowed_by": ["power limit", "temperature"],
    }


def test_a_driver_that_tells_less_is_taken_for_what_it_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(handle: str, *rest: int) -> int:
        raise FakeNvml.NVMLError("Not Supported")

    older = clocks_of(
        monkeypatch, nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x40, nvmlDeviceGetClockInfo=refuses
    )
    assert older == {
        "sm_clock_mhz": None,
        "temperature_c": None,
        "power_w": None,
        "slowed_by": ["temperature, by hardware"],
    }


def test_lowered_clocks_are_flagged_and_steady_ones_are_not() -> None:
    def reading(megahertz: int | None, *words: str) -> dict[str, Any]:
        return {"elapsed_s": 0.0, "sm_clock_mhz": megahertz, "slowed_by": list(words)}

    steady = [reading(1980)] * 20
    assert clock_flags(steady) == []
    assert clock_flags([]) == []
    flags = clock_flags([*steady, *[reading(1500, "power limit")] * 5])
    assert flags == [
        "the GPU lowered its clocks in 20% of 25 readings: power limit",
        "the GPU's clock fell to 1500 MHz from usually 1980: steps timed then took longer",
    ]
    assert clock_flags([{"absent": "the library is not installed"}]) == [
        "whether the GPU lowered its clocks is not known: the library is not installed"
    ]
    assert clock_flags([{"sm_clock_mhz": None, "slowed_by": None}]) == []


def test_clocks_are_kept_with_the_run_and_flagged_in_the_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of()
    slowed = {"sm_clock_mhz": 1200, "temperature_c": 90, "power_w": 300.0, "slowed_by": ["temperature"]}
    monkeypatch.setattr(type(rig), "clocks", lambda self: slowed)
    measure(SMALL, 2.0, tmp_path / "run", command="test", rig=rig)
    run = read_run(tmp_path / "run")
    references = [step for step in run.steps if step.group == "reference"]
    assert len(run.document["clocks"]) == len(references)
    quality, _ = assess(run.steps, run.document["clocks"])
    assert "the GPU lowered its clocks in 100% of" in " ".join(quality.flags)
    profile = fit_run_profile(run, date="today", command="test")
    assert any("lowered its clocks" in flag for flag in profile["quality"]["flags"])


@pytest.mark.gpu
@pytest.mark.slow
def test_a_gpu_is_measured_and_fitted(tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    settings = MeasureSettings(
        model="llama-3.2-1b", device="cuda", max_num_batched_tokens=1024, max_num_seqs=32, max_model_len=2048
    )
    run = measure(settings, 60.0, tmp_path / "run", command="test")
    profile = fit_run_profile(
        run, date="today", command="test", gpu=run.document["provenance"]["gpu"] or "h100-sxm-80gb"
    )
    assert profile["memory"]["lines"]["weights"]["bytes"] > 2e9
    assert profile["error"]["held_out"]["median"] < 0.15
    assert profile["host"]["eager_decode_us"] > 0
