"""A step that ran out of memory filled no block: what it was to fill is not saved to the CPU tier before it is."""

from __future__ import annotations

import pytest

from sim.core.config import AttentionGroup
from sim.core.durations import Durations
from sim.core.plan import OomReport, StepResult
from tests.support.tiers import named, pass_all

FAILED = StepResult(durations=Durations.one(1), oom=OomReport(op="activations", requested_bytes=2, free_bytes=1))
GROUPS = (AttentionGroup(block_size=4, window=6), AttentionGroup(block_size=4))


@pytest.mark.parametrize("groups", [(), GROUPS])
def test_a_block_whose_step_failed_is_saved_after_the_step_that_fills_it(drive, groups):
    """Three tokens of a block of four, then three more in a step that fails: the next one fills the block, and the one after saves it."""
    engine = drive(
        20, 4, max_num_batched_tokens=3, num_cpu_prefix_blocks=20, max_model_len=32, max_num_seqs=1, kv_groups=groups
    )
    engine.add("a", 12, output_tokens=4, **named("xyz"))
    engine.commit(engine.plan())
    failed = engine.plan()
    (share,) = failed.scheduled(0)
    assert (share.context_tokens, share.num_tokens) == (3, 3)
    engine.core.commit(failed, FAILED, engine.now_fs)
    engine.core.check()
    again = engine.plan()
    (share,) = again.scheduled(0)
    first = tuple(table[0] for table in share.group_tables or (share.block_table,))
    assert share.context_tokens == 3
    assert again.saves == ()
    engine.commit(again)
    after = engine.plan()
    ((_, pairs),) = after.saves
    assert tuple(block for block, _ in pairs) == first
    engine.commit(after)
    pass_all(engine, after)
