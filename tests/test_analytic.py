"""Right answers that do not come from the simulator: queueing theory, arithmetic by hand, and a second, naive accounting.

A request that is alone in its engine is served in `steps x step time`, so an engine with `max_num_seqs` 1 and a constant step time
is a single server whose service time is chosen by the output length, and with `max_num_seqs` c it is c servers in lock-step.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sim.core.admission import AdmissionBase, Rejection
from sim.core.clock import FS_PER_S, to_fs
from sim.core.config import EngineConfig
from sim.core.plan import ScheduledRequest, StepPlan, StepResult
from sim.core.policy import Batching, Policy, scheduling_policy
from sim.core.request import Outcome, Request, RequestSpec
from sim.core.view import EngineView
from sim.costs.constant import FixedCost
from sim.costs.protocol import CostModel
from sim.results.recorder import RunRecord
from sim.results.summary import request_columns, summarize, timeline_columns
from sim.world import run_world
from sim.world.executors import ModelExecutor

TICK_S = 2.0**-10
"""A whole number of femtoseconds, and of twice and of half of it too."""
TICK = to_fs(TICK_S)
CONFIDENCE = 0.99
"""Every statistical statement is one fixed sample whose interval of this confidence must hold the theory's value."""


def request(name: object, arrival_s: float, input_tokens: int, output_tokens: int, **fields: object) -> RequestSpec:
    return RequestSpec(
        request_id=str(name), arrival_s=arrival_s, input_tokens=input_tokens, output_tokens=output_tokens, **fields
    )


def engine(**settings: object) -> EngineConfig:
    """A roomy engine, unless something else is asked for."""
    roomy = {"num_gpu_blocks": 100_000, "block_size": 16, "max_model_len": 100_000, "max_num_seqs": 64}
    return EngineConfig(**({**roomy, "max_num_batched_tokens": 4096} | settings))


def summary_of(record: RunRecord) -> dict[str, object]:
    return summarize(record, scenario={}, seed=0, version="")


# -- queueing theory -------------------------------------------------------------------------------------------------


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


# -- by hand -------------------------------------------------------------------------------------------------------------


def test_one_request_in_three_chunks_by_hand() -> None:
    """Prompt 10 in chunks of 4, 4 and 2, three output tokens; a step costs 10 ticks and 1 a token. Steps: 14, 14, 12, 11, 11.
    It holds 1, 2, 3, 3, 3 blocks of 4 slots, with 4, 8, 10, 11, 12 slots filled.
    """
    config = engine(num_gpu_blocks=10, block_size=4, max_num_seqs=4, max_num_batched_tokens=4)
    cost = FixedCost(10 * TICK_S, per_token_s=TICK_S)
    record = run_world(config, cost, [request("a", 0.0, 10, 3)], check=True)
    (only,), summary = record.requests, summary_of(record)
    assert (only.scheduled_fs, only.first_token_fs, only.ended_fs) == (0, 40 * TICK, 62 * TICK)
    assert summary["ttft_s"]["mean"] == 40 * TICK_S
    assert summary["e2el_s"]["mean"] == 62 * TICK_S
    assert summary["tpot_s"]["mean"] == 11 * TICK_S
    assert summary["itl_s"] == dict.fromkeys(["mean", "p50", "p90", "p95", "p99", "max"], 11 * TICK_S)
    assert only.kv_block_fs == TICK * (14 * 1 + 14 * 2 + 12 * 3 + 11 * 3 + 11 * 3)
    assert only.peak_blocks == 3
    assert summary["kv_usage"] == {"mean": pytest.approx(144 / 620), "max": 0.3, "p99": 0.3}
    assert summary["kv_block_seconds"] == pytest.approx(144 * TICK_S, rel=1e-12)
    slots, unfilled = 14 * 4 + 14 * 8 + 12 * 12 + 11 * 12 + 11 * 12, 12 * 2 + 11 * 1
    assert summary["internal_fragmentation"] == {"mean": pytest.approx(unfilled / slots), "max": pytest.approx(2 / 12)}
    assert timeline_columns(record)["prefill_tokens"] == [4, 4, 2, 0]
    assert timeline_columns(record)["decode_tokens"] == [0, 0, 0, 2]


