"""Right answers from queueing theory.

A request that is alone in its engine is served in `steps x step time`, so an engine with `max_num_seqs` 1 and a constant step time
is a single server whose service time is chosen by the output length, and with `max_num_seqs` c it is c servers in lock-step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from sim.core.admission import AdmissionBase, Rejection
from sim.core.clock import FS_PER_S, to_fs
from sim.core.policy import Policy
from sim.core.request import Outcome, Request, RequestSpec
from sim.core.view import EngineView
from sim.costs.constant import FixedCost
from sim.world import run_world
from tests.support.roomy import TICK, TICK_S, engine, request

CONFIDENCE = 0.99
"""Every statistical statement is one fixed sample whose interval of this confidence must hold the theory's value."""


def serve(
    arrivals_s: Sequence[float], steps: Sequence[int], servers: int, policy: Policy | None = None
) -> list[Request]:
    """Requests of one prompt token, so that each takes its number of steps and nothing else, on so many servers."""
    requests = [request(i, float(t), 1, int(n)) for i, (t, n) in enumerate(zip(arrivals_s, steps, strict=True))]
    config = engine(max_num_seqs=servers, max_num_batched_tokens=servers)
    return list(run_world(config, FixedCost(TICK_S), requests, policy=policy).requests)


def poisson(rng: np.random.Generator, rate_per_s: float, count: int) -> list[float]:
    return list(np.cumsum(rng.exponential(1 / rate_per_s, count)))


def waits_s(served: Sequence[Request]) -> np.ndarray:
    return np.array([(r.scheduled_fs - r.arrival_fs) / FS_PER_S for r in served])


def mean_wait_interval(served: Sequence[Request]) -> tuple[float, float]:
    """Confidence interval of the mean wait, by regeneration: cycles that begin when an arrival finds an empty system are
    independent, so no warm-up has to be guessed. Their ratio estimator is asymptotically normal.
    """
    last_end_fs, starts = -1, []
    for i, r in enumerate(served):
        if r.arrival_fs > last_end_fs:
            starts.append(i)
        last_end_fs = max(last_end_fs, r.ended_fs)
    waits = waits_s(served)[: starts[-1]]  # the last cycle may not be complete
    sums = np.add.reduceat(waits, starts[:-1])
    sizes = np.diff(starts)
    mean = sums.sum() / sizes.sum()
    deviations = sums - mean * sizes
    error = math.sqrt((deviations**2).sum() / (len(sizes) - 1) / len(sizes)) / sizes.mean()
    margin = stats.t.ppf((1 + CONFIDENCE) / 2, len(sizes) - 1) * error
    assert len(sizes) > 100, "too few cycles for an interval"
    return mean - margin, mean + margin


def pollaczek_khinchine_s(rate_per_s: float, mean_s: float, mean_square_s2: float) -> float:
    """Mean wait in an M/G/1 queue."""
    return rate_per_s * mean_square_s2 / (2 * (1 - rate_per_s * mean_s))


def test_a_single_server_with_equal_requests_waits_as_m_d_1_says() -> None:
    rng, steps, count = np.random.default_rng(11), 10, 8000
    service_s = steps * TICK_S
    rate = 0.6 / service_s
    low, high = mean_wait_interval(serve(poisson(rng, rate, count), [steps] * count, 1))
    theory = 0.6 / (2 * (1 - 0.6)) * service_s
    assert low < theory < high
    assert (high - low) / theory < 0.3, "the interval must be narrow enough to mean something"


def test_a_single_server_with_geometric_requests_waits_as_m_m_1_says() -> None:
    """Service is exponential but for being counted in steps: a geometric number of steps with mean 50, for which
    Pollaczek-Khinchine is exact, and within one per cent of M/M/1.
    """
    rng, mean_steps, count = np.random.default_rng(12), 50, 12_000
    steps = rng.geometric(1 / mean_steps, count)
    rate = 0.5 / (mean_steps * TICK_S)
    low, high = mean_wait_interval(serve(poisson(rng, rate, count), steps, 1))
    p = 1 / mean_steps
    exact = pollaczek_khinchine_s(rate, mean_steps * TICK_S, (2 - p) / p**2 * TICK_S**2)
    m_m_1 = 0.5 / (1 - 0.5) * mean_steps * TICK_S
    assert exact == pytest.approx(m_m_1, rel=0.011)
    assert low < exact < high
    assert low < m_m_1 < high
    assert (high - low) / m_m_1 < 0.3


