"""A decoder with the weights of a tiny Hugging Face model, for comparing logits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gpu.batch import BatchBuffers, Sampling, Work
from gpu.decoder_config import DecoderConfig
from gpu.layer_groups import LayerGroups
from gpu.layout import KVLayout
from gpu.model import Decoder
from gpu.ops import Ops
from gpu.pool import PagedKVPool
from gpu.weights import DecoderWeights
from gpu.workspace import Workspace
from sim.assembly import core_groups
from sim.catalog.hf_config import shape_from_config
from sim.core.blocks import BlockPool
from sim.core.config import EngineConfig
from sim.core.groups import tables_of
from sim.core.tables import BlockTable
from sim.memory import build_ledger

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-3.1": (LlamaConfig, LlamaForCausalLM, {"rope_scaling": LLAMA3, "rope_theta": 50000.0}),
    "llama-biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 11}),
    # Windows beside full attention: three kinds of block table (two of the window, one of them with a layer less), and two.
    "qwen3-hybrid": (Qwen3Config, Qwen3ForCausalLM, {
        "head_dim": 32, "num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]}),
    "qwen2-hybrid": (Qwen2Config, Qwen2ForCausalLM, {
        "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
}  # fmt: skip
BLOCK_SIZE = 4
TOLERANCE = 5e-5
"""Logits have a standard deviation of about 1.6; float32 sums in another order differ by 1e-5 at most here."""


class Bench:
    """A decoder with the weights of a Hugging Face model, a checked pool, and the core's own block tables."""

    def __init__(self, family: str, stated: dict[str, Any] | None = None) -> None:
        """A family of `FAMILIES`, or whatever a configuration file states."""
        torch.set_num_threads(1)
        torch.manual_seed(len(family))
        if stated is None:
            configuration, model, extra = FAMILIES[family]
            config = configuration(**{**SIZES, **extra})
        else:
            config = AutoConfig.for_model(**copy.deepcopy(stated))
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        config._attn_implementation = "eager"
        self.reference = model(config).eval()
        with torch.no_grad():
            for name, weight in self.reference.named_parameters():
                weight.normal_(1.0 if "norm" in name else 0.0, 0.2)
        self.values = self.reference.config.to_dict() if stated is None else stated
        shape = shape_from_config(self.values, name=family)
        self.config = DecoderConfig.from_values(shape, self.values)
        weights = DecoderWeights.from_state(self.config, self.reference.state_dict(), dtype=torch.float32, device="cpu")
        self.work = Workspace(1 << 23)
        self.ops = Ops("cpu", scratch=self.work)
        ledger = build_ledger(
            shape, "h100-sxm-80gb", dtype="float32", block_size=BLOCK_SIZE, max_num_batched_tokens=128
        )
        self.engine = EngineConfig(
            num_gpu_blocks=192,
            block_size=BLOCK_SIZE,
            sliding_window=None if ledger.layout.is_hybrid else ledger.layout.groups[0].window,
            kv_groups=core_groups(ledger),
        )
        groups = LayerGroups.of(shape, self.engine.groups)
        self.model = Decoder(self.config, weights, self.ops, max_positions=128, groups=groups)
        self.layout = KVLayout(
            num_layers=groups.num_places,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=BLOCK_SIZE,
            dtype="float32",
        )
        self.pool = PagedKVPool(self.layout, 192, checked=True)
        self.blocks = BlockPool(192)
        self.tables = tables_of(self.blocks, self.engine)
        self.buffers = BatchBuffers(
            max_tokens=128, max_seqs=8, max_blocks=32, device="cpu", num_groups=groups.num_groups
        )
        self.step = 0

    def tokens(self, seed: int, count: int = 40) -> list[int]:
        return torch.randint(0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """`[len(tokens), vocab_size]`, by transformers."""
        with torch.no_grad():
            return self.reference(torch.tensor([tokens])).logits[0]

    def grow(self, table: BlockTable, computed: int, count: int, hits: Sequence[int] = ()) -> None:
        """Make room in a table, as the core would, tell the pool what slid out of windows, and do the copies it asks for."""
        self.slide(table, computed)
        allocation = self.tables.grow(table, computed, count, hits)
        assert allocation is not None
        if allocation.copies:
            sources, targets = (torch.tensor(ids) for ids in zip(*allocation.copies, strict=True))
            self.ops.move_blocks(self.pool.rows, self.pool.rows, sources, targets)

    def slide(self, table: BlockTable, computed: int) -> None:
        """What slid out of windows is given back, and poisoned."""
        self.pool.release(table.owner, self.tables.slide(table, computed))

    def assign(self, table: BlockTable, computed: int) -> None:
        """Tell the pool who has which blocks."""
        for own in table.groups:
            self.pool.assign(table.owner, own.blocks, computed)

    def fork(self, table: BlockTable, name: str) -> BlockTable:
        """A second table over the same blocks, all written."""
        child = self.tables.fork(table, name)
        self.assign(child, self.pool.num_blocks * BLOCK_SIZE)
        return child

    def prefix(self, table: BlockTable, num_blocks: int) -> list[int]:
        """The first blocks of a table, as hits for another: group by group."""
        return [block for own in table.groups for block in own.blocks[:num_blocks]]

    def run(self, *shares: tuple[BlockTable, list[int], int, int]) -> list[torch.Tensor]:
        """One step of `(table, tokens, computed, count)` shares; the logits after the last token of each, in that order."""
        self.pool.begin_step(self.step)
        self.work.reset()
        for table, _, computed, _ in shares:
            self.assign(table, computed)
        work = [
            Work(
                name=table.owner,
                token_ids=tokens[computed : computed + count],
                context_tokens=computed,
                block_table=table.groups[0].blocks,
                samples=True,
                group_tables=tuple(own.blocks for own in table.groups),
            )
            for table, tokens, computed, count in shares
        ]
        batch = self.buffers.fill(work, BLOCK_SIZE, Sampling())
        rows = self.model.forward(batch, self.pool, self.work).clone()
        self.pool.end_step()
        self.step += 1
        by_name = dict(zip(batch.sampled, rows, strict=True))
        return [by_name[item.name] for item in work]

    def feed(self, table: BlockTable, tokens: list[int], chunks: list[int], computed: int = 0) -> None:
        """Compute `tokens` chunk by chunk, comparing the logits after each with transformers."""
        want = self.logits(tokens)
        for count in chunks:
            self.grow(table, computed, count)
            (row,) = self.run((table, tokens, computed, count))
            assert_equal(row, want[computed + count - 1])
            computed += count

    def give_back(self, table: BlockTable) -> None:
        self.pool.release(table.owner, self.tables.release(table, table.owner))


def assert_equal(row: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(row, want, rtol=0, atol=TOLERANCE)
