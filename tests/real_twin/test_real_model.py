"""The decoder's logits are those of Hugging Face transformers, whatever way the KV got into its blocks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from gpu.cpu_pool import CpuBlockPool
from gpu.decoder_config import DecoderConfig
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from gpu.rotary import RotaryConfig
from gpu.swap import BlockMover
from gpu.weights import DecoderWeights
from sim.catalog.hf_config import read_config, shape_from_config
from sim.catalog.models import model_shape
from sim.core.blocks import NO_BLOCK
from sim.core.config import ConfigError
from sim.core.need import skipped_blocks
from sim.core.request import Outcome, RequestSpec
from sim.costs import FixedCost
from sim.world.run import run_world
from tests.support.logits_bench import FAMILIES, SIZES, Bench, assert_equal


@pytest.fixture(params=FAMILIES)
def bench(request):
    return Bench(request.param)


def test_whole_prefill_chunked_prefill_and_decode(bench):
    tokens = bench.tokens(1)
    for index, chunks in enumerate(([40], [1] * 40, [7, 1, 13, 4, 1, 1, 9, 4], [16, 16, 8], [39, 1])):
        bench.feed(bench.tables.new(f"sequence {index}"), tokens, chunks)


def test_sequences_of_one_batch_do_not_see_each_other(bench):
    """Whole prompts, chunks on top of context and decodes, of different lengths, in one step."""
    tables = [bench.tables.new(name) for name in "abcd"]
    texts = [bench.tokens(seed) for seed in range(4)]
    contexts, counts = [0, 9, 30, 17], [12, 6, 1, 1]
    for table, text, context in zip(tables, texts, contexts, strict=True):
        if context:
            bench.feed(table, text, [context])
    for table, context, count in zip(tables, contexts, counts, strict=True):
        bench.grow(table, context, count)
    rows = bench.run(*zip(tables, texts, contexts, counts, strict=True))
    for row, text, context, count in zip(rows, texts, contexts, counts, strict=True):
        assert_equal(row, bench.logits(text)[context + count - 1])


def test_a_cached_prefix_is_as_good_as_a_computed_one(bench):
    tokens, other = bench.tokens(2), bench.tokens(3)
    first = bench.tables.new("first")
    bench.feed(first, tokens, [24])
    hits = bench.prefix(first, 5)
    text = tokens[:20] + other[:10]
    second = bench.tables.new("second")
    bench.grow(second, 0, 10, hits)
    (row,) = bench.run((second, text, 20, 10))
    assert_equal(row, bench.logits(text)[29])


def test_a_prefix_may_be_found_in_the_very_step_that_computes_it(bench):
    text = bench.tokens(4)
    first, second = bench.tables.new("first"), bench.tables.new("second")
    bench.grow(first, 0, 30)
    bench.grow(second, 0, 20, bench.prefix(first, 4))
    rows = bench.run((first, text, 0, 30), (second, text, 16, 20))
    want = bench.logits(text)
    assert_equal(rows[0], want[29])
    assert_equal(rows[1], want[35])


def test_a_fork_goes_its_own_way_after_a_copy_on_write(bench):
    tokens, other = bench.tokens(5), bench.tokens(6)
    parent = bench.tables.new("parent")
    bench.feed(parent, tokens, [18])  # the fifth block is half full: whoever writes first must copy it
    child = bench.fork(parent, "child")
    text = tokens[:18] + other[:9]
    bench.grow(child, 18, 9)
    assert all(own.blocks[4] != theirs.blocks[4] for own, theirs in zip(child.groups, parent.groups, strict=True))
    (row,) = bench.run((child, text, 18, 9))
    assert_equal(row, bench.logits(text)[26])
    bench.feed(parent, tokens, [6, 1, 1], computed=18)


def test_a_preempted_sequence_is_recomputed_in_other_blocks(bench):
    tokens = bench.tokens(7)
    table = bench.tables.new("victim")
    bench.feed(table, tokens, [20, 1, 1])
    before = list(table.blocks)
    bench.give_back(table)
    intruder = bench.tables.new("intruder")
    bench.feed(intruder, bench.tokens(8), [26])
    bench.feed(table, tokens, [10, 12, 1, 1])
    assert set(table.blocks) != set(before)


def test_a_sequence_that_was_swapped_out_goes_on_where_it_was(bench):
    tokens = bench.tokens(9)
    mover = BlockMover(bench.pool, CpuBlockPool(bench.layout, 20), bench.ops)
    table = bench.tables.new("victim")
    bench.feed(table, tokens, [21, 1])
    bench.slide(table, 22)
    saved = bench.tables.computed(table, 22)
    mover.save(saved, range(len(saved)))
    bench.give_back(table)
    bench.feed(bench.tables.new("intruder"), bench.tokens(10), [30])
    for kind, own in zip(bench.tables.groups, table.groups, strict=True):
        own.blocks = [NO_BLOCK] * skipped_blocks(22, kind.block_size, kind.window)
    bench.tables.grow(table, 22, 1)
    bench.assign(table, 22)
    mover.load(bench.tables.computed(table, 22), range(len(saved)))
    (row,) = bench.run((table, tokens, 22, 1))
    assert_equal(row, bench.logits(tokens)[22])


def test_a_sliding_window_gives_blocks_back_and_changes_nothing():
    bench = Bench("mistral")
    tokens, table = bench.tokens(11, 60), bench.tables.new("long")
    bench.feed(table, tokens, [30, 1, 9, 1, 1, 10])
    assert table.blocks[:8] == [0] * 8  # the last step began at token 42, which sees 32 to 42
    assert all(table.blocks[8:])
    assert bench.blocks.num_owned == len(table.blocks) - 8


def test_of_several_groups_those_with_windows_give_blocks_back_and_nothing_changes():
    """Window 11 in layers 0, 2 and 4, dealt out over two groups; layers 1 and 3 keep everything. A window of 6, likewise, in layers 1
    and 2: one group each, beside that of layer 0.
    """
    for family, layers, windows, passed in (
        (
            "qwen3-hybrid",
            ((0, 4), (2,), (1, 3)),
            (11, 11, None),
            8,
        ),  # the last step began at token 42, which sees 32 to 42
        ("qwen2-hybrid", ((0,), (1,), (2,)), (None, 6, 6), 9),  # it sees 37 to 42
    ):
        bench = Bench(family)
        assert (bench.model.groups.layers, bench.model.groups.windows) == (layers, windows)
        tokens, table = bench.tokens(11, 60), bench.tables.new("long")
        bench.feed(table, tokens, [30, 1, 9, 1, 1, 10])
        for window, own in zip(windows, table.groups, strict=True):
            gone = 0 if window is None else passed
            assert own.blocks[:gone] == [0] * gone
            assert all(own.blocks[gone:])
        assert bench.pool.tags.num_held == bench.blocks.num_owned == 3 * 13 - 2 * passed


def test_what_is_left_of_a_truncated_context_keeps_its_positions():
    """With the middle of the context gone, attention reads what is left at its old positions: transformers is told so by a mask."""
    bench = Bench("llama")
    tokens, table = bench.tokens(12), bench.tables.new("cut")
    bench.feed(table, tokens, [33])
    table.blocks[1:5] = [0] * 4  # tokens 4 to 19
    bench.grow(table, 33, 1)
    (row,) = bench.run((table, tokens, 33, 1))
    mask = torch.full((34, 34), float("-inf")).triu(1)
    mask[33, 4:20] = float("-inf")
    with torch.no_grad():
        want = bench.reference(torch.tensor([tokens[:34]]), attention_mask=mask[None, None]).logits[0, 33]
    assert_equal(row, want)
    assert not torch.allclose(row, bench.logits(tokens)[33], atol=0.01)


def test_a_folder_with_safetensors_is_loaded(tmp_path):
    bench = Bench("qwen3")
    save_file(
        {name: tensor.contiguous() for name, tensor in bench.reference.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(bench.values), encoding="utf-8")
    shape = read_config(tmp_path / "config.json")
    engine = RealEngine(RealSettings(shape=shape, source=str(tmp_path), dtype="float32"), [])
    assert engine.config.rotary == bench.config.rotary
    assert torch.equal(engine.weights.layers[2].down, bench.model.weights.layers[2].down)
    assert torch.equal(engine.weights.layers[0].qkv, bench.model.weights.layers[0].qkv)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_as_transformers_saves_it_is_served_as_transformers_answers(family, tmp_path):
    """Several files with an index, tied heads left out: greedy answers, token for token, through core, pool and chunks of prompts."""
    bench = Bench(family)
    bench.reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    requests = [
        RequestSpec(request_id=f"r{i}", arrival_s=0.0, input_tokens=9 + 7 * i, output_tokens=8) for i in range(3)
    ]
    settings = RealSettings(
        shape=read_config(tmp_path / "config.json"), source=str(tmp_path), dtype="float32", checked=True
    )
    engine = RealEngine(settings, requests)
    config = replace(bench.engine, num_gpu_blocks=40, max_model_len=48, max_num_seqs=3, max_num_batched_tokens=11)
    record = run_world(config, FixedCost(1.0), requests, executor=engine.executor)
    assert all(request.outcome is Outcome.FINISHED for request in record.requests)
    for spec in requests:
        known = engine.tokens.tokens(spec.request_id, 0, spec.input_tokens)
        for _ in range(spec.output_tokens):
            known.append(int(bench.logits(known)[-1].argmax()))
        assert engine.tokens.answer(spec.request_id) == known[spec.input_tokens :]


def test_random_weights_depend_on_the_seed_and_nothing_else():
    config = DecoderConfig.of(model_shape("tiny-llama-test"))
    one, same, other = (
        DecoderWeights.random(config, seed=seed, dtype=torch.float32, device="cpu") for seed in (1, 1, 2)
    )
    assert torch.equal(one.layers[1].gate_up, same.layers[1].gate_up)
    assert not torch.equal(one.layers[1].gate_up, other.layers[1].gate_up)
    assert one.num_bytes == model_shape("tiny-llama-test").weight_bytes("float32")


@pytest.mark.parametrize(
    ("name", "why"),
    [("mixtral-8x7b", "architecture is mixtral"), ("deepseek-v2-lite", "deepseek_v2"), ("gemma-2-9b", "gemma2, with capped"),
     ("gpt-oss-20b", "gpt_oss, with attention sinks and experts; llama, mistral, qwen2, qwen3 can be")],
)  # fmt: skip
def test_a_model_of_another_family_is_refused_with_the_reason(name, why):
    with pytest.raises(ConfigError, match=f"{name} cannot be run for real.*{why}"):
        DecoderConfig.of(model_shape(name))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "stated",
    [
        {"use_sliding_window": True, "sliding_window": 8},  # from layer 28 on: both have a default of max_window_layers
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 15},
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 3},
        {"sliding_window": 8, "max_window_layers": 3},
    ],
)
def test_layers_have_the_windows_that_transformers_gives_them(family, stated):
    values = {**SIZES, "num_hidden_layers": 30, **stated}
    shape = shape_from_config({"model_type": family, **values}, name=family)
    config = FAMILIES[family][0](**values)
    want = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
    assert [shape.attention_at(layer).window for layer in range(30)] == want


def test_an_unknown_rotary_scaling_is_refused():
    with pytest.raises(ConfigError, match="yarn.*default, linear, llama3 can"):
        RotaryConfig.from_values({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})


def test_weights_that_do_not_fit_the_model_are_refused():
    bench = Bench("llama")
    state = dict(bench.reference.state_dict())
    state["model.norm.weight"] = torch.ones(63)
    with pytest.raises(ConfigError, match=r"model.norm.weight is \[63\]; llama needs \[64\]"):
        DecoderWeights.from_state(bench.config, state, dtype=torch.float32, device="cpu")
    del state["model.norm.weight"]
    with pytest.raises(ConfigError, match=r"have no model.norm.weight"):
        DecoderWeights.from_state(bench.config, state, dtype=torch.float32, device="cpu")
