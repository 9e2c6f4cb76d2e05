"""Many runs of a few scenarios, on one process or several, in a fixed order: what the comparisons stand on.

Replication k of every scenario sees the same requests (common random numbers): they are drawn from the seed, the stream's name
and k alone. A run comes back as a few numbers, so that workers need not send a whole result.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
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
    waited_s: Mapping[str, float]
    """Seconds a request waited on average because a plan left it in the queue, by the limit that plan had reached."""


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
    # A fresh interpreter a worker: forking a process whose libraries have started threads is not safe.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_die_quietly) as pool:
        try:
            yield Runner(pool)
        except BaseException:
            pool.shutdown(
                wait=False, cancel_futures=True
            )  # an error or an interrupt ends the work, not only the waiting for it
            raise


def _die_quietly() -> None:
    """Ctrl-C reaches every process of a terminal; the parent speaks for all."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def measure(task: Task) -> Measured:
    """Do one run."""
    import sim

    return digest(sim.simulate(task.scenario, replication=task.replication))


def digest(result: Result) -> Measured:
    """The few numbers that searches and comparisons need of a run."""
    from sim.steady_state import queue_trend

    trend = queue_trend(result.timeline_columns, until_s=max(result.request_columns["arrival_s"], default=0.0))
    return Measured(summary=dict(result.summary), queue_grows=trend.grows, waited_s=waited_by_limit(result))


def waited_by_limit(result: Result) -> dict[str, float]:
    """Mean seconds a request spent left in the queue by a plan, by what that plan had run out of.

    A plan leaves a request in the queue for one of three reasons: as many sequences as allowed are running, the step's tokens
    are used up, or the request's blocks are not there. Waiting for the step in progress to end is none of them.
    """
    import numpy as np

    requests, timeline, engine = result.request_columns, result.timeline_columns, result.scenario["engine"]
    left_s = [
        ended if start is None else start
        for start, ended in zip(requests["scheduled_s"], requests["finished_s"], strict=True)
    ]
    starts = np.asarray(timeline["time_s"], dtype=np.float64)
    arrived = np.searchsorted(np.sort(np.asarray(requests["arrival_s"], dtype=np.float64)), starts, side="left")
    gone = np.searchsorted(np.sort(np.asarray(left_s, dtype=np.float64)), starts, side="right")
    waiting_s = np.maximum(arrived - gone, 0) * np.asarray(timeline["duration_s"], dtype=np.float64)
    tokens = np.asarray(timeline["prefill_tokens"]) + np.asarray(timeline["decode_tokens"])
    tokens_a_step = tokens / np.maximum(np.asarray(timeline["steps"]), 1)
    out_of_seqs = np.asarray(timeline["running"]) >= engine["max_num_seqs"]
    out_of_tokens = ~out_of_seqs & (tokens_a_step >= 0.98 * engine["max_num_batched_tokens"])
    if not engine["enable_chunked_prefill"]:
        # A whole prompt may not fit into what is left of a step that is far from full.
        out_of_tokens |= ~out_of_seqs & (
            np.asarray(timeline["used_blocks_end"]) < 0.9 * result.summary["num_gpu_blocks"]
        )
    reached = {
        "max_num_seqs": out_of_seqs,
        "max_num_batched_tokens": out_of_tokens,
        "KV blocks": ~out_of_seqs & ~out_of_tokens,
    }
    return {name: float(waiting_s[held].sum()) / max(len(left_s), 1) for name, held in reached.items()}
