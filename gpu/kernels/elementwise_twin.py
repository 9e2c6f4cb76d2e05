"""The torch twins of `rms_norm`, `rope` and `silu_mul`, step by step in the same order of roundings.

Tolerances: float32 1e-6 relative; bfloat16 and float16 one unit in the last place of the result (2^-8 and 2^-11 relative).
"""

from __future__ import annotations

from typing import Any

import torch

from .elementwise import check_rms_norm, check_rope, check_silu_mul
from .scratch import Allocating, Scratch


def rms_norm_twin(
    x: Any, weight: Any, epsilon: float, out: Any, residual: Any = None, scratch: Scratch | None = None
) -> Any:
    """As `rms_norm`."""
    check_rms_norm(x, weight, out, residual)
    work = Allocating(x.device) if scratch is None else scratch
    shape = tuple(x.shape)
    with work.scope():
        wide = work.take("wide", shape, torch.float32)
        wide.copy_(x)
        if residual is not None:
            other = work.take("residual", shape, torch.float32)
            other.copy_(residual)
            residual.copy_(wide.add_(other))
            wide.copy_(residual)
        square = torch.mul(wide, wide, out=work.take("square", shape, torch.float32))
        mean = torch.mean(square, 1, keepdim=True, out=work.take("mean", (shape[0], 1), torch.float32))
        wide.mul_(mean.add_(epsilon).rsqrt_())
        rounded = work.take("rounded", shape, x.dtype)
        rounded.copy_(wide)
        wide.copy_(rounded)
        scale = work.take("weight", (shape[1],), torch.float32)
        scale.copy_(weight)
        out.copy_(wide.mul_(scale))
    return out


def rope_twin(query: Any, key: Any, table: Any, positions: Any, scratch: Scratch | None = None) -> None:
    """As `rope`."""
    num_tokens, rotary_dim = check_rope(query, key, table, positions)
    work = Allocating(query.device) if scratch is None else scratch
    half = rotary_dim // 2
    with work.scope():
        rows = work.take("rows", (num_tokens, rotary_dim), torch.float32)
        torch.index_select(table, 0, positions, out=rows)
        cos, sin = rows[:, None, :half], rows[:, None, half:]
        for vectors in (query, key):
            _rotate(vectors[..., :half], vectors[..., half:rotary_dim], cos, sin, work)


def _rotate(first: Any, second: Any, cos: Any, sin: Any, work: Scratch) -> None:
    shape = tuple(first.shape)
    with work.scope():
        a, b = work.take("first", shape, torch.float32), work.take("second", shape, torch.float32)
        product, total = work.take("product", shape, torch.float32), work.take("total", shape, torch.float32)
        a.copy_(first)
        b.copy_(second)
        torch.mul(b, sin, out=product)
        first.copy_(torch.mul(a, cos, out=total).sub_(product))
        torch.mul(a, sin, out=product)
        second.copy_(torch.mul(b, cos, out=total).add_(product))


def silu_mul_twin(x: Any, out: Any, scratch: Scratch | None = None) -> Any:
    """As `silu_mul`."""
    num_rows, size = check_silu_mul(x, out)
    work = Allocating(x.device) if scratch is None else scratch
    with work.scope():
        gate = work.take("gate", (num_rows, size), torch.float32)
        up = work.take("up", (num_rows, size), torch.float32)
        gate.copy_(x[:, :size])
        up.copy_(x[:, size:])
        gate.mul_(torch.sigmoid(gate, out=work.take("sigmoid", (num_rows, size), torch.float32)))
        rounded = work.take("silu", (num_rows, size), x.dtype)
        rounded.copy_(gate)
        gate.copy_(rounded)
        out.copy_(gate.mul_(up))
    return out
