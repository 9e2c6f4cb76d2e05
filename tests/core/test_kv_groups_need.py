"""Several attention groups in one pool: one need for sizer, gate, predictor and allocator (I5)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import Scenario, simulate
from sim.assembly import core_groups
from sim.core.blocks import BlockPool
from sim.core.config import AttentionGroup, EngineConfig
from sim.core.groups import GroupTables
from sim.core.request import Outcome
from sim.memory import build_ledger
from tests.support.attention_groups import config, group_sets

# -- one need (I5) -----------------------------------------------------------------------------------------------------


def test_t5_the_gate_of_two_groups(drive):
    """Golden trace T5: bs 16, W 64, batched 128, max length 1024. A 512-token prompt needs 32 + 13 = 45 blocks, 256 tokens 16 + 13."""
    groups = (AttentionGroup(block_size=16), AttentionGroup(block_size=16, window=64))
    settings = {"max_model_len": 1024, "max_num_batched_tokens": 128, "kv_groups": groups}
    pool = drive(64 + 13, 16, **settings)
    assert pool.core.config.most_blocks(512) == 45
    pool.add("holder", 400)  # 25 + 13 blocks are asked for, and 77 - 45 = 32 would be left for it
    pool.add("512", 512)
    assert pool.step().tokens == {"holder": 128}
    first = next(step for step in pool.run() if "512" in step.tokens)
    assert pool.ended[0].request_id == "holder" and first is not None
    small = drive(5, 16, **settings)
    refused = small.add("256", 256)
    assert refused.outcome is Outcome.REJECTED
    assert "need 29 KV blocks in 2 attention groups, but the whole pool has 5" in refused.reason


@given(group_sets(), st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_what_is_predicted_is_taken_and_bounded_by_the_gate(
    groups: tuple[AttentionGroup, ...], chunks: list[int]
) -> None:
    """However a sequence is cut into chunks, each group's need is what it takes, and never more is held than the gate counted (T7)."""
    total = sum(chunks)
    made = config(groups, block_size=4, max_num_batched_tokens=max(*chunks, 8), max_model_len=256)
    pool = BlockPool(1000)
    tables = GroupTables(pool, made)
    table = tables.new("A")
    for computed, after in pairwise([0, *(sum(chunks[: n + 1]) for n in range(len(chunks)))]):
        tables.slide(table, computed)
        predicted, free = tables.need(table, computed, after - computed), pool.num_free
        tables.grow(table, computed, after - computed)
        assert free - pool.num_free == predicted
        assert pool.num_owned == made.blocks_at(computed, after) <= made.most_blocks(total)
        pool.check([("A", table.blocks)])


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gemma-2-9b", "gemma-4-26b-a4b", "llama-3.1-8b"])
@given(tokens=st.integers(1, 8192), batched=st.sampled_from([512, 2048, 8192]))
def test_the_gate_counts_what_the_sizer_counted(model: str, tokens: int, batched: int) -> None:
    """I12 of the engine policies: the same number from the ledger and from the engine that it sized, for a request of any length."""
    ledger = _ledger(model, batched)
    engine = EngineConfig(
        num_gpu_blocks=ledger.num_gpu_blocks,
        block_size=16,
        max_model_len=ledger.max_model_len,
        max_num_seqs=256,
        max_num_batched_tokens=batched,
        kv_groups=core_groups(ledger),
        in_flight_tokens=ledger.in_flight_tokens,
    )
    assert engine.most_blocks(tokens) == ledger.request_blocks(tokens)


_LEDGERS = {}


def _ledger(model: str, batched: int):
    key = (model, batched)
    if key not in _LEDGERS:
        _LEDGERS[key] = build_ledger(
            model, "h200-sxm-141gb", max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=batched
        )
    return _LEDGERS[key]


# -- the pool, filled --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gemma-2-9b", "gemma-4-26b-a4b"])
def test_requests_of_the_longest_length_fill_the_pool_exactly_as_the_ledger_says(model: str) -> None:
    """Prompts of max_model_len - 1 tokens, all computed in one step: each takes what the ledger counts for a request, and
    floor(max_concurrency) of them start at once; one more waits until the first are done.
    """
    length, batched = 1025, 1 << 16
    sizes = {"max_model_len": length, "max_num_batched_tokens": batched, "max_num_seqs": 64}
    need = build_ledger(model, "h200-sxm-141gb", **sizes).request_blocks(length - 1)
    ledger = build_ledger(model, "h200-sxm-141gb", num_gpu_blocks_override=7 * need + need // 2, **sizes)
    fits = ledger.num_gpu_blocks // ledger.request_blocks(length - 1)
    assert fits == 7
    assert ledger.max_concurrency == ledger.num_gpu_blocks / ledger.request_blocks(length)
    lengths = {"input_tokens": length - 1, "output_tokens": 1, "num_requests": fits + 1, "rate": float("inf")}
    result = simulate(
        Scenario(
            model=model,
            gpu="h200-sxm-141gb",
            workload={"workload": "uniform", **lengths},
            engine={"num_gpu_blocks_override": ledger.num_gpu_blocks, **sizes},
            run={"check": True},
        )
    )
    assert result.summary["num_gpu_blocks"] == ledger.num_gpu_blocks
    assert result.summary["finished"] == fits + 1
    assert result.timeline["running"].tolist() == [fits, 1]
    assert result.timeline["used_blocks"].tolist() == [fits * need, need]


def test_as_many_longest_requests_as_the_ledger_counts_run_at_once_without_a_preemption() -> None:
    """Longer than a step and than the window, decoding to their end: the ledger's count is safe. (A window holds its worst only
    while its prompt is computed, so more may run.)
    """
    length = 4096
    sizes = {"max_model_len": length, "max_num_batched_tokens": 512, "max_num_seqs": 64}
    ledger = build_ledger("gpt-oss-20b", "h200-sxm-141gb", num_gpu_blocks_override=3000, **sizes)
    fits = int(ledger.max_concurrency)
    result = simulate(
        Scenario(
            model="gpt-oss-20b",
            gpu="h200-sxm-141gb",
            workload={
                "workload": "uniform",
                "input_tokens": 3000,
                "output_tokens": 1096,
                "num_requests": fits,
                "rate": float("inf"),
            },
            engine={"num_gpu_blocks_override": 3000, **sizes},
            run={"check": True},
        )
    )
    assert (result.summary["finished"], result.summary["num_preemptions"]) == (fits, 0)
    assert result.timeline["running"].max() == fits
