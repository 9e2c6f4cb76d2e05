"""One scenario under one preset, in the real world and in the simulated one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.core.config import EngineConfig
from sim.core.plan import Executor
from sim.core.policies.engine_settings import as_in
from sim.core.policy import Policy
from sim.core.request import Outcome, Request
from sim.core.rungs import LOSSY
from sim.costs import FixedCost
from sim.policy_choice import choose_policy
from sim.scenario_tables import PolicyTable
from sim.world.executors import Recording, RecordingExecutor, ReplayExecutor
from sim.world.run import run_world

from .scenarios import SmallScenario

if TYPE_CHECKING:
    from gpu.readings import StepReading
    from sim.core.engine import EngineCore

PresetOf = Callable[[EngineConfig], tuple[EngineConfig, Policy]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a real run did."""

    decisions: list[dict[str, object]]
    recording: Recording
    """The duration of every step, and what ran out of memory."""
    requests: Sequence[Request]
    answers: dict[str, list[int]]
    """Sampled tokens of every request, as many as it was given."""
    leaked_blocks: int
    """Blocks that the core or the device held when all was over."""
    fallbacks: int
    """Calls that were served by something slower than what was meant."""
    report: dict[str, Any]
    """What the executor says of itself."""

    @property
    def outcomes(self) -> dict[str, int]:
        """Requests by how they ended."""
        return dict(Counter((request.outcome or Outcome.FAILED).value for request in self.requests))


def preset(name: str, ladder: list[dict[str, str | float]] | None = None, **keys: Any) -> PresetOf:
    """Configures an engine as a preset does, with further `keys` of `[policy]`; made anew for each run, because some policies learn."""
    table = PolicyTable.model_validate({"policy": name, "ladder": ladder, **keys}).model_dump()

    def configure(config: EngineConfig) -> tuple[EngineConfig, Policy]:
        config = as_in(name, config)
        return config, choose_policy(table, config)

    return configure


def run_for_real(
    scenario: SmallScenario,
    configure: PresetOf,
    *,
    device: str = "cpu",
    checked: bool = True,
    wrap: Callable[[Any], Executor] | None = None,
    on_step: Callable[[StepReading], None] | None = None,
    copy_s: float = 0.0,
    **settings: Any,
) -> Recorded:
    """Run a scenario on a device. `wrap` gets the executor and returns what is used in its place (to plant a fault); `on_step`
    gets a reading a step; copies to and from the CPU prefix tier are said to take `copy_s` a block; `settings` are those of
    `RealSettings`.

    Raises what the device's checks raise.
    """
    from gpu.real_engine import RealEngine
    from gpu.real_settings import RealSettings

    settings = {"num_threads": 1 if device == "cpu" else None, **settings}
    engine = RealEngine(
        RealSettings(shape=scenario.shape, device=device, seed=scenario.seed, checked=checked, **settings),
        scenario.requests,
        on_step=on_step,
    )
    cores: list[EngineCore] = []
    recorders: list[RecordingExecutor] = []
    decisions: list[dict[str, Any]] = []

    def executor(core: EngineCore) -> RecordingExecutor:
        inner = engine.executor(core)
        cores.append(core)
        recorders.append(RecordingExecutor(inner if wrap is None else wrap(inner)))
        return recorders[-1]

    config, policy = configure(scenario.engine)
    record = run_world(
        config,
        FixedCost(1.0, per_copied_block_s=copy_s),
        scenario.requests,
        executor=executor,
        policy=policy,
        check=checked,
        decision_log=decisions.append,
    )
    made, pool = engine.executors[0], cores[0].pool
    made.pool.check(cores[0].running_tables)
    return Recorded(
        decisions=decisions,
        recording=recorders[0].recording,
        requests=record.requests,
        answers={r.request_id: engine.tokens.answer(r.request_id, r.num_output_tokens) for r in record.requests},
        leaked_blocks=made.leaked_blocks + pool.num_owned + pool.num_quarantined,
        fallbacks=sum(made.model.ops.fallbacks.values()),
        report=made.report(),
    )


def replay(
    scenario: SmallScenario, configure: PresetOf, recording: Recording, *, copy_s: float = 0.0
) -> list[dict[str, object]]:
    """The decisions of the simulated world, when every step takes as long as it really took, and copies `copy_s` a block."""
    decisions: list[dict[str, object]] = []
    config, policy = configure(scenario.engine)
    run_world(
        config,
        FixedCost(1.0, per_copied_block_s=copy_s),
        scenario.requests,
        executor=lambda core: ReplayExecutor(recording),
        policy=policy,
        check=True,
        decision_log=decisions.append,
    )
    return decisions


def reference_answers(scenario: SmallScenario, *, device: str = "cpu", **settings: Any) -> dict[str, list[int]]:
    """Every request's whole answer where memory is no object."""
    roomy = scenario.roomy
    return run_for_real(roomy, preset("vllm-v1"), device=device, checked=False, **settings).answers


def changed_answers(run: Recorded, reference: dict[str, list[int]]) -> list[str]:
    """Requests whose tokens differ from the reference, those that a lossy rung touched apart: the whole answer of one that finished and
    that no rung touched, else as many tokens as it was given.
    """
    return [
        request.request_id
        for request in run.requests
        if not LOSSY.intersection(request.degraded)
        and run.answers[request.request_id] != reference[request.request_id][: _comparable(request)]
    ]


def _comparable(request: Request) -> int | None:
    """How many tokens of an answer must be those of the reference; None for all of them."""
    whole = request.outcome is Outcome.FINISHED and not request.degraded
    return None if whole else request.num_output_tokens


def first_difference(real: list[dict[str, object]], simulated: list[dict[str, object]]) -> str | None:
    """Where two decision logs part, in words; None when they are equal."""
    for ours, theirs in zip(real, simulated, strict=False):
        if ours != theirs:
            keys = [key for key in ours if ours[key] != theirs.get(key)]
            return f"step {ours['step']} differs in {', '.join(keys)}: {ours[keys[0]]} for real, {theirs.get(keys[0])} simulated"
    if len(real) != len(simulated):
        return f"{len(real)} steps for real, {len(simulated)} simulated"
    return None