def test_context_is_what_a_step_reads_by_hand() -> None:
    """Ten ticks a step and one for each cached token it reads: the chunks find 0, 4, 8 tokens, the decodes read 11 and 12."""
    config = engine(block_size=4, max_num_seqs=4, max_num_batched_tokens=4)
    cost = FixedCost(10 * TICK_S, per_context_token_s=TICK_S)
    (only,) = run_world(config, cost, [request("a", 0.0, 10, 3)], check=True).requests
    assert only.first_token_fs == TICK * (10 + 14 + 18)
    assert only.ended_fs == TICK * (10 + 14 + 18 + 21 + 22)


def test_a_batch_of_equal_requests_by_hand() -> None:
    """Three prompts of 5 in one step of 15 tokens, then four decode steps of 3 tokens each."""
    cost = FixedCost(10 * TICK_S, per_token_s=TICK_S)
    record = run_world(engine(block_size=4), cost, [request(i, 0.0, 5, 5) for i in range(3)], check=True)
    assert {(r.first_token_fs, r.ended_fs) for r in record.requests} == {(25 * TICK, (25 + 4 * 13) * TICK)}
    summary = summary_of(record)
    assert summary["engine_steps"] == 5
    assert summary["itl_s"]["mean"] == summary["itl_s"]["max"] == summary["tpot_s"]["max"] == 13 * TICK_S
    assert summary["output_throughput_tokens_per_s"] == pytest.approx(15 / (77 * TICK_S))
    assert summary["kv_usage"]["mean"] == pytest.approx(6 / 100_000 * (25 + 3 * 13) / 77 + 9 / 100_000 * 13 / 77)


def test_a_single_token_is_its_first_and_its_last() -> None:
    record = run_world(engine(), FixedCost(10 * TICK_S), [request("a", 0.0, 5, 1)], check=True)
    summary = summary_of(record)
    assert summary["ttft_s"]["mean"] == summary["e2el_s"]["mean"] == 10 * TICK_S
    assert summary["tpot_s"] == {}
    assert summary["itl_s"] == {}


def test_a_preempted_request_waits_out_its_gap_by_hand() -> None:
    """Four blocks of 4 and two prompts of 7 with steps of 10 ticks. At tick 20 both need a third block: the younger gives way with two
    tokens, comes back when the older is done after its fifth step, and gets its third token at tick 60: a gap of 40 ticks.
    """
    config = engine(num_gpu_blocks=4, block_size=4)
    record = run_world(
        config, FixedCost(10 * TICK_S), [request("older", 0.0, 7, 5), request("younger", 0.0, 7, 4)], check=True
    )
    older, younger = record.requests
    assert (older.ended_fs, older.num_preemptions) == (50 * TICK, 0)
    assert (younger.first_token_fs, younger.ended_fs, younger.num_preemptions) == (10 * TICK, 70 * TICK, 1)
    summary = summary_of(record)
    assert summary["itl_s"]["max"] == 40 * TICK_S
    assert summary["itl_s"]["mean"] == pytest.approx((4 * 10 + 10 + 40 + 10) / 7 * TICK_S)
    assert summary["tpot_s"]["max"] == pytest.approx(20 * TICK_S)


def test_what_a_preempted_request_computes_again_is_counted_by_hand() -> None:
    """As above, without a prefix cache: the younger loses its prompt of 7 and the one token it had computed besides."""
    config = engine(num_gpu_blocks=4, block_size=4, enable_prefix_caching=False)
    requests = [request("older", 0.0, 7, 5), request("younger", 0.0, 7, 4)]
    record = run_world(config, FixedCost(TICK_S), requests, check=True)
    assert [r.recomputed_tokens for r in record.requests] == [0, 8]
    assert summary_of(record)["recomputed_tokens"] == 8