def test_a_single_server_follows_lindleys_recursion_to_the_femtosecond() -> None:
    rng, count = np.random.default_rng(13), 2000
    steps = rng.integers(1, 40, count)
    arrivals_s = poisson(rng, 0.9 / (20 * TICK_S), count)
    served = serve(arrivals_s, steps, 1)
    free_fs = 0
    for arrival_s, n, r in zip(arrivals_s, steps, served, strict=True):
        start_fs = max(to_fs(arrival_s), free_fs)
        free_fs = start_fs + int(n) * TICK
        assert (r.scheduled_fs, r.ended_fs) == (start_fs, free_fs)


def lock_step_servers(arrivals_fs: Sequence[int], steps: Sequence[int], servers: int) -> list[tuple[int, int]]:
    """Start and end of every request on servers that all begin their steps together, as slowly as it can be written."""
    waiting = list(range(len(steps)))
    left: dict[int, int] = {}
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    now = 0
    while waiting or left:
        if not left and arrivals_fs[waiting[0]] > now:
            now = arrivals_fs[waiting[0]]
        while waiting and arrivals_fs[waiting[0]] <= now and len(left) < servers:
            start[waiting[0]] = now
            left[waiting[0]] = steps[waiting[0]]
            del waiting[0]
        now += TICK
        for job in list(left):
            left[job] -= 1
            if not left[job]:
                end[job] = now
                del left[job]
    return [(start[i], end[i]) for i in range(len(steps))]


@pytest.mark.parametrize("servers", [2, 5])
def test_several_servers_follow_the_lock_step_recursion_to_the_femtosecond(servers: int) -> None:
    rng, count = np.random.default_rng(14), 600
    steps = [int(n) for n in rng.integers(1, 30, count)]
    arrivals_s = poisson(rng, 0.9 * servers / (15 * TICK_S), count)
    served = serve(arrivals_s, steps, servers)
    expected = lock_step_servers([to_fs(t) for t in arrivals_s], steps, servers)
    assert [(r.scheduled_fs, r.ended_fs) for r in served] == expected


def erlang_b(servers: int, load: float) -> float:
    """Share of arrivals that find all servers busy when nobody may wait."""
    blocking = 1.0
    for busy in range(1, servers + 1):
        blocking = load * blocking / (busy + load * blocking)
    return blocking


def erlang_c_wait_s(servers: int, rate_per_s: float, mean_s: float) -> float:
    """Mean wait in an M/M/c queue."""
    load = rate_per_s * mean_s
    blocking = erlang_b(servers, load)
    waiting = blocking / (1 - load / servers * (1 - blocking))
    return waiting * mean_s / (servers - load)


def test_several_servers_wait_as_erlang_c_says() -> None:
    """A geometric number of steps, 400 on average. Between the start of a step and its end nobody is let in, so every wait is longer
    than in M/M/c by at most one step; that, and the confidence interval, is the tolerance.
    """
    rng, servers, mean_steps, count = np.random.default_rng(15), 3, 400, 6000
    rate = 0.6 * servers / (mean_steps * TICK_S)
    served = serve(poisson(rng, rate, count), rng.geometric(1 / mean_steps, count), servers)
    low, high = mean_wait_interval(served)
    theory = erlang_c_wait_s(servers, rate, mean_steps * TICK_S)
    assert low - TICK_S < theory < high
    assert (high - low) / theory < 0.5


class NoQueue(AdmissionBase):
    """Turns away whoever would have to wait."""

    def arrive(self, spec: RequestSpec, view: EngineView) -> Rejection | None:
        busy = view.num_in_flight >= view.max_num_seqs
        return Rejection(code="busy", reason="busy", http_status=503) if busy else None


def test_servers_without_a_queue_block_as_erlang_b_says() -> None:
    """Erlang-B holds for any distribution of service times; here uniform, 60 steps on average, and one step at most until the
    first begins. So the load lies between that of 60 and that of 61 steps.
    """
    rng, servers, count, batches = np.random.default_rng(16), 4, 8000, 20
    rate = 3.0 / (60 * TICK_S)
    no_queue = Policy(admission=lambda config: NoQueue())
    served = serve(poisson(rng, rate, count), rng.integers(1, 120, count), servers, no_queue)
    assert {r.outcome for r in served} == {Outcome.FINISHED, Outcome.REJECTED}
    blocked = np.array([r.outcome is Outcome.REJECTED for r in served], dtype=float)
    shares = blocked.reshape(batches, -1).mean(axis=1)
    margin = stats.t.ppf((1 + CONFIDENCE) / 2, batches - 1) * shares.std(ddof=1) / math.sqrt(batches)
    least, most = erlang_b(servers, rate * 60 * TICK_S), erlang_b(servers, rate * 61 * TICK_S)
    assert shares.mean() - margin < most
    assert least < shares.mean() + margin
    assert margin / least < 0.15
