"""Faults planted in what several attention groups add to a plan: what slid out, and a table for each group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from experiments.validation import SCENARIOS, reference_answers, run_for_real
from experiments.validation.worlds import Recorded, changed_answers, preset
from gpu.cpu_moves import CpuMoves
from gpu.layout import KVLayout
from gpu.ops import Ops
from gpu.plan_moves import PlanMoves
from gpu.pool import PagedKVPool, PoisonedReadError
from sim.core.batch_shape import BatchShape
from sim.core.blocks import BlockPool, DoubleFreeError, IntegrityError
from sim.core.config import AttentionGroup, EngineConfig
from sim.core.groups import tables_of
from sim.core.plan import ScheduledRequest, StepPlan
from tests.support.scenarios import with_engine
from tests.support.tampered import tampering


def run_tampered(change: Callable[[StepPlan], StepPlan]) -> Recorded:
    scenario = with_engine(SCENARIOS["hybrid-0"], enable_prefix_caching=False)
    return run_for_real(scenario, preset("vllm-v1"), wrap=tampering(change))


def test_a_device_that_is_not_told_what_slid_out_is_found_out(steady_time):
    with pytest.raises(
        IntegrityError, match=r"r\d no longer uses blocks \[[\d, ]+\] at step \d+, and no plan released them"
    ):
        run_tampered(lambda plan: replace(plan, slid=()))


def test_a_block_that_slides_out_twice_is_named(steady_time):
    with pytest.raises(
        DoubleFreeError, match=r"block \d+ is released twice: first by (r\d) at step (\d+), now by \1 at step \2"
    ):
        run_tampered(lambda plan: replace(plan, slid=plan.slid * 2))


def test_a_block_that_slides_out_while_it_is_read_is_named(steady_time):
    planted: list[int] = []

    def slide_early(plan):
        share = plan.scheduled(0)[0]
        if plan.step < 6 or planted or share.num_tokens > 1 or share.context_tokens < 12:
            return plan
        planted.append(plan.step)
        seen = next(block for block in share.group_tables[1] if block)
        return replace(plan, slid=(*plan.slid, (share.request_id, (seen,))))

    with pytest.raises(
        PoisonedReadError, match=r"^(r\d) reads block \d+ at step (\d+): .* layer 2; .*released by \1 at step \2$"
    ):
        run_tampered(slide_early)


def test_layers_that_read_the_table_of_another_group_give_other_answers(steady_time):
    """Each table is the request's own, so no owner tag is wrong: only the answers show that the tests above are not blind."""
    run = run_for_real(SCENARIOS["hybrid-swaps-0"], preset("vllm-v1"))
    reference = reference_answers(SCENARIOS["hybrid-swaps-0"])
    assert changed_answers(run, reference) == []

    def crossed(plan):
        shares = plan.scheduled(0)
        turned = tuple(
            replace(share, group_tables=share.group_tables[1::-1] + share.group_tables[2:]) for share in shares
        )
        return replace(plan, repeat=1, scheduled=lambda ahead: turned if plan.step % 2 else shares)

    scenario = with_engine(SCENARIOS["hybrid-swaps-0"], enable_prefix_caching=False, num_cpu_blocks=0)
    wrong = run_for_real(scenario, preset("vllm-v1"), checked=False, wrap=tampering(crossed))
    assert changed_answers(wrong, reference)


def test_what_slid_out_may_be_somebody_else_s_in_the_same_plan():
    """First of all a plan's device gives back what slid: the new holder's block is fresh, and poisoned until it writes."""
    pool = PagedKVPool(
        KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32"), 8, checked=True
    )
    groups = (AttentionGroup(block_size=4, window=5), AttentionGroup(block_size=4))
    config = EngineConfig(num_gpu_blocks=8, block_size=4, kv_groups=groups)
    moves = PlanMoves(
        pool,
        Ops("cpu"),
        CpuMoves(pool, Ops("cpu")),
        is_cached=lambda block: False,
        tables=tables_of(BlockPool(8), config),
    )

    def hold(name: str, context: int, *tables: tuple[int, ...]) -> None:
        moves.hold(ScheduledRequest(name, 1, context, tables[0], samples=True, group_tables=tables))

    def begin(step: int, **decided: object) -> None:
        pool.begin_step(step)
        moves.begin(
            StepPlan(step=step, repeat=1, start_fs=0, shape=BatchShape(), scheduled=lambda ahead: (), **decided)
        )

    begin(0)
    hold("a", 11, (1, 2, 3), (4, 5, 6))
    for block in range(1, 7):
        pool.layer(0).kv[block].fill_(1.0)
    pool.end_step()
    begin(1, slid=(("a", (1,)), ("a", (2,))), copies=((6, 2),))
    hold("a", 11, (0, 0, 3), (4, 5, 6))
    hold("b", 4, (2, 1), (7, 8))
    assert pool.layer(0).kv[1].isnan().all()  # b's, and not written yet
    assert (pool.layer(0).kv[2] == 1.0).all()  # b's, copied into
    assert pool.tags.holders(1) == pool.tags.holders(2) == ("b",)