def test_a_pool_that_holds_everything_at_once_never_preempts() -> None:
    rng = np.random.default_rng(17)
    sizes = rng.integers(1, 200, (60, 2))
    requests = [request(i, 0.0, int(n), int(m)) for i, (n, m) in enumerate(sizes)]
    needed = sum(math.ceil((n + m - 1) / 16) for n, m in sizes)
    record = run_world(engine(num_gpu_blocks=needed), FixedCost(TICK_S), requests, check=True)
    assert summary_of(record)["num_preemptions"] == 0
    assert all(r.outcome is Outcome.FINISHED for r in record.requests)


def test_one_request_at_a_time_never_preempts_however_small_the_pool() -> None:
    requests = [request(i, 0.0, 20, 30) for i in range(20)]
    config = engine(num_gpu_blocks=4, max_num_seqs=1)  # 49 tokens need four blocks
    record = run_world(config, FixedCost(TICK_S), requests, check=True)
    assert {(r.outcome, r.num_preemptions) for r in record.requests} == {(Outcome.FINISHED, 0)}


# -- random runs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One engine and its load."""

    config: EngineConfig
    cost: FixedCost
    requests: tuple[RequestSpec, ...]
    batching: Batching = Batching.MIXED

    def go(self, **hooks: object) -> RunRecord:
        policy = replace(scheduling_policy(self.config), batching=self.batching)
        return run_world(self.config, self.cost, self.requests, check=True, policy=policy, **hooks)


@st.composite
def runs(
    draw: st.DrawFn,
    *,
    windows: Sequence[int | None] = (None,),
    aborts: bool = True,
    shared: bool = True,
    growing: bool | None = None,
) -> Run:
    """Small engines, mostly short of blocks, with arrivals on a grid of 1/1024 s."""
    growing = draw(
        st.booleans() if growing is None else st.just(growing)
    )  # short prompts and long answers: everybody is let in, and then there is not enough
    max_num_seqs = draw(st.sampled_from([3, 5] if growing else [1, 2, 5]))
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    config = engine(
        num_gpu_blocks=draw(st.sampled_from([64, 48] if growing else [40, 96, 300])) // block_size,
        block_size=block_size,
        max_model_len=128,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([60, 12, 4, 0])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        reserve_full_prompt=draw(st.booleans()),
        sliding_window=draw(st.sampled_from(windows)),
        watermark=draw(st.sampled_from([0.0, 0.2])),
    )
    cost = draw(
        st.sampled_from(
            [
                FixedCost(8 * TICK_S),
                FixedCost(8 * TICK_S, per_context_token_s=TICK_S),
                FixedCost(4 * TICK_S, per_token_s=TICK_S, per_seq_s=2 * TICK_S),
            ]
        )
    )
    span, arrival_ticks, made = draw(st.sampled_from([4, 2, 8])), 0, []
    for number in range(draw(st.integers(1, 8))):
        arrival_ticks += draw(st.sampled_from([0, 3, 8] if growing else [0, 8, 16, 50]))
        ids = draw(st.sampled_from(["", "xxxx", "xx", "xxxxxx", "xxy", "y"])) if shared else ""
        patience = draw(st.sampled_from([None] * 6 + [9, 24, 64])) if aborts else None
        made.append(
            request(
                number,
                arrival_ticks * TICK_S,
                draw(st.integers(1, 10 if growing else 40)),
                draw(st.integers(15, 40) if growing else st.integers(1, 30)),
                priority=draw(st.integers(0, 2)),
                content_ids=tuple(ids),
                content_block_tokens=span if ids else 0,
                cancel_after_s=None if patience is None else patience * TICK_S,
            )
        )
    return Run(config, cost, tuple(made), draw(st.sampled_from([Batching.MIXED, *Batching])))


@dataclass
class StepTimes:
    """An executor that writes down when every single step began and how long it took."""

    cost: CostModel
    steps: list[tuple[int, int, tuple[ScheduledRequest, ...]]] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> StepResult:
        result = ModelExecutor(self.cost).execute(plan)
        assert plan.repeat == 1
        self.steps.append((plan.start_fs, result.durations.total_fs, plan.scheduled(0)))
        return result


