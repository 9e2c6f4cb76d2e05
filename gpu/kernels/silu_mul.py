"""SiLU of the gate, times up: the activation of a gated MLP.

    y[t, i] = x[t, i] * sigmoid(x[t, i]) * x[t, size + i]

**Sources:** Shazeer, "GLU variants improve Transformer" (arXiv:2002.05202); `silu_and_mul`, vLLM. Like Hugging Face, the
SiLU is rounded to the input's format before it multiplies.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .elementwise import check_silu_mul
from .launch import Launch, next_power_of_2, warps_for


@triton.jit
def silu_mul_kernel(
    input_ptr,  # [num_rows, 2 * size]: gate, then up
    out_ptr,  # [num_rows, size]
    input_stride,  # elements from a row to the next
    out_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    place = input_ptr + row * input_stride + columns
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + SIZE, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(input_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, (silu * up).to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul_launch(x: Any, out: Any) -> Launch | None:
    """The launch that `silu_mul` runs; None for no rows."""
    num_rows, size = check_silu_mul(x, out)
    if num_rows == 0:
        return None
    block = min(2048, next_power_of_2(size))
    return Launch(
        kernel=silu_mul_kernel,
        grid=(num_rows, triton.cdiv(size, block)),
        arguments=(x, out, x.stride(0), out.stride(0)),
        constants={"SIZE": size, "BLOCK": block},
        num_warps=warps_for(block),
    )


def silu_mul(x: Any, out: Any) -> Any:
    """`silu(x[:, :size]) * x[:, size:]`. Writes `out` `[num_rows, size]`; `x` is `[num_rows, 2 * size]`."""
    launch = silu_mul_launch(x, out)
    if launch is not None:
        launch.run()
    return out
