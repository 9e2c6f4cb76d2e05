"""Runs a scenario by whatever carries out its steps: the simulator, or, with executor torch, a model on a device.

The simulator knows nothing of torch, and the device nothing of the simulated world; here they meet. On a CUDA device the GPU's
entry in the catalogue is found by its name, and the ledger sizes the pool with what the device really has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sim
from sim.core.config import ConfigError
from sim.scenario_errors import ScenarioError

from .real_memory import real_memory_columns
from .real_progress import RealProgress

if TYPE_CHECKING:
    from gpu.op_timeline import OpTimeline
    from gpu.readings import StepReading
    from gpu.real_engine import RealEngine
    from sim.core.engine import EngineCore
    from sim.core.plan import Executor
    from sim.core.request import RequestSpec
    from sim.resolve import Resolved
    from sim.results.result import Result
    from sim.scenario import Scenario


@dataclass(slots=True)
class RealRun:
    """What runs a scenario for real, and what it recorded. A `sim.simulation.RealEngine`."""

    engine: RealEngine
    curves: list[list[StepReading]] = field(default_factory=list)
    """A reading a step, by executor; steps that were run and did not count are left out."""
    nvml: dict[str, Any] = field(default_factory=dict)
    """What NVML said before the run; why it says nothing, where it does not."""
    wrap: Callable[[Any], Executor] = lambda executor: executor
    """Gets an executor and returns what is used in its place."""
    progress: RealProgress = field(default_factory=RealProgress)
    """Hears of steps."""

    def executor(self, core: EngineCore) -> Executor:
        """One that serves `core`. Raises ConfigError when its pool or its workspace does not fit the device."""
        with _fits(self.engine.device):
            return self.wrap(self.engine.executor(core))

    def recorder(self, index: int) -> Callable[[StepReading], None]:
        """Keeps the readings of executor `index`."""
        curve: list[StepReading] = []
        self.curves.append(curve)

        def record(reading: StepReading) -> None:
            # The world cuts stretches after the fact; steps that did not count come again with the same number.
            while curve and curve[-1].step >= reading.step:
                curve.pop()
            curve.append(reading)
            self.progress.step(reading)

        return record

    def report(self) -> list[dict[str, Any]]:
        """What each executor did."""
        from gpu.nvml import nvml_reading

        after = nvml_reading(self.engine.device)
        nvml = after if "absent" in after else {"before": self.nvml, "after": after}
        return [{**report, "nvml": nvml} for report in self.engine.report()]

    def memory_columns(self) -> dict[str, list[Any]]:
        """The curves of all executors."""
        pools = [executor.pool.num_blocks for executor in self.engine.executors]
        block_bytes = self.engine.executors[0].pool.layout.block_bytes
        workspaces = [executor.workspace.num_bytes for executor in self.engine.executors]
        return real_memory_columns(self.curves, pools, workspaces, block_bytes)

    @property
    def timeline(self) -> OpTimeline | None:
        """The step that was followed operation by operation."""
        return self.engine.executors[0].timeline


class PeakStepError(ScenarioError):
    """The run never came to the step that was to be followed. Its other results stand, in `result`."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result


def run_scenario(
    scenario: Scenario,
    *,
    decision_log: Callable[[dict[str, Any]], None] | None = None,
    peak_step: int | None = None,
    memory_snapshot: Path | None = None,
    clock: str | None = None,
    wrap: Callable[[Any], Executor] = lambda executor: executor,
    progress: RealProgress | None = None,
) -> Result:
    """Run `scenario`, simulated or for real, as `[run] executor` says.

    `peak_step` follows one step operation by operation (its table is then in `summary["executors"][0]["peak_by_op"]`);
    `memory_snapshot` is where PyTorch's memory snapshot goes; `clock` times the steps (`gpu.timing`; None: wall). All three need executor
    torch. `wrap` gets the executor and returns what is used in its place, to record what it does or to plant a fault; `progress` hears
    how far it is.

    Raises ScenarioError where the software is missing, PeakStepError where the step is, ConfigError for a model or device that cannot
    be run, IntegrityError naming blocks that are held when the run is over, and what `sim.simulate` raises.
    """
    if scenario.run.executor != "torch":
        for name, value in (("peak_step", peak_step), ("memory_snapshot", memory_snapshot), ("clock", clock)):
            if value is not None:
                raise ScenarioError(
                    f"--{name.replace('_', '-')} looks at a device, but executor model computes nothing on one; use --executor torch"
                )
        return sim.simulate(scenario, decision_log=decision_log)
    try:
        from gpu.device import find_device
        from gpu.memory_history import memory_history
        from gpu.timing import check_clock, clock_name
    except ImportError as error:
        raise ScenarioError(f"[run] executor is 'torch', which needs torch: {error}") from None
    device, clock, progress = find_device(scenario.run.device or "cpu"), clock or "wall", progress or RealProgress()
    check_clock(device, clock)
    _check_model(scenario, device)
    scenario, others = (scenario, 0) if device.type == "cpu" else _fitted_to(scenario, device)
    made: list[RealRun] = []

    def real(resolved: Resolved, requests: Sequence[RequestSpec]) -> RealRun:
        made.append(_real_run(resolved, requests, wrap, progress, clock, others_bytes=others, peak_step=peak_step))
        return made[0]

    with memory_history(memory_snapshot, device) if memory_snapshot is not None else nullcontext():
        result = sim.simulate(scenario, decision_log=decision_log, real=real)
    for executor in made[0].engine.executors:
        executor.pool.check(())  # whoever still holds a block leaked it
    result = replace(result, provenance={**result.provenance, "clock": clock_name(device, clock)})
    _measured_memory(result)
    if peak_step is not None:
        _add_peak(result, made[0], peak_step, scenario)
    return result