class Recount:
    """A second accounting: replays the decision log of a stepping run with the times of its steps, token by token.

    It knows how an engine works (a request whose known tokens are all computed gets a new one at the end of the step; a prefix hit
    is a block of a new table that no token is computed for) and nothing of how the simulator keeps its books.
    """

    def __init__(self, run: Run) -> None:
        log: list[dict[str, object]] = []
        times = StepTimes(run.cost)
        self.run = run
        self.record = run.go(stepping=True, decision_log=log.append, executor=lambda core: times)
        self.known = {spec.request_id: spec.input_tokens for spec in run.requests}
        self.computed: Counter[str] = Counter()
        self.tables: dict[str, list[int]] = defaultdict(list)
        self.token_times_fs: dict[str, list[int]] = defaultdict(list)
        self.scheduled_tokens: Counter[str] = Counter()
        self.scheduled_fs: dict[str, int] = {}
        self.first_hits: dict[str, int] = {}
        self.preemptions: Counter[str] = Counter()
        self.held_fs: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.time_by_owned_fs: Counter[int] = Counter()
        self.slots_fs = self.unfilled_fs = self.running_fs = 0
        self.worst_unfilled = 0.0
        steps = [entry for entry in log if entry["scheduled"]]
        for entry, (start_fs, duration_fs, shares) in zip(steps, times.steps, strict=True):
            self._step(entry, start_fs, duration_fs)
            self._compare_tables(shares)

    def _step(self, entry: dict[str, object], start_fs: int, duration_fs: int) -> None:
        size = self.run.config.block_size
        scheduled = {name for name, _, _ in entry["scheduled"]}
        for name, blocks in entry["released"]:
            kept = [0 if block in blocks else block for block in self.tables[name]]
            self.tables[name] = kept if name in scheduled or any(kept) else []
        for name in entry["preempted"]:
            self.tables[name] = []
            self.preemptions[name] += 1
        for name, tokens, blocks in entry["scheduled"]:
            if name in entry["admitted"]:
                self.tables[name] = []
                hits = len(blocks) - math.ceil(tokens / size)
                self.computed[name] = hits * size
                self.first_hits.setdefault(name, hits * size)
                self.scheduled_fs.setdefault(name, start_fs)
            else:
                self._slide(name)
                assert not set(blocks) & self._owned(), "a block is handed out while somebody holds it"
            self.tables[name] = [*self.tables[name], *blocks]
            self.computed[name] += tokens
            self.scheduled_tokens[name] += tokens
            if self.computed[name] == self.known[name]:
                self.known[name] += 1
                self.token_times_fs[name].append(start_fs + duration_fs)
        self._integrate(duration_fs)

    def _integrate(self, duration_fs: int) -> None:
        size = self.run.config.block_size
        slots = unfilled = 0
        for name, table in self.tables.items():
            if table:
                held = len(table) - table.count(0)
                slots += held * size
                unfilled += len(table) * size - self.computed[name]  # slots of blocks that slid away held tokens
                self.held_fs[name] += held * duration_fs
                self.peak[name] = max(self.peak[name], held)
                self.running_fs += duration_fs
        self.time_by_owned_fs[len(self._owned())] += duration_fs
        self.slots_fs += slots * duration_fs
        self.unfilled_fs += unfilled * duration_fs
        self.worst_unfilled = max(self.worst_unfilled, unfilled / slots)

    def _slide(self, name: str) -> None:
        window, size, table = self.run.config.sliding_window, self.run.config.block_size, self.tables[name]
        if window is not None:
            seen_from = self.computed[name] - window + 1  # the oldest token that the next one attends to
            self.tables[name] = [0 if (i + 1) * size <= seen_from else block for i, block in enumerate(table)]

    def _owned(self) -> set[int]:
        return {block for table in self.tables.values() for block in table if block}

    def _compare_tables(self, shares: tuple[ScheduledRequest, ...]) -> None:
        for share in shares:
            assert list(share.block_table) == self.tables[share.request_id]
            assert share.context_tokens + share.num_tokens == self.computed[share.request_id]

    def gaps_fs(self) -> list[int]:
        """Every inter-token gap of every finished request."""
        finished = [r.request_id for r in self.record.requests if r.outcome is Outcome.FINISHED]
        return [b - a for name in finished for a, b in pairwise(self.token_times_fs[name])]


