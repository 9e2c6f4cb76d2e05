"""One run: requests in, a record out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import simpy

from sim.core.config import ConfigError, EngineConfig
from sim.core.engine import EngineCore
from sim.core.facts import ProgressError
from sim.core.log import DecisionSink
from sim.core.plan import Executor
from sim.core.policy import Policy
from sim.core.request import Request, RequestSpec, samples
from sim.costs.protocol import CostModel
from sim.garbage import few_collections
from sim.memory.device import Device
from sim.results.memory_record import MemoryRecord
from sim.results.recorder import Recorder, RunRecord

from .clients import closed_loop, open_loop, patience
from .executors import HoldsBlocks, ModelExecutor
from .link import Link
from .replica import Replica
from .router import ROUTERS
from .workspace import WorkspaceExecutor


def run_world(
    config: EngineConfig,
    cost: CostModel,
    requests: Sequence[RequestSpec],
    *,
    replicas: int = 1,
    router: str = "round-robin",
    max_concurrency: int | None = None,
    stepping: bool = False,
    check: bool = False,
    decision_log: Callable[[dict[str, object]], None] | None = None,
    executor: Callable[[EngineCore], Executor] | None = None,
    policy: Policy | None = None,
    device: Device | None = None,
    memory_limit: bool = True,
    failing_copies: Callable[[int], bool] = lambda fence: False,
) -> RunRecord:
    """Simulate `requests`, in order of arrival, on `replicas` equal engines until every one has ended. One with `n` samples is n.

    `max_concurrency` makes the clients a closed loop. `stepping` turns leaps off; the result is the same. `check` verifies the
    engine's books after every event. `decision_log` gets every step's entry; with several replicas when the run is
    over, in order of time and with a `replica` key, because a leap writes its steps later than a single step would.
    `policy` decides where engines differ (default: vLLM V1). `executor` replaces the cost model by something that really runs.
    Copies of a CPU prefix tier take the time that `cost` says; those for whose fence `failing_copies` is true fail when it is over.
    `device` is the memory of every replica's GPU: it is recorded, and with `memory_limit` a step that needs more than is left fails.

    Raises ConfigError for settings that make no sense, IntegrityError or ProgressError if the core is at fault.
    """
    if replicas < 1:
        raise ConfigError(f"replicas is {replicas}; there must be at least 1")
    if max_concurrency is not None and max_concurrency < 1:
        raise ConfigError(f"max_concurrency is {max_concurrency}; it must be at least 1")
    if router not in ROUTERS:
        raise ConfigError(f"router {router!r} is not known; known are {', '.join(ROUTERS)}")
    requests = [sample for spec in requests for sample in samples(spec)]
    started = time.perf_counter()
    env = simpy.Environment(initial_time=0)  # integer femtoseconds, see sim.core.clock
    waiting_for: dict[str, simpy.Event] = {}

    def on_end(request: Request) -> None:
        event = waiting_for.pop(request.request_id, None)
        if event is not None:
            event.succeed()

    engines: list[EngineCore] = []
    servers: list[Replica] = []
    executors: list[Executor] = []
    recorders: list[Recorder] = []
    log = None if decision_log is None else _Log(decision_log, replicas)
    for index in range(replicas):
        core = EngineCore(config, policy=policy, decision_sink=None if log is None else log.sink(index))
        recorder = Recorder(index, core, None if device is None else MemoryRecord(device))
        served_by = ModelExecutor(cost) if executor is None else executor(core)
        executors.append(served_by)
        if device is not None and memory_limit:
            served_by = WorkspaceExecutor(served_by, device, core)
        link = partial(Link, env, cost, failing=failing_copies) if config.num_cpu_prefix_blocks else None
        servers.append(
            Replica(env, core, served_by, recorder, stepping=stepping, check=check, on_end=on_end, link=link)
        )
        engines.append(core)
        recorders.append(recorder)
    route = ROUTERS[router]()

    placed: dict[str, Replica] = {}  # the samples of one request go where its first one went

    def send(spec: RequestSpec) -> None:
        server = placed.get(spec.sample_of)
        if server is None:
            server = servers[route(spec, servers)]
            if spec.sample_of:
                placed[spec.sample_of] = server
        server.submit(spec)
        if spec.timeout_s is not None or spec.cancel_after_s is not None:
            env.process(patience(env, spec, server.abort))

    def send_and_wait(spec: RequestSpec) -> simpy.Event:
        waiting_for[spec.request_id] = done = env.event()
        send(spec)
        return done

    if max_concurrency is None:
        env.process(open_loop(env, requests, send))
    else:
        env.process(closed_loop(env, requests, send_and_wait, max_concurrency))
    with few_collections():
        env.run()
    for core, served_by in zip(engines, executors, strict=True):
        if isinstance(served_by, HoldsBlocks):
            served_by.close(core.untold)
        core.close(int(env.now))
    if log is not None:
        log.close()
    for core in engines:
        if core.num_unfinished:
            raise ProgressError(f"{core.num_unfinished} requests never ended, and nothing more will happen")
    return RunRecord.merge(
        recorders, config, [spec.request_id for spec in requests], core_time_s=time.perf_counter() - started
    )


class _Log:
    """Passes decision-log entries on: at once from a single engine, sorted by time from several."""

    def __init__(self, write: Callable[[dict[str, object]], None], replicas: int) -> None:
        self._write = write
        self._single = replicas == 1
        self._held: list[tuple[int, int, dict[str, object]]] = []

    def sink(self, replica: int) -> DecisionSink:
        """Where one engine's entries go."""
        if self._single:
            return lambda entry, start_fs: self._write(entry)
        return lambda entry, start_fs: self._held.append((start_fs, replica, {"replica": replica, **entry}))

    def close(self) -> None:
        """Pass on what was held back."""
        for _, _, entry in sorted(self._held, key=lambda held: held[:2]):
            self._write(entry)
