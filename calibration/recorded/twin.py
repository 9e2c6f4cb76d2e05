"""The same requests, simulated: a recorded run's arrivals and lengths on a scenario's engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from calibration.numerics.tent import Array
from sim.assembly import cost_model, engine_config
from sim.core.request import RequestSpec
from sim.costs.fitted import chosen_profile
from sim.costs.protocol import CostModel
from sim.policy_choice import choose_policy
from sim.resolve import ROOFLINE, Resolved, resolve
from sim.results.metrics import request_gaps
from sim.results.summary import request_columns, summarize, timeline_columns
from sim.scenario import Scenario
from sim.world.run import run_world


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """What the twin says of a recorded run. Arrays `[requests]` in the order given."""

    profile: str
    summary: dict[str, Any]
    ttft_s: Array
    tpot_s: Array
    e2el_s: Array
    finished_s: Array
    scheduled_s: Array
    preemptions: npt.NDArray[np.int_]
    """How often each was preempted."""
    itl_gaps_s: tuple[Array, ...]
    """Every gap between tokens of each request; none of one that did not finish."""
    timeline: dict[str, Array]
    """Engine state, an interval a row: time_s, duration_s, running, waiting, used_blocks …"""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """Provenance of the profile that its prices come from; empty without one."""

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last token."""
        return float(np.nanmax(self.finished_s))

    def at(self, ticks_s: Array) -> dict[str, Array]:
        """Engine state at given times: `running`, `waiting`, `kv_usage`, and `preempted` (started, not running, not finished)."""
        found = state_at(self.timeline, ticks_s, self.summary["num_gpu_blocks"])
        return found | {"preempted": preempted(self.scheduled_s, self.finished_s, ticks_s, found["running"])}


def state_at(timeline: Mapping[str, Array], ticks_s: Array, num_gpu_blocks: int) -> dict[str, Array]:
    """`running`, `waiting` and `kv_usage` (a share) at given times, from the columns of a timeline; 0 while the engine is idle."""
    rows = np.clip(np.searchsorted(timeline["time_s"], ticks_s, side="right") - 1, 0, None)
    ends = timeline["time_s"] + timeline["duration_s"]
    busy = (ticks_s >= timeline["time_s"][0]) & (ticks_s < ends[rows])
    return {
        "running": np.where(busy, timeline["running"][rows], 0.0),
        "waiting": np.where(busy, timeline["waiting"][rows], 0.0),
        "kv_usage": np.where(busy, timeline["used_blocks"][rows], 0.0) / num_gpu_blocks,
    }


def preempted(scheduled_s: Array, finished_s: Array, ticks_s: Array, running: Array) -> Array:
    """Requests that were started, have not finished and are not running, at each tick."""
    started = np.searchsorted(np.sort(scheduled_s), ticks_s, side="right")
    ended = np.searchsorted(np.sort(finished_s), ticks_s, side="right")
    result: Array = np.maximum(started - ended - running, 0.0)
    return result


def simulate_requests(
    scenario: Scenario, requests: Sequence[RequestSpec], cost: CostModel | None = None
) -> SimulatedRun:
    """Simulate exactly `requests` with the engine, memory and (unless `cost` is given) prices of `scenario`.

    Raises: ScenarioError, ConfigError.
    """
    resolved = resolve(scenario)
    prices = cost or cost_model(resolved)
    ttft_limit_s = resolved.slo.limits_s.get("ttft") if resolved.slo else None
    config = engine_config(resolved)
    policy = choose_policy(resolved["policy"], config, ttft_limit_s)
    record = run_world(
        config,
        prices,
        list(requests),
        policy=policy,
        replicas=resolved["run"]["replicas"],
        router=resolved["run"]["router"],
        max_concurrency=resolved["workload"]["max_concurrency"],
    )
    columns, timeline = request_columns(record), timeline_columns(record)
    summary = summarize(
        record,
        scenario=resolved.what_was_run(),
        seed=0,
        version="",
        warnings=[*resolved.warnings, *prices.warnings()],
    )

    def values(name: str) -> Array:
        return np.asarray([np.nan if value is None else value for value in columns[name]], dtype=np.float64)

    gaps: dict[str, Array] = {}
    for recorder in record.recorders:
        gaps |= request_gaps(recorder)
    names = ("ttft_s", "tpot_s", "e2el_s", "finished_s", "scheduled_s")
    return SimulatedRun(
        profile=prices.name,
        summary=summary,
        preemptions=np.asarray(columns["preemptions"], dtype=np.int_),
        itl_gaps_s=tuple(gaps.get(name, np.zeros(0)) for name in columns["request_id"]),
        timeline={name: np.asarray(column, dtype=np.float64) for name, column in timeline.items()},
        measured=_profile_provenance(resolved),
        **{name: values(name) for name in names},
    )


def _profile_provenance(resolved: Resolved) -> Mapping[str, Any]:
    """How the profile that a scenario names was measured."""
    name = resolved["gpu"]["profile"]
    if name == ROOFLINE:
        return {}
    ranks = resolved["engine"]["tensor_parallel_size"]
    found: Mapping[str, Any] = chosen_profile(name, resolved.model, resolved.gpu, ranks).data["provenance"]
    return found
