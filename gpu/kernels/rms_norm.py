"""RMSNorm, with or without a residual to add first.

    x = x + residual;  residual = x                        (when there is one)
    y = weight * round(x / sqrt(mean(x^2) + epsilon))

in float32, `round` being the cast to the input's format that Hugging Face's Llama makes before the weight multiplies.

**Sources:** Zhang and Sennrich (arXiv:1910.07467); `LlamaRMSNorm`, transformers; `fused_add_rms_norm`, vLLM.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .elementwise import check_rms_norm
from .launch import Launch, next_power_of_2, warps_for


@triton.jit(do_not_specialize=["num_rows"])  # it differs from step to step, and is compiled once
def rms_norm_kernel(
    input_ptr,  # [num_rows, size]
    residual_ptr,  # [num_rows, size]; read and written with HAS_RESIDUAL
    weight_ptr,  # [size]
    out_ptr,  # [num_rows, size]; may be the input
    num_rows,
    input_stride,  # elements from a row to the next
    residual_stride,
    out_stride,
    epsilon,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # rows a program
    BLOCK: tl.constexpr,  # power of two >= SIZE
    HAS_RESIDUAL: tl.constexpr,
):
    """One program normalises ROWS rows, each held in registers."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    wide = rows.to(tl.int64)[:, None]
    inside = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    x = tl.load(input_ptr + wide * input_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual_ptr + wide * residual_stride + columns[None, :]
        x += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        kept = x.to(residual_ptr.dtype.element_ty)
        tl.store(place, kept, mask=inside)
        x = kept.to(tl.float32)
    variance = tl.sum(x * x, axis=1) * (1.0 / SIZE)
    scaled = (x * tl.rsqrt(variance + epsilon)[:, None]).to(input_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    y = (scaled * weight[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + wide * out_stride + columns[None, :], y, mask=inside)


def rms_norm_launch(x: Any, weight: Any, epsilon: float, out: Any, residual: Any = None) -> Launch | None:
    """The launch that `rms_norm` runs; None for no rows."""
    num_rows, size = check_rms_norm(x, weight, out, residual)
    if num_rows == 0:
        return None
    block = next_power_of_2(size)
    rows = max(1, 1024 // block)
    return Launch(
        kernel=rms_norm_kernel,
        grid=(triton.cdiv(num_rows, rows),),
        arguments=(
            x,
            x if residual is None else residual,
            weight,
            out,
            num_rows,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            out.stride(0),
            epsilon,
        ),
        constants={"SIZE": size, "ROWS": rows, "BLOCK": block, "HAS_RESIDUAL": residual is not None},
        num_warps=warps_for(rows * block, per_thread=16),
    )


def rms_norm(x: Any, weight: Any, epsilon: float, out: Any, residual: Any = None) -> Any:
    """Normalise each row of `x` `[num_rows, size]`. Writes `out` (may be `x`) and, when given, `residual`.

    Args:
        x: `[num_rows, size]`, rows strided.
        weight: `[size]`.
        epsilon: added to the mean square.
        out: like `x`.
        residual: like `x`: added to it first, and set to the sum.
    """
    launch = rms_norm_launch(x, weight, epsilon, out, residual)
    if launch is not None:
        launch.run()
    return out
