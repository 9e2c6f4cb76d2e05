"""One question of a bisection: does this load fail in this engine? Answers are kept, in memory and in a file to go on from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.core.config import ConfigError
from sim.core.request import Outcome, RequestSpec
from sim.scenario import Scenario, ScenarioError
from sim.scenario_errors import choices
from sim.sequences import sequences

if TYPE_CHECKING:
    from gpu.real_engine import RealEngine
    from sim.core.config import EngineConfig
    from sim.core.engine import EngineCore
    from sim.core.plan import Executor
    from sim.core.policy import Policy
    from sim.costs.protocol import CostModel
    from sim.memory.device import Device
    from sim.resolve import Resolved
    from sim.results.recorder import RunRecord

PREDICATES: dict[str, str] = {
    "any": "a step runs out of memory or a request fails",
    "oom": "a step runs out of memory",
    "failed": "a request fails",
    "preempted": "a request is preempted",
    "rejected": "a request is rejected",
    "timed_out": "a client gives up waiting",
}
"""What can count as a failure, and in words."""
_OUTCOMES = {"failed": Outcome.FAILED, "rejected": Outcome.REJECTED, "timed_out": Outcome.TIMED_OUT}
_VERSION = 1


def predicate(name: str) -> Callable[[RunRecord], bool]:
    """The predicate of that name, or `module:function` of a `RunRecord`. Raises ConfigError."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found: Callable[[RunRecord], bool] = getattr(import_module(module), attribute)
        except (
            ImportError,
            AttributeError,
            TypeError,
            ValueError,
        ) as error:  # the last two: a relative or an empty module
            raise ConfigError(f"--fails {name!r} cannot be loaded: {error}") from None
        if not callable(found):
            raise ConfigError(f"--fails {name!r} is no function, but a {type(found).__name__}")
        return found
    if name not in PREDICATES:
        raise ConfigError(f"--fails is {name!r}; {choices(name, PREDICATES)}, or your own as module:function")
    if name == "oom":
        return _ran_out
    if name == "any":
        return lambda record: _ran_out(record) or _ended(record, Outcome.FAILED)
    if name == "preempted":
        return lambda record: any(request.num_preemptions for request in record.requests)
    return lambda record: _ended(record, _OUTCOMES[name])


def _ran_out(record: RunRecord) -> bool:
    return any(recorder.core.oom_events for recorder in record.recorders)


def _ended(record: RunRecord, outcome: Outcome) -> bool:
    return any(request.outcome is outcome for request in record.requests)