def on_this_machine(scenario: Scenario) -> Scenario:
    """A scenario with executor torch, with what this machine's device is and has where it does not say.

    Raises ScenarioError where torch is missing, ConfigError for a device that is not there.
    """
    try:
        from gpu.device import find_device
    except ImportError as error:
        raise ScenarioError(f"[run] executor is 'torch', which needs torch: {error}") from None
    device = find_device(scenario.run.device or "cpu")
    return scenario if device.type == "cpu" else _fitted_to(scenario, device)[0]


def real_engine(resolved: Resolved, requests: Sequence[RequestSpec]) -> RealEngine:
    """What runs a resolved scenario for real, unrecorded. Raises ConfigError for a model that cannot be run or does not fit."""
    from gpu.real_engine import RealEngine
    from gpu.real_settings import settings_of

    wanted = settings_of(resolved.tables, resolved.model)
    with _fits(wanted.device):
        return RealEngine(wanted, requests)


def _real_run(
    resolved: Resolved,
    requests: Sequence[RequestSpec],
    wrap: Callable[[Any], Executor],
    progress: RealProgress,
    clock: str,
    **settings: Any,
) -> RealRun:
    from gpu.nvml import nvml_reading
    from gpu.real_engine import RealEngine
    from gpu.real_settings import settings_of
    from gpu.run_room import check_run
    from sim.assembly import policy_of

    recorders: list[RealRun] = []
    wanted = replace(settings_of(resolved.tables, resolved.model, clock), **settings)
    check_run(wanted, policy_of(resolved)[0], wanted.device, executors=resolved["run"]["replicas"])
    progress.making(wanted)
    with _fits(wanted.device):
        engine = RealEngine(
            wanted, requests, recorder=lambda index: recorders[0].recorder(index), progress=progress.layer
        )
    recorders.append(RealRun(engine, nvml=nvml_reading(engine.device), wrap=wrap, progress=progress))
    return recorders[0]


def _check_model(scenario: Scenario, device: Any) -> None:
    """Raises ConfigError for a model that no decoder computes, or whose weights are more than is free, before anything is made and
    before the account, which knows no more of a CPU than nominal figures, finds that it does not fit.
    """
    from gpu.decoder_config import DecoderConfig
    from gpu.real_settings import RealSettings
    from gpu.run_room import check_parts, weights_bytes
    from sim.catalog.models import model_shape

    model = scenario.model
    if model.model is not None:
        shape = model_shape(model.model)
        DecoderConfig.of(shape, model.model)
        settings = RealSettings(shape=shape, source=model.model, dtype=model.dtype)
        check_parts(settings, device, weights=weights_bytes(settings))


@contextmanager
def _fits(device: Any) -> Iterator[None]:
    """What does not fit before the first step is a matter of the settings, and no failure of the run."""
    import torch

    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise ConfigError(
            f"the model, its KV pool and its workspace do not fit {device}: {error} Take a smaller model, fewer blocks "
            "(num_gpu_blocks_override) or smaller steps (max_num_batched_tokens)"
        ) from None


def _fitted_to(scenario: Scenario, device: Any) -> tuple[Scenario, int]:
    """The scenario with what this machine's CUDA device is and has, and what others hold there; what was given stays as given."""
    from gpu.device import device_facts, others_bytes, recognise
    from sim.catalog.gpus import gpu

    facts = device_facts(device)
    entry = recognise(facts) if scenario.gpu.gpu is None else gpu(scenario.gpu.gpu)
    others = others_bytes(facts, entry)
    changes: dict[str, Any] = {} if scenario.gpu.gpu is not None else {"gpu": entry.name}
    if "other_processes_bytes" not in scenario.engine.model_fields_set and scenario.gpu.gpu is None:
        changes["other_processes_bytes"] = others + max(gpu(entry.name).total_bytes - facts.total_bytes, 0)
    return scenario.with_(**changes), others


def _measured_memory(result: Result) -> None:
    """The summary says of a real run's memory what was measured, not what the account expected."""
    summary: Any = result.summary
    measured = any(result.memory_columns.values())
    for key, column, of in (
        ("peak_workspace_bytes", "workspace_bytes", max),
        ("min_headroom_bytes", "headroom_bytes", min),
    ):
        if measured:
            summary[key] = of(result.memory_columns[column])
        else:
            summary.pop(key, None)  # no step was taken


def _add_peak(result: Result, run: RealRun, step: int, scenario: Scenario) -> None:
    """Put the table of the followed step into the summary. Raises PeakStepError when the run never came to it."""
    from sim.assembly import device
    from sim.resolve import resolve

    from .peak_by_op import peak_document

    timeline = run.timeline
    if timeline is None or timeline.shape is None:
        steps = run.curves[0][-1].step + 1 if run.curves and run.curves[0] else 0
        raise PeakStepError(
            f"--peak-step is {step}, but the run had {steps} steps, numbered from 0; give a number below {steps}",
            result,
        )
    document = peak_document(timeline, device(resolve(scenario)).steps)
    summary: Any = result.summary
    summary["executors"][0]["peak_by_op"] = document
    summary["warnings"] = [
        *summary["warnings"],
        f"step {step} was followed operation by operation, which took longer than the step itself: latencies of the requests in it, and "
        "of those that waited for it, are too long; leave --peak-step out to measure them",
    ]
