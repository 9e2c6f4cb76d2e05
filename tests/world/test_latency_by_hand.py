"""Latencies, gaps and recomputed tokens of a few requests, worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sim.core.request import Outcome
from sim.costs.constant import FixedCost
from sim.results.summary import timeline_columns
from sim.world import run_world
from tests.support.roomy import TICK, TICK_S, engine, request, summary_of


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