def assert_statistics(found: dict[str, float], values: Sequence[float]) -> None:
    """Mean, percentiles and maximum of `found` are those of `values`, one by one."""
    if not len(values):
        assert found == {}
        return
    expected = {"mean": np.mean(values), "max": np.max(values)}
    expected |= {f"p{percent}": np.percentile(values, percent) for percent in (50, 90, 95, 99)}
    assert found == {name: pytest.approx(value, rel=1e-12, abs=1e-15) for name, value in expected.items()}


every_run = runs(windows=(None, None, 4, 9))


@settings(max_examples=100)
@given(every_run)
def test_latencies_are_those_of_the_tokens_one_by_one(run: Run) -> None:
    recount = Recount(run)
    finished = [r for r in recount.record.requests if r.outcome is Outcome.FINISHED]
    tokens = recount.token_times_fs
    for r in finished:
        times_fs = tokens[r.request_id]
        assert len(times_fs) == r.num_output_tokens == min(r.spec.output_tokens, 128 - r.spec.input_tokens)
        assert (r.first_token_fs, r.ended_fs) == (times_fs[0], times_fs[-1])
        assert r.scheduled_fs == recount.scheduled_fs[r.request_id]
    summary = summary_of(recount.record)
    assert_statistics(summary["itl_s"], [gap / FS_PER_S for gap in recount.gaps_fs()])
    arrival = {r.request_id: r.arrival_fs for r in finished}
    assert_statistics(summary["ttft_s"], [(tokens[name][0] - arrival[name]) / FS_PER_S for name in arrival])
    assert_statistics(summary["e2el_s"], [(tokens[name][-1] - arrival[name]) / FS_PER_S for name in arrival])
    spans = [tokens[name] for name in arrival if len(tokens[name]) > 1]
    assert_statistics(summary["tpot_s"], [(t[-1] - t[0]) / (len(t) - 1) / FS_PER_S for t in spans])


@settings(max_examples=100)
@given(every_run)
def test_blocks_held_are_those_of_the_steps_one_by_one(run: Run) -> None:
    recount = Recount(run)
    for r in recount.record.requests:
        name = r.request_id
        assert (r.kv_block_fs, r.num_preemptions) == (recount.held_fs[name], recount.preemptions[name])
        assert r.prefix_hit_tokens == recount.first_hits.get(name, 0)
        assert r.peak_blocks >= recount.peak[name]
    summary, times = summary_of(recount.record), recount.time_by_owned_fs
    assert summary["kv_block_seconds"] == pytest.approx(sum(n * t for n, t in times.items()) / FS_PER_S, rel=1e-12)
    assert recount.record.recorders[0].integrals.time_by_used_blocks == times
    expected_max = max(times) / run.config.num_gpu_blocks if times else 0.0
    assert summary["kv_usage"]["max"] == expected_max


@settings(max_examples=100)
@given(runs(aborts=False))
def test_kv_usage_is_the_time_average_with_idle_time_as_unused(run: Run) -> None:
    recount = Recount(run)
    times, total = recount.time_by_owned_fs, max(r.ended_fs for r in recount.record.requests)
    usage = summary_of(recount.record)["kv_usage"]
    if not times:
        assert usage == {"mean": 0.0, "max": 0.0, "p99": 0.0}
        return
    blocks = run.config.num_gpu_blocks
    assert usage["mean"] == pytest.approx(sum(n * t for n, t in times.items()) / (total * blocks), rel=1e-9)
    above = {n: sum(t for m, t in times.items() if m > n) for n in [0, *times]}
    p99 = min(n for n, above_fs in above.items() if 100 * above_fs <= total)
    assert usage["p99"] == pytest.approx(p99 / blocks)


