"""Bytes an element: number formats of weights, activations and KV caches, as vLLM spells them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from .naming import unknown

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes an element of the formats that `--dtype` accepts."""

_DTYPE_ALIASES = {"bf16": "bfloat16", "half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32"}

KV_CACHE_DTYPES = (
    "auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla",
    "int8_per_token_head", "fp8_per_token_head", "nvfp4",
)  # fmt: skip
"""What `--kv-cache-dtype` accepts. `auto` is the model's own dtype."""


def dtype_name(name: str) -> str:
    """The canonical spelling of a weight or activation dtype.

    Raises:
        ConfigError: not a dtype an engine computes in.
    """
    plain = name.lower().removeprefix("torch.")
    plain = _DTYPE_ALIASES.get(plain, plain)
    if plain not in DTYPE_BYTES:
        raise unknown("dtype", name, [*DTYPE_BYTES, *_DTYPE_ALIASES, "auto"])
    return plain


def kv_cache_dtype_name(name: str) -> str:
    """The canonical spelling of a KV cache dtype.

    Raises:
        ConfigError: not a KV cache format.
    """
    plain = _DTYPE_ALIASES.get(name.lower(), name.lower())
    if plain not in KV_CACHE_DTYPES:
        raise unknown("kv_cache_dtype", name, KV_CACHE_DTYPES)
    return plain


def kv_head_bytes(kv_cache_dtype: str, elements: int, dtype: str) -> int:
    """Bytes of one K or V vector of `elements` numbers of one head, its scales included.

    `int8_per_token_head` and its fp8 twin keep one 4-byte scale a vector; `nvfp4` keeps half a byte a number and one
    scale byte for every 16. **Source:** vLLM 0.29 KV cache specs.
    """
    kv_cache_dtype = kv_cache_dtype_name(kv_cache_dtype)
    if kv_cache_dtype == "auto":
        return elements * DTYPE_BYTES[dtype_name(dtype)]
    if kv_cache_dtype in DTYPE_BYTES:
        return elements * DTYPE_BYTES[kv_cache_dtype]
    if kv_cache_dtype == "nvfp4":
        return elements // 2 + elements // 16
    if kv_cache_dtype.endswith("_per_token_head"):
        return elements + 4
    return elements


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How quantised weights are stored."""

    name: str
    bytes_per_weight: Fraction
    """Bytes a weight, scales and zero points included."""
    experts_only: bool = False
    """True when only the expert matrices of a mixture are quantised."""
    compute: str = "bfloat16"
    """What the matrix units multiply in: `fp8`, `int8`, or `bfloat16` for weight-only formats."""


# Scales: one float32 a 128 x 128 tile (fp8 blocks), one float32 an output row (int8, fp8 runtime: negligible, left out),
# fp16 scale and 4-bit zero a group of 128 (AWQ, GPTQ), float32 a group of 64 (bitsandbytes), one byte a group of 32 (MX)
# or 16 (NVFP4).
WEIGHT_FORMATS = {
    entry.name: entry
    for entry in (
        WeightFormat(name="fp8", bytes_per_weight=Fraction(1), compute="fp8"),
        WeightFormat(name="fp8_block", bytes_per_weight=1 + Fraction(4, 128 * 128), compute="fp8"),
        WeightFormat(name="int8", bytes_per_weight=Fraction(1), compute="int8"),
        WeightFormat(name="awq", bytes_per_weight=Fraction(1, 2) + Fraction(5, 2) / 128),
        WeightFormat(name="gptq", bytes_per_weight=Fraction(1, 2) + Fraction(5, 2) / 128),
        WeightFormat(name="bitsandbytes", bytes_per_weight=Fraction(1, 2) + Fraction(4, 64)),
        WeightFormat(name="mxfp4", bytes_per_weight=Fraction(1, 2) + Fraction(1, 32), experts_only=True),
        WeightFormat(name="nvfp4", bytes_per_weight=Fraction(1, 2) + Fraction(1, 16)),
    )
}
"""Storage formats by name. Embeddings, norms, routers, biases and the LM head stay in the model's dtype."""

_FORMAT_ALIASES = {
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "int4": "gptq",
    "w4a16": "gptq",
    "w8a8": "int8",
    "int8_w8a8": "int8",
    "fp8_w8a8": "fp8",
    "bnb": "bitsandbytes",
    "modelopt": "fp8",
    "modelopt_fp4": "nvfp4",
    "gpt_oss_mxfp4": "mxfp4",
}


def weight_format(name: str | None) -> WeightFormat | None:
    """The storage format called `name`; None (or `none`) when weights are not quantised.

    Raises:
        ConfigError: unknown format.
    """
    if name is None or name.lower() == "none":
        return None
    plain = name.lower()
    plain = _FORMAT_ALIASES.get(plain, plain)
    if plain not in WEIGHT_FORMATS:
        raise unknown("quantization", name, [*WEIGHT_FORMATS, *_FORMAT_ALIASES, "none"])
    return WEIGHT_FORMATS[plain]
