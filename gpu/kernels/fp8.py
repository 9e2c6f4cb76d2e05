"""FP8 (e4m3fn) by integer arithmetic: what a GPU without fp8 instructions, and the interpreter, can do as well.

e4m3fn: one sign bit, four exponent bits (bias 7), three mantissa bits, no infinity; 0x7F and 0xFF are NaN; the largest
number is 448. **Source:** Micikevicius et al., "FP8 formats for deep learning" (arXiv:2209.05433), table 1.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_e4m3(byte, NATIVE: tl.constexpr):
    """Bytes (uint8) to float32, exactly.

    A byte's exponent and mantissa, moved to where float16 has them, are the number times 2^-8, subnormals included
    (the biases differ by eight). With NATIVE, the GPU's own instruction does it (compute capability 8.9 and later).
    """
    if NATIVE:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    bits = byte.to(tl.int16)
    magnitude = bits & 0x7F
    half = (((bits & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True)
    return tl.where(magnitude == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def encode_e4m3(value):
    """float32 to bytes (uint8), rounded to nearest even; beyond +-448 it saturates, NaN stays NaN."""
    magnitude = tl.minimum(tl.abs(value), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Normal numbers: add half a unit of the last kept place (and one less if that place is even), drop 20 bits, rebias.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the unit is 2^-9, which is that of float32 numbers in [2^14, 2^15): adding 2^14 rounds.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    code = tl.where(value == value, code, 0x7F)
    return (code | sign).to(tl.uint8)