@settings(max_examples=100)
@given(runs())
def test_internal_fragmentation_is_that_of_the_steps_one_by_one(run: Run) -> None:
    recount = Recount(run)
    if recount.slots_fs:
        fragmentation = summary_of(recount.record)["internal_fragmentation"]
        assert fragmentation["mean"] == pytest.approx(recount.unfilled_fs / recount.slots_fs, rel=1e-12)
        assert fragmentation["max"] == pytest.approx(recount.worst_unfilled, rel=1e-12)


def test_internal_fragmentation_counts_only_blocks_that_are_held() -> None:
    """A window of 8 over blocks of 4: a request of 40 tokens and more holds at most four blocks, never less than none of them filled."""
    run = Run(engine(block_size=4, sliding_window=8), FixedCost(TICK_S), (request("a", 0.0, 40, 20),))
    recount = Recount(run)
    fragmentation = summary_of(recount.record)["internal_fragmentation"]
    assert 0.0 <= fragmentation["mean"] <= fragmentation["max"] <= 1.0
    assert fragmentation["mean"] == pytest.approx(recount.unfilled_fs / recount.slots_fs, rel=1e-12)


@settings(max_examples=100)
@given(runs())
def test_the_timeline_runs_as_many_requests_as_the_log_for_as_long(run: Run) -> None:
    recount = Recount(run)
    rows = recount.record.recorders[0].rows
    assert sum(row.running * (row.end_fs - row.start_fs) for row in rows) == recount.running_fs
    assert sum(row.prefill_tokens + row.decode_tokens for row in rows) == sum(recount.scheduled_tokens.values())
    assert sum(row.steps for row in rows) == recount.record.recorders[0].core.steps


def test_the_timeline_of_a_sliding_window_has_a_row_for_each_composition_of_the_batch() -> None:
    """Two requests decode together for 9 steps and one alone for 10 more."""
    requests = (request("short", 0.0, 4, 10), request("long", 0.0, 4, 20))
    recount = Recount(Run(engine(block_size=4, sliding_window=8), FixedCost(TICK_S), requests))
    timeline = timeline_columns(recount.record)
    assert list(zip(timeline["running"], timeline["steps"], strict=True)) == [(2, 1), (2, 9), (1, 10)]


def test_a_request_that_comes_and_goes_in_one_step_has_its_row_of_the_timeline() -> None:
    """Its first 8 tokens are cached and it asks for one: it computes a single token, like a decode, and is done."""
    shared = {"content_ids": ("x", "y"), "content_block_tokens": 4}
    requests = (
        request("seed", 0.0, 8, 1, **shared),
        request("long", 0.0, 3, 20),
        request("quick", 5 * TICK_S, 9, 1, **shared),
    )
    recount = Recount(Run(engine(block_size=4), FixedCost(TICK_S), requests))
    assert recount.first_hits["quick"] == 8
    timeline = timeline_columns(recount.record)
    assert list(zip(timeline["running"], timeline["steps"], strict=True)) == [(2, 1), (1, 4), (2, 1), (1, 14)]


def test_nobody_waits_in_a_row_of_the_timeline_that_ended_before_they_came() -> None:
    """Two requests come together when the engine has long been idle, and are both started at once."""
    requests = [request("first", 0.0, 4, 5), request("a", 1.0, 4, 5), request("b", 1.0, 4, 5)]
    record = run_world(engine(), FixedCost(TICK_S), requests, check=True)
    assert timeline_columns(record)["waiting"] == [0, 0, 0, 0]


def test_blocks_taken_and_taken_back_in_one_decision_are_no_peak() -> None:
    """Three blocks of 4; the least important request was admitted first. At the third step both need a second block and one is left:
    it is given first to the one, and then, with everything the one had, to the other. The first never computed with two blocks.
    """
    low = request("low", 0.0, 3, 9, priority=1, cancel_after_s=2.5 * TICK_S)
    high = request("high", 0.5 * TICK_S, 4, 3, priority=0)
    config = engine(num_gpu_blocks=3, block_size=4, scheduling_policy="priority")
    recount = Recount(Run(config, FixedCost(TICK_S), (low, high)))
    assert recount.preemptions == {"low": 1}
    assert recount.peak == {"low": 1, "high": 2}
    assert {r.request_id: r.peak_blocks for r in recount.record.requests} == recount.peak


