"""One run, as a recipe: scenario, requests, memory, engine, prices, world, summary.

The module is not called `simulate`, because importing it would then hide the function `sim.simulate` of the same name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ._version import __version__
from .assembly import (
    build_workload,
    check_start,
    cost_model,
    device,
    has_memory_limit,
    policy_of,
    start_arguments,
)
from .garbage import few_collections
from .policy_parts import idle_parts
from .provenance import provenance
from .resolve import Resolved, resolve
from .scenario_errors import ScenarioError
from .sequences import sequences
from .steady_state import steady_state_warnings

if TYPE_CHECKING:
    from sim.core.engine import EngineCore
    from sim.core.plan import Executor
    from sim.core.policy import Policy
    from sim.core.request import RequestSpec
    from sim.costs.protocol import CostModel
    from sim.results.result import Result

    from .scenario import Scenario


class RealEngine(Protocol):
    """What runs engine cores for real. This package has none: a caller brings one (`experiments.real_run` does)."""

    def executor(self, core: EngineCore) -> Executor:
        """An executor for one core."""
        ...

    def report(self) -> list[dict[str, Any]]:
        """What each executor did, as JSON values."""
        ...

    def memory_columns(self) -> dict[str, list[Any]]:
        """The columns of memory.csv, measured."""
        ...


MakeRealEngine = Callable[["Resolved", "Sequence[RequestSpec]"], RealEngine]
"""Makes what runs a resolved scenario with these requests."""


@few_collections()
def simulate(
    scenario: Scenario,
    seed: int | None = None,
    *,
    replication: int = 0,
    cost: CostModel | None = None,
    decision_log: Callable[[dict[str, Any]], None] | None = None,
    executor: Callable[[EngineCore], Executor] | None = None,
    real: MakeRealEngine | None = None,
    **changes: Any,
) -> Result:
    """Simulate `scenario` and return everything that came of it.

    `seed` replaces the scenario's own; `replication` k draws the k-th independent set of requests from the same seed, the same set
    whatever the engine's settings. `changes` are keys to change first, as in `Scenario.with_`: `simulate(s, rate=4.0)`. `cost`
    replaces the cost model; `decision_log` is called with each step's entry. Equal arguments give equal results, wall-clock times aside.

    With executor "torch" in `[run]` nothing is simulated but the clients: every step really runs, and its measured duration is
    the time that passes. The caller then brings in `real` what runs it; `experiments.real_run.run_scenario` does. `executor`
    (made for each engine core) does the steps instead of either.

    Raises ScenarioError, and the errors of the parts it uses (all ValueErrors with one clear message); StartUpError, with a log, when
    faults make the engine run out of memory while it starts.
    """
    from sim.results import (
        Result,
        bill_columns,
        itl_columns,
        mark_columns,
        memory_columns,
        oom_log,
        oom_snapshot,
        request_columns,
        summarize,
        timeline_columns,
    )
    from sim.world.run import run_world

    started_s = time.perf_counter()
    resolved = resolve(scenario.with_(**changes, **({} if seed is None else {"seed": seed})))
    run = resolved["run"]

    built = build_workload(resolved, replication)
    config, policy = policy_of(resolved)
    sent = sequences(resolved.tables, config, built.requests, replication)
    memory = device(resolved)
    ran = None
    if executor is None and run["executor"] == "torch":
        if real is None:
            raise ScenarioError(
                "[run] executor is 'torch', and sim.simulate only simulates; `kvtwin run`, or experiments.real_run.run_scenario in "
                "Python, runs it for real"
            )
        ran = real(resolved, sent)
        executor = ran.executor
    if executor is not None and memory.faults:
        raise ScenarioError(
            "[run] faults are injected into a simulated device, but here an executor runs the steps; leave one of them out"
        )
    check_start(resolved, memory)
    prices = cost or cost_model(resolved)
    record = run_world(
        config,
        prices,
        sent,
        replicas=run["replicas"],
        router=run["router"],
        max_concurrency=resolved["workload"]["max_concurrency"],
        stepping=run["stepping"],
        check=run["check"],
        decision_log=decision_log,
        policy=policy,
        device=memory,
        # What really runs has a device of its own, that says itself when its memory runs out.
        memory_limit=executor is None and has_memory_limit(resolved, memory),
        executor=executor,
    )
    requests, timeline = request_columns(record), timeline_columns(record)
    unsteady = steady_state_warnings(timeline, until_s=max(requests["arrival_s"]))
    summary = summarize(
        record,
        scenario=resolved.what_was_run(),
        seed=run["seed"],
        version=__version__,
        limits_s=resolved.slo.limits_s if resolved.slo else None,
        warnings=[
            *resolved.warnings,
            *(prices.warnings() if executor is None else []),
            *_idle_ladder(policy, sent),
            *idle_parts(resolved["policy"], policy, config, sent),
            *dict.fromkeys(sentence for recorder in record.recorders for sentence in recorder.core.diagnose()),
            *unsteady,
        ],
        notes=built.notes,
        wall_time_s=time.perf_counter() - started_s,
    )
    facts = provenance(resolved, profile=prices.name if executor is None else "measured", replication=replication)
    if ran is not None:
        summary["executors"] = ran.report()
    return Result(
        summary=summary,
        request_columns=requests,
        timeline_columns=timeline,
        mark_columns=mark_columns(record),
        memory_columns=memory_columns(record) if ran is None else ran.memory_columns(),
        bill_columns=bill_columns(record.requests, config.slots_per_block, memory.block_bytes(config.num_gpu_blocks)),
        itl_columns=itl_columns(record) if ran is not None else {},
        oom_log=oom_log(record, start_arguments(resolved, config)),
        oom_snapshot=oom_snapshot(record),
        ledger=resolved.ledger,
        provenance=facts,
        scenario=resolved.as_dict(),
    )


def _idle_ladder(policy: Policy, requests: Sequence[RequestSpec]) -> list[str]:
    """Rungs that may touch nobody are probably not what was meant."""
    from sim.core.rungs import WHOEVER_IT_IS

    if policy.ladder is None or any(spec.priority > policy.ladder.guard_priority for spec in requests):
        return []
    idle = [rung.action for rung in policy.ladder.rungs if rung.action not in WHOEVER_IT_IS]
    if not idle:
        return []
    return [
        f"the ladder's {', '.join(idle)} can touch nobody: every request is at least as important as its guard (priority "
        f"{policy.ladder.guard_priority}); give less important requests a larger priority ([workload] priorities), or lower [policy] "
        "guard_priority"
    ]
