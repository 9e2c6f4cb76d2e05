"""Decoder: one forward pass of a Llama, Qwen2, Qwen3 or Mistral model over the paged KV pool.

Every step is the same pass: decodes, whole prompts, chunks of prompts and recomputed prefixes together. All new KV of a layer
is stored before any of its attention, so a sequence may read blocks that another fills in the same step. What the pass needs
and forgets comes from a workspace; products are written into it (`out=`), so that a step allocates nothing.

**Source:** `modeling_llama.py`, `modeling_qwen2.py`, `modeling_qwen3.py`, `modeling_mistral.py`, transformers 5; logits are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .batch import StepBatch
from .decoder_config import DecoderConfig
from .kernels.attention import DecodeCall, PrefillCall
from .kernels.sampling import SampleCall
from .layer_groups import LayerGroups
from .ops import Ops
from .pool import PagedKVPool
from .weights import DecoderWeights, LayerWeights
from .workspace import Workspace


class Decoder:
    """A model on one device. Keeps weights and constants; the pool and the workspace are handed in."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        ops: Ops,
        *,
        max_positions: int,
        splits: Sequence[int] = (),
        groups: LayerGroups | None = None,
    ) -> None:
        """`groups` says which block table each layer reads; by default all read one, which gives back only what none of them sees."""
        self.config, self.weights, self.ops = config, weights, ops
        self.groups = LayerGroups.one(config.shape) if groups is None else groups
        """Which layers share a block table."""
        self._places = self.groups.places()
        self.splits = splits
        """Programs that share a decoding sequence, by the number of sequences less one; empty for one each. Fixed for a batch of a
        size, so that its workspace is too."""
        self.dtype = weights.embedding.dtype
        self.rope_table = _rope_table(config, max_positions, ops.device)
        """`[max_positions, head_dim]` float32: cosines, then sines."""

    def forward(self, batch: StepBatch, pool: PagedKVPool, work: Workspace) -> Any:
        """Compute `batch`: writes its KV into `pool`; returns the logits `[num_sampled, vocab_size]` of its sampling rows.

        The result lies in `work`, which the caller resets before the step.

        Raises:
            WorkspaceFullError, OutOfMemoryError: the step is too large; what it stored is beyond all contexts.
        """
        config, shape, weights = self.config, self.config.shape, self.weights
        rows = int(batch.token_ids.shape[0])
        hidden = work.take("hidden", (rows, shape.hidden_size), self.dtype)
        residual = work.take("residual", (rows, shape.hidden_size), self.dtype)
        normed = work.take("normed", (rows, shape.hidden_size), self.dtype)
        torch.index_select(weights.embedding, 0, batch.token_ids, out=residual)
        for index, layer in enumerate(weights.layers):
            if index == 0:
                self.ops.rms_norm(residual, layer.input_norm, config.rms_norm_eps, normed)
            else:
                self.ops.rms_norm(hidden, layer.input_norm, config.rms_norm_eps, normed, residual)
            with work.scope():
                self._attention(index, layer, batch, pool, work, normed, hidden)
            self.ops.rms_norm(hidden, layer.post_norm, config.rms_norm_eps, normed, residual)
            with work.scope():
                self._feed_forward(layer, work, normed, hidden)
        return self._logits(batch, work, hidden, residual)

    def sample(self, batch: StepBatch, logits: Any) -> Any:
        """One token for each row of `logits`, into `batch.tokens_out`; -1 where they are not numbers."""
        return self.ops.sample(
            SampleCall(
                logits=logits,
                temperature=batch.temperature,
                top_k=batch.top_k,
                top_p=batch.top_p,
                uniform=batch.uniform,
                tokens=batch.tokens_out,
            )
        )

    # -- parts of a layer -----------------------------------------------------------------------------------------

    def _attention(
        self, index: int, layer: LayerWeights, batch: StepBatch, pool: PagedKVPool, work: Workspace, x: Any, out: Any
    ) -> None:
        config, shape = self.config, self.config.shape
        rows, q_size, head_dim = int(x.shape[0]), config.query_size, config.head_dim
        query, key, value = self._project(layer, work, x)
        self.ops.rope(query, key, self.rope_table, batch.positions)
        group, place = self._places[index]
        cache, held = pool.layer(place, index), batch.groups[group]
        self.ops.store_kv(key, value, cache, held.slots)
        mixed = work.take("attention", (rows, shape.num_attention_heads, head_dim), self.dtype)
        decodes, window = batch.num_decodes, config.window(index)
        common = {"cache": cache, "softmax_scale": head_dim**-0.5, "window": window}
        if decodes:
            self.ops.decode_attention(
                DecodeCall(
                    query=query[:decodes],
                    out=mixed[:decodes],
                    block_table=held.block_table[:decodes],
                    seq_lens=held.seq_lens[:decodes],
                    **common,
                    **self._splits(work, decodes),
                )
            )
        if rows > decodes:
            self.ops.prefill_attention(
                PrefillCall(
                    query=query[decodes:],
                    out=mixed[decodes:],
                    block_table=held.block_table[decodes:],
                    seq_lens=held.seq_lens[decodes:],
                    query_starts=batch.query_starts,
                    **common,
                )
            )
        _linear(mixed.view(rows, q_size), layer.out, layer.out_bias, out)

    def _project(self, layer: LayerWeights, work: Workspace, x: Any) -> tuple[Any, Any, Any]:
        """Query `[rows, heads, head_dim]`, key and value `[rows, kv_heads, head_dim]`."""
        config, rows = self.config, int(x.shape[0])
        head_dim, q_size, kv_size = config.head_dim, config.query_size, config.kv_size
        if layer.query_norm is None:
            joined = work.take("qkv", (rows, q_size + 2 * kv_size), self.dtype)
            _linear(x, layer.qkv, layer.qkv_bias, joined)
            parts = joined.split((q_size, kv_size, kv_size), dim=1)
            query, key, value = (part.view(rows, -1, head_dim) for part in parts)
            return query, key, value
        made: list[Any] = []
        start = 0
        for name, size, norm in (
            ("query", q_size, layer.query_norm),
            ("key", kv_size, layer.key_norm),
            ("value", kv_size, None),
        ):
            part = slice(start, start + size)
            start += size
            plain = work.take(name, (rows, size), self.dtype)
            _linear(x, layer.qkv[part], None if layer.qkv_bias is None else layer.qkv_bias[part], plain)
            if norm is not None:
                normed = work.take(f"normed {name}", (rows * size // head_dim, head_dim), self.dtype)
                self.ops.rms_norm(plain.view(-1, head_dim), norm, config.rms_norm_eps, normed)
                plain = normed
            made.append(plain.view(rows, -1, head_dim))
        return made[0], made[1], made[2]

    def _splits(self, work: Workspace, num_seqs: int) -> dict[str, Any]:
        num_splits = self.splits[num_seqs - 1] if self.splits else 1
        if num_splits == 1:
            return {}
        shape = (num_seqs, self.config.shape.num_attention_heads, num_splits)
        return {
            "num_splits": num_splits,
            "partial_out": work.take("partial out", (*shape, self.config.head_dim), torch.float32),
            "partial_lse": work.take("partial lse", shape, torch.float32),
        }

    def _feed_forward(self, layer: LayerWeights, work: Workspace, x: Any, out: Any) -> None:
        rows, wide = int(x.shape[0]), self.config.shape.intermediate_size
        both = work.take("gate and up", (rows, 2 * wide), self.dtype)
        _linear(x, layer.gate_up, layer.gate_up_bias, both)
        mixed = work.take("silu", (rows, wide), self.dtype)
        self.ops.silu_mul(both, mixed)
        _linear(mixed, layer.down, layer.down_bias, out)

    def _logits(self, batch: StepBatch, work: Workspace, hidden: Any, residual: Any) -> Any:
        """Only rows that are sampled from see the last norm and the head."""
        shape, count = self.config.shape, int(batch.sample_rows.shape[0])
        chosen = [
            work.take(name, (count, shape.hidden_size), self.dtype) for name in ("last", "last residual", "final")
        ]
        torch.index_select(hidden, 0, batch.sample_rows, out=chosen[0])
        torch.index_select(residual, 0, batch.sample_rows, out=chosen[1])
        logits = work.take("logits", (count, shape.vocab_size), self.dtype)
        if count:
            self.ops.rms_norm(chosen[0], self.weights.final_norm, self.config.rms_norm_eps, chosen[2], chosen[1])
            _linear(chosen[2], self.weights.head, None, logits)
        return logits


def _linear(x: Any, weight: Any, bias: Any, out: Any) -> None:
    """`out = x @ weight.T + bias`."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _rope_table(config: DecoderConfig, max_positions: int, device: Any) -> Any:
    """Cosines and sines of every position, in float32 as transformers computes them."""
    frequencies = torch.tensor(config.rotary.inverse_frequencies(config.head_dim), dtype=torch.float32)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