# -- conservation ----------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(every_run)
def test_requests_and_their_time_are_conserved(run: Run) -> None:
    """Arrived = finished + rejected + aborted + timed out + failed, and L = lambda W, from the columns of the two tables alone.

    Time in the system is time in the queue, from the request table, and time running, from the timeline: with neither preemptions
    nor departures inside a step, which end for the client before they end for the engine, the two tables must agree.
    """
    record = run.go()
    table, timeline, summary = request_columns(record), timeline_columns(record), summary_of(record)
    assert Counter(table["outcome"]) == {
        outcome.value: summary[outcome.value] for outcome in Outcome if summary[outcome.value]
    }
    assert sum(summary[outcome.value] for outcome in Outcome) == len(run.requests) == summary["num_requests"]
    if set(table["outcome"]) - {"finished", "rejected"} or any(table["preemptions"]) or run.config.sliding_window:
        return
    rows = [i for i, outcome in enumerate(table["outcome"]) if outcome == "finished"]
    in_system_s = sum(table["finished_s"][i] - table["arrival_s"][i] for i in rows)
    queued_s = sum(table["queued_s"][i] for i in rows)
    running_s = sum(n * t for n, t in zip(timeline["running"], timeline["duration_s"], strict=True))
    assert queued_s + running_s == pytest.approx(in_system_s, rel=1e-9, abs=1e-12)


@settings(max_examples=100)
@given(runs(shared=False, windows=(None, 4), growing=True))
def test_every_token_of_a_finished_request_is_computed_once_and_again_only_when_it_was_lost(run: Run) -> None:
    """Nothing is shared between requests here; the last token of each is never fed back."""
    recount = Recount(run)
    for r in recount.record.requests:
        if r.outcome is Outcome.FINISHED:
            needed = r.spec.input_tokens + r.num_output_tokens - 1
            assert recount.scheduled_tokens[r.request_id] == needed + r.recomputed_tokens
        if r.num_preemptions == 0:
            assert r.recomputed_tokens == 0


# -- time -----------------------------------------------------------------------------------------------------------------


def times_fs(record: RunRecord) -> list[tuple[int | None, ...]]:
    return [(r.arrival_fs, r.scheduled_fs, r.first_token_fs, r.ended_fs) for r in record.requests]


@settings(max_examples=100)
@given(every_run)
def test_doubling_every_time_doubles_every_latency_exactly(run: Run) -> None:
    slower = tuple(
        request(
            spec.request_id,
            2 * spec.arrival_s,
            spec.input_tokens,
            spec.output_tokens,
            priority=spec.priority,
            content_ids=spec.content_ids,
            content_block_tokens=spec.content_block_tokens,
            cancel_after_s=None if spec.cancel_after_s is None else 2 * spec.cancel_after_s,
        )
        for spec in run.requests
    )
    doubled = times_fs(replace(run, cost=run.cost.scaled(2), requests=slower).go())
    assert doubled == [tuple(None if t is None else 2 * t for t in times) for times in times_fs(run.go())]


@settings(max_examples=60)
@given(every_run, st.integers(10**4, 10**6))
def test_idle_time_before_the_first_arrival_shifts_everything_and_changes_nothing(run: Run, idle_ticks: int) -> None:
    later = tuple(
        request(
            spec.request_id,
            spec.arrival_s + idle_ticks * TICK_S,
            spec.input_tokens,
            spec.output_tokens,
            priority=spec.priority,
            content_ids=spec.content_ids,
            content_block_tokens=spec.content_block_tokens,
            cancel_after_s=spec.cancel_after_s,
        )
        for spec in run.requests
    )
    shifted = times_fs(replace(run, requests=later).go())
    expected = [tuple(None if t is None else t + idle_ticks * TICK for t in times) for times in times_fs(run.go())]
    assert shifted == expected
