"""The torch twins of decode and prefill attention: gather the blocks, multiply, mask, softmax, multiply.

They compute in float32, or in float64 as the truth that GPU kernels are measured against. Scores exist for `CHUNK` query
tokens at a time, so that long prompts stay linear in memory here too.

Tolerances against the twin in float64, for inputs of unit variance: float32 2e-5, float16 4e-3, bfloat16 2e-2 absolute
(weights are rounded to 16 bits before they multiply V, and the result once more); an fp8 cache adds nothing, because the
twin reads the same bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from .attention import AttentionCall, DecodeCall, PrefillCall
from .blocks_twin import gather_kv
from .scratch import Allocating, Scratch

CHUNK = 64
"""Query tokens whose scores exist at once."""


def decode_attention_twin(call: DecodeCall, scratch: Scratch | None = None, compute: Any = torch.float32) -> Any:
    """As `decode_attention`; splits make no difference here."""
    work = Allocating(call.query.device) if scratch is None else scratch
    for seq, length in enumerate(call.seq_lens.tolist()):
        if length == 0:
            call.out[seq].zero_()
        else:
            _sequence(call, seq, length, call.query[seq : seq + 1], call.out[seq : seq + 1], work, compute)
    return call.out


def prefill_attention_twin(call: PrefillCall, scratch: Scratch | None = None, compute: Any = torch.float32) -> Any:
    """As `prefill_attention`."""
    work = Allocating(call.query.device) if scratch is None else scratch
    starts = call.query_starts.tolist()
    for seq, length in enumerate(call.seq_lens.tolist()):
        start, end = starts[seq], starts[seq + 1]
        if end > start:
            _sequence(call, seq, length, call.query[start:end], call.out[start:end], work, compute)
    return call.out


def _sequence(call: AttentionCall, seq: int, length: int, query: Any, out: Any, work: Scratch, compute: Any) -> None:
    """Attention of the last `len(query)` tokens of one sequence over its first `length` positions."""
    _, _, block_size, heads, head_dim = call.cache.kv.shape
    context = length - int(query.shape[0])
    oldest = 0 if call.window is None else max(context - call.window + 1, 0)
    skipped = 0 if call.num_sink_tokens else oldest // block_size  # those blocks may be gone: they are not read
    table = call.block_table[seq, skipped : -(-length // block_size)]
    base, positions = skipped * block_size, int(table.shape[0]) * block_size
    with work.scope():
        keys = work.take("keys", (heads, positions, head_dim), compute)
        values = work.take("values", (heads, positions, head_dim), compute)
        gather_kv(call.cache, table, keys, 0, work)
        gather_kv(call.cache, table, values, 1, work)
        # A weight of 0 does not undo what was never written behind the last token.
        values[:, length - base :].zero_()
        if call.num_sink_tokens < oldest:
            values[:, max(call.num_sink_tokens - base, 0) : oldest - base].zero_()
        for start in range(0, int(query.shape[0]), CHUNK):
            rows = slice(start, start + CHUNK)
            _chunk(call, query[rows], out[rows], context + start, base, keys, values, work, compute)


def _chunk(
    call: AttentionCall,
    query: Any,
    out: Any,
    stands: int,
    base: int,
    keys: Any,
    values: Any,
    work: Scratch,
    compute: Any,
) -> None:
    """Attention of query tokens at positions `stands` and on, over `keys` and `values`, which begin at position `base`."""
    tokens, num_q_heads, head_dim = query.shape
    heads, positions, _ = keys.shape
    group = num_q_heads // heads
    with work.scope():
        packed = work.take("query", (heads, tokens * group, head_dim), compute)
        packed.view(heads, tokens, group, head_dim).copy_(query.view(tokens, heads, group, head_dim).transpose(0, 1))
        packed.mul_(call.softmax_scale)
        scores = work.take("scores", (heads, tokens * group, positions), compute)
        torch.bmm(packed, keys.transpose(1, 2), out=scores)
        by_token = scores.view(heads, tokens, group, positions)
        _mask(call, by_token, stands, base, work)
        _softmax(call, by_token, work, compute)
        result = work.take("result", (heads, tokens * group, head_dim), compute)
        torch.bmm(scores, values, out=result)
        out.view(tokens, heads, group, head_dim).copy_(result.view(heads, tokens, group, head_dim).transpose(0, 1))


def _mask(call: AttentionCall, scores: Any, stands: int, base: int, work: Scratch) -> None:
    """Set the scores `[heads, tokens, group, positions]` of what a token does not see to -inf."""
    for token in range(int(scores.shape[1])):
        position = stands + token
        scores[:, token, :, position + 1 - base :].fill_(float("-inf"))
        if call.window is not None:
            oldest = max(position - call.window + 1, 0)
            scores[:, token, :, max(call.num_sink_tokens - base, 0) : max(oldest - base, 0)].fill_(float("-inf"))


def _softmax(call: AttentionCall, scores: Any, work: Scratch, compute: Any) -> None:
    """Turn scores `[heads, tokens, group, positions]` into weights, in place; sink logits join the denominator."""
    heads, tokens, group, _ = scores.shape
    shape = (heads, tokens, group, 1)
    top = torch.amax(scores, 3, keepdim=True, out=work.take("top", shape, compute))
    total = work.take("total", shape, compute)
    if call.sinks is not None:
        sinks = work.take("sinks", (heads, 1, group, 1), compute)
        sinks.copy_(call.sinks.view(heads, 1, group, 1))
        torch.maximum(top, sinks, out=top)
    scores.sub_(top).exp_()
    torch.sum(scores, 3, keepdim=True, out=total)
    if call.sinks is not None:
        total.add_(top.neg_().add_(sinks).exp_())
    scores.div_(total)