class Probe:
    """Runs loads in the engine of a scenario."""

    def __init__(self, scenario: Scenario, fails: str, state: Path | None, progress: Callable[[int], None]) -> None:
        from sim.assembly import build_workload
        from sim.resolve import resolve

        self.scenario = scenario
        self._fails = predicate(fails)
        resolved = resolve(scenario)
        self.num_gpu_blocks = resolved.ledger.num_gpu_blocks
        """Blocks of the pool, which are kept when the batch is made smaller."""
        self.max_num_seqs: int = resolved["engine"]["max_num_seqs"]
        """The batch of the scenario."""
        self.requests = build_workload(resolved).requests
        """The whole load."""
        self.runs = 0
        """Loads that were judged, those a state file remembered included."""
        self._progress = progress
        self._state = state
        told = {"version": _VERSION, "scenario": resolved.as_dict(), "fails": fails, "load": _key(self.requests, {})}
        self._about = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
        self._known: dict[str, bool] = self._read_state()
        self._asked: set[str] = set()
        self._engines: dict[str, _Engine] = {}

    def fails(self, requests: Sequence[RequestSpec], **changes: Any) -> bool:
        """Whether `requests` fail, with `changes` to the engine."""
        if not requests:
            return False
        key = _key(requests, changes)
        if key not in self._asked:
            self._asked.add(key)
            self.runs += 1
            self._progress(self.runs)
        if key not in self._known:
            name = json.dumps(changes, sort_keys=True)
            if name not in self._engines:
                self._engines[name] = _engine(self.scenario.with_(**changes))
            self._known[key] = self._judge(requests, self._engines[name])
            self._write_state()
        return self._known[key]

    def fails_in(self, scenario: Scenario, requests: Sequence[RequestSpec]) -> bool:
        """Whether `requests` fail in the engine of another scenario; not counted and not kept."""
        return self._judge(requests, _engine(scenario))

    def _judge(self, requests: Sequence[RequestSpec], engine: _Engine) -> bool:
        from sim.world.run import run_world

        in_order = sorted(requests, key=lambda spec: spec.arrival_s)
        run = engine.resolved["run"]
        sent = sequences(engine.resolved.tables, engine.config, in_order)
        record = run_world(
            engine.config,
            engine.prices,
            sent,
            replicas=run["replicas"],
            router=run["router"],
            max_concurrency=engine.resolved["workload"]["max_concurrency"],
            stepping=run["stepping"],
            check=run["check"],
            policy=engine.policy,
            device=engine.memory,
            memory_limit=engine.memory_limit,
            executor=engine.executor(sent),
        )
        return self._fails(record)

    def _read_state(self) -> dict[str, bool]:
        """Answers of an earlier bisection of the same load. Raises ScenarioError for a file that is another's."""
        if self._state is None or not self._state.exists():
            return {}
        try:
            kept = json.loads(self._state.read_text(encoding="utf-8"))
            about, answers = kept["about"], {str(key): bool(value) for key, value in kept["answers"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ScenarioError(
                f"{self._state}: not a state file of kvtwin bisect; remove it or name another"
            ) from None
        if about != self._about:
            raise ScenarioError(
                f"{self._state}: belongs to another load, scenario or --fails; remove it or name another file"
            )
        return answers

    def _write_state(self) -> None:
        if self._state is not None:
            from sim.results.files import write_json

            write_json(self._state, {"about": self._about, "answers": self._known})


@dataclass(slots=True, kw_only=True)
class _Engine:
    """Everything of a run but its requests, made once."""

    resolved: Resolved
    config: EngineConfig
    policy: Policy
    prices: CostModel
    memory: Device
    memory_limit: bool
    """Whether simulated steps run out of memory; a device says so itself."""
    real: RealEngine | None = None
    """What really does the steps, once it was needed: its weights are loaded once."""

    def executor(self, requests: Sequence[RequestSpec]) -> Callable[[EngineCore], Executor] | None:
        """What really does the steps, where the scenario asks for that: real memory in simulated time, so that an answer is an answer."""
        if self.resolved["run"]["executor"] != "torch":
            return None
        from sim.world.executors import PricedExecutor

        from .real_run import real_engine

        self.real = real = real_engine(self.resolved, requests) if self.real is None else self.real.serving(requests)
        return lambda core: PricedExecutor(real.executor(core), self.prices)


def _engine(scenario: Scenario) -> _Engine:
    """The engine of a scenario. Raises ScenarioError, ConfigError, and StartUpError when it does not start whatever the load."""
    from sim.assembly import check_start, cost_model, device, has_memory_limit, policy_of
    from sim.resolve import resolve

    if scenario.run.executor == "torch":
        from .real_run import on_this_machine

        scenario = on_this_machine(scenario)
    resolved = resolve(scenario)
    config, policy = policy_of(resolved)
    memory = device(resolved)
    real = resolved["run"]["executor"] == "torch"
    if real and memory.faults:
        raise ScenarioError("[run] faults are injected into a simulated device, but executor is 'torch'; leave one out")
    check_start(resolved, memory)
    return _Engine(
        resolved=resolved,
        config=config,
        policy=policy,
        prices=cost_model(resolved),
        memory=memory,
        memory_limit=not real and has_memory_limit(resolved, memory),
    )


def _key(requests: Sequence[RequestSpec], changes: dict[str, Any]) -> str:
    """Stands for a load and an engine."""
    text = f"{list(requests)} {sorted(changes.items())}"
    return hashlib.sha256(text.encode()).hexdigest()
