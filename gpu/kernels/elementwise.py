"""Arguments of the row-wise kernels, checked once for kernel and twin. Needs torch, not triton."""

from __future__ import annotations

from typing import Any

import torch

from gpu.check import ArgumentError, check_tensor

from .launch import FLOATS


def check_rms_norm(x: Any, weight: Any, out: Any, residual: Any) -> tuple[int, int]:
    """Verify the arguments of `rms_norm`; returns (rows, size)."""
    check_tensor("x", x, (None, None), dtype=FLOATS)
    num_rows, size = x.shape
    check_tensor("weight", weight, (size,), dtype=FLOATS, like=x)
    check_tensor("out", out, (num_rows, size), dtype=FLOATS, like=x)
    if residual is not None:
        check_tensor("residual", residual, (num_rows, size), dtype=FLOATS, like=x)
        if out.data_ptr() and residual.data_ptr() == out.data_ptr():
            raise ArgumentError("residual and out must be different memory")
    return int(num_rows), int(size)


def check_rope(query: Any, key: Any, table: Any, positions: Any) -> tuple[int, int]:
    """Verify the arguments of `rope`; returns (tokens, rotary_dim)."""
    num_tokens = int(positions.shape[0])
    check_tensor("positions", positions, (num_tokens,), dtype=torch.int64, contiguous=True)
    check_tensor("table", table, (None, None), dtype=torch.float32, like=positions, contiguous=True)
    rotary_dim = int(table.shape[1])
    for name, vectors in (("query", query), ("key", key)):
        check_tensor(name, vectors, (num_tokens, None, None), dtype=FLOATS, like=positions)
        _, heads, head_dim = vectors.shape
        if rotary_dim % 2 or rotary_dim > head_dim:
            raise ArgumentError(f"table has {rotary_dim} columns; they must be even and at most head_dim {head_dim}")
        if num_tokens and heads > 1 and vectors.stride(1) != head_dim:
            raise ArgumentError(f"the heads of {name} must be dense; its strides are {vectors.stride()}")
    if query.shape[2] != key.shape[2]:
        raise ArgumentError(f"query and key differ in head_dim: {query.shape[2]} and {key.shape[2]}")
    return num_tokens, rotary_dim


def check_silu_mul(x: Any, out: Any) -> tuple[int, int]:
    """Verify the arguments of `silu_mul`; returns (rows, columns of the result)."""
    check_tensor("x", x, (None, None), dtype=FLOATS)
    num_rows, both = x.shape
    if both % 2:
        raise ArgumentError(f"x must hold gate and up side by side, but it has {both} columns")
    check_tensor("out", out, (num_rows, both // 2), dtype=FLOATS, like=x)
    return int(num_rows), int(both // 2)
