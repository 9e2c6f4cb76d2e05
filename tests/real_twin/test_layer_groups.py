"""Which layers share a block table, and where in a block each has its KV: dealt out by hand, and as the ledger counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.layer_groups import LayerGroups
from gpu.layout import KVLayout
from sim.assembly import core_groups
from sim.catalog.layers import AttentionShape
from sim.catalog.models import model_shape
from sim.catalog.shape import ModelShape
from sim.core.config import AttentionGroup, ConfigError
from sim.memory import build_ledger

FULL = AttentionGroup(block_size=16)


def window(tokens: int) -> AttentionGroup:
    return AttentionGroup(block_size=16, window=tokens)


def shape(*windows: int | None) -> ModelShape:
    """The tiny Llama with a layer for each of `windows`."""
    kinds = list(dict.fromkeys(windows))
    (plain,) = model_shape("tiny-llama-test").attention
    return replace(
        model_shape("tiny-llama-test"),
        num_layers=len(windows),
        attention=tuple(replace(plain, window=seen) for seen in kinds),
        attention_of_layer=tuple(map(kinds.index, windows)),
    )


def test_layers_of_a_kind_are_dealt_out_in_turn():
    """Five window layers over two groups and two full ones: 0, 3 and 6 go to the first, 2 and 5 to the second."""
    groups = LayerGroups.of(shape(8, None, 8, 8, None, 8, 8), (window(8), window(8), FULL))
    assert groups.layers == ((0, 3, 6), (2, 5), (1, 4))
    assert groups.windows == (8, 8, None)
    assert (groups.num_groups, groups.num_places) == (3, 3)
    assert groups.places() == [(0, 0), (2, 0), (1, 0), (0, 1), (2, 1), (1, 1), (0, 2)]


def test_groups_of_one_kind_need_not_stand_together():
    groups = LayerGroups.of(shape(8, None, 8, 4), (window(8), FULL, window(4), window(8)))
    assert groups.layers == ((0,), (1,), (3,), (2,))


def test_one_table_is_for_all_layers_whatever_they_see():
    """As in releases that keep every token of every layer: what the longest-sighted layer sees is what is read."""
    assert LayerGroups.of(shape(8, None, 4), (FULL,)) == LayerGroups(((0, 1, 2),), (None,))
    assert LayerGroups.of(shape(8, 4), (window(8),)) == LayerGroups(((0, 1),), (8,))
    assert LayerGroups.of(shape(8, 4), (FULL,)) == LayerGroups(((0, 1),), (8,))


@pytest.mark.parametrize(
    ("layers", "groups", "words"),
    [
        ((None, None), (window(8),), ["keeps a window of 8 tokens", "layers that see all tokens"]),
        ((16, 8), (window(8),), ["keeps a window of 8 tokens", "layers that see 16 tokens"]),
        ((8, None, 4), (window(8), FULL), ["1 layers that see 4 tokens and 0 attention groups"]),
        ((8, 8, None), (window(8), FULL, FULL), ["1 layers that see all tokens and 2 attention groups"]),
        ((8, 8), (window(8), FULL), ["0 layers that see all tokens and 1 attention groups"]),
        ((8, None), (window(8), AttentionGroup(block_size=32)), ["blocks of 16 and 32 tokens"]),
    ],
)
def test_groups_that_are_not_the_model_s_are_refused(layers, groups, words):
    with pytest.raises(ConfigError) as raised:
        LayerGroups.of(shape(*layers), groups)
    assert all(word in str(raised.value) for word in words), raised.value


@given(st.lists(st.sampled_from((None, None, 24, 40)), min_size=1, max_size=40))
def test_pool_and_ledger_have_the_same_groups_and_the_same_bytes_a_block(layers):
    """Any mix of layers: as many groups of as many layers as the ledger counts, in blocks of the bytes that it divides the budget by."""
    model = shape(*layers)
    ledger = build_ledger(model, "h100-sxm-80gb", max_model_len=512)
    groups = LayerGroups.of(
        model, core_groups(ledger) or (AttentionGroup(block_size=16, window=ledger.layout.groups[0].window),)
    )
    assert [len(own) for own in groups.layers] == [group.layers for group in ledger.layout.groups]
    assert groups.num_places == ledger.layout.layers_per_group
    assert sorted(layer for own in groups.layers for layer in own) == list(range(len(layers)))
    pool = KVLayout(num_layers=groups.num_places, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32")
    assert pool.block_bytes == ledger.layout.block_bytes


def test_layers_of_unequal_heads_make_blocks_of_unequal_tokens_and_are_refused():
    """Gemma 4: full layers have fewer, wider heads, half the bytes a token of a window layer's."""
    gemma = model_shape("gemma-4-26b-a4b")
    assert AttentionShape(num_heads=16, num_kv_heads=2, head_dim=512) == gemma.attention[1]
    ledger = build_ledger(gemma, "h200-sxm-141gb", max_model_len=8192)
    with pytest.raises(ConfigError, match="blocks of 16 and 32 tokens"):
        LayerGroups.of(gemma, core_groups(ledger))
