"""Many runs of a few scenarios, on one process or several, in a fixed order: what the comparisons stand on.

Replication k of every scenario sees the same requests (common random numbers): they are drawn from the seed, the stream's name
and k alone. A run comes back as a few numbers, so that workers need not send a whole result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.results.result import Result
    from sim.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run to do."""

    scenario: Scenario
    replication: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one run came to."""

    summary: Mapping[str, Any]
    queue_grows: bool
    """The number of waiting requests grew significantly while requests arrived: there is no steady state."""
    waiting_share: float
    """Share of the time (0 to 1) in which a request waited for admission."""
    limits: Mapping[str, float]
    """While a request waited: share of the time (0 to 1) in which each limit was reached."""


class Runner:
    """Runs tasks, with their results in the order of the tasks whatever the number of processes."""

    def __init__(self, pool: ProcessPoolExecutor | None) -> None:
        self._pool = pool

    def run(self, tasks: Sequence[Task]) -> Iterator[Measured]:
        """Results one by one, in the order of `tasks`. Raises what a run raises."""
        return iter(map(measure, tasks)) if self._pool is None else self._pool.map(measure, tasks)


@contextmanager
def runner(workers: int) -> Iterator[Runner]:
    """A runner with `workers` processes; one means this process."""
    if workers <= 1:
        yield Runner(None)
        return
    with ProcessPoolExecutor(workers) as pool:
        try:
            yield Runner(pool)
        except BaseException:
            pool.shutdown(
                wait=False, cancel_futures=True
            )  # an error or an interrupt ends the work, not only the waiting for it
            raise


def measure(task: Task) -> Measured:
    """Do one run."""
    import sim

    return digest(sim.simulate(task.scenario, replication=task.replication))


def digest(result: Result) -> Measured:
    """The few numbers that searches and comparisons need of a run."""
    from sim.steady_state import queue_trend

    trend = queue_trend(result.timeline_columns, until_s=max(result.request_columns["arrival_s"], default=0.0))
    waiting_share, limits = _limits_reached(result)
    return Measured(summary=dict(result.summary), queue_grows=trend.grows, waiting_share=waiting_share, limits=limits)


def _limits_reached(result: Result) -> tuple[float, dict[str, float]]:
    """Share of the time in which somebody waited, and which limits were reached meanwhile."""
    engine, pool = result.scenario["engine"], result.summary["num_gpu_blocks"]
    busy_s = waiting_s = 0.0
    reached = {"KV blocks": 0.0, "max_num_seqs": 0.0, "max_num_batched_tokens": 0.0}
    timeline = result.timeline_columns
    names = ("duration_s", "steps", "running", "waiting", "used_blocks_end", "prefill_tokens", "decode_tokens")
    for duration_s, steps, running, waiting, used, prefill, decode in zip(
        *(timeline[name] for name in names), strict=True
    ):
        busy_s += duration_s
        if not waiting:
            continue
        waiting_s += duration_s
        if running >= engine["max_num_seqs"]:
            reached["max_num_seqs"] += duration_s
        elif (prefill + decode) / max(steps, 1) >= 0.98 * engine["max_num_batched_tokens"]:
            reached["max_num_batched_tokens"] += duration_s
        elif used >= 0.9 * pool:
            reached["KV blocks"] += duration_s
    shares = {name: seconds / waiting_s if waiting_s else 0.0 for name, seconds in reached.items()}
    return (waiting_s / busy_s if busy_s else 0.0), shares
