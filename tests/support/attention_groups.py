"""Engines with several attention groups in one pool."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from sim.core.config import AttentionGroup, EngineConfig

FULL_AND_32 = (AttentionGroup(block_size=16, window=32), AttentionGroup(block_size=16))
"""The two-group model of the cases on paper: a window of 32 tokens, blocks of 16."""


def config(groups: Sequence[AttentionGroup] = FULL_AND_32, **settings: object) -> EngineConfig:
    usual = {"num_gpu_blocks": 100, "block_size": 16, "max_model_len": 1024, "max_num_seqs": 8}
    return EngineConfig(**(usual | {"max_num_batched_tokens": 32, "kv_groups": tuple(groups)} | settings))


@st.composite
def group_sets(draw: st.DrawFn) -> tuple[AttentionGroup, ...]:
    sizes = draw(st.lists(st.sampled_from([4, 4, 8, 16]), min_size=1, max_size=3))
    windows = st.sampled_from([None, 1, 4, 5, 9, 20])
    return (
        AttentionGroup(block_size=4, window=draw(windows)),
        *(AttentionGroup(block_size=size, window=draw(windows)) for size in sizes),
    )
