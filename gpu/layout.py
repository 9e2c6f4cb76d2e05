"""KVLayout: where every byte of the paged KV cache lies. Pure Python: it is asked before there is a device.

One *chunk* is what one layer keeps of one block: K and V of `block_size` tokens,
`[2, block_size, num_kv_heads, head_dim]`, followed by its scales `[2, block_size, num_kv_heads]` (float32) when the
format has one a vector. Chunks are laid out back to back, so that copying, swapping, poisoning and summing a block are
operations on whole chunks, whatever the format. One layer, seen from its first chunk, is the strided tensor
`[num_blocks + 1, 2, block_size, num_kv_heads, head_dim]`; block 0 is NO_BLOCK, which is never allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sim.catalog.dtypes import dtype_name, kv_cache_dtype_name, kv_head_bytes
from sim.core.config import ConfigError

Scaling = Literal["none", "static", "per_token_head"]
Order = Literal["layer", "block"]

FORMATS: dict[str, tuple[str, int, Scaling]] = {
    "bfloat16": ("bfloat16", 2, "none"),
    "float16": ("float16", 2, "none"),
    "float32": ("float32", 4, "none"),
    "fp8": ("float8_e4m3fn", 1, "static"),
    "fp8_e4m3": ("float8_e4m3fn", 1, "static"),
    "fp8_per_token_head": ("float8_e4m3fn", 1, "per_token_head"),
}
"""KV cache formats with a real pool: torch dtype, bytes an element, and how values are scaled."""

VECTOR_BYTES = 16
"""The widest load of a GPU thread; every K or V vector is a whole number of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape, format and strides of a paged KV cache on one device."""

    num_layers: int
    """Layers whose KV one block keeps: all of the device's, or those of one attention group (`LayerGroups.num_places`)."""
    num_kv_heads: int
    """KV heads of one rank."""
    head_dim: int
    """Numbers in one K or V vector; a multiple of 16 bytes' worth, at most 256."""
    block_size: int
    """Tokens a block."""
    dtype: str = "bfloat16"
    """Format the model computes in: what `auto` means, and what an fp8 cache is widened to."""
    kv_cache_dtype: str = "auto"
    """Format of the cache: a key of `FORMATS`, or `auto`."""
    order: Order = "layer"
    """`layer`: all blocks of layer 0, then of layer 1 (what attention likes). `block`: all layers of block 0, then of
    block 1 (a block is one contiguous range, which a transfer likes)."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive whole number, not {value!r}")
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        object.__setattr__(self, "kv_cache_dtype", kv_cache_dtype_name(self.kv_cache_dtype))
        if self.kv_cache_dtype not in ("auto", *FORMATS):
            raise ConfigError(
                f"kv_cache_dtype {self.kv_cache_dtype!r} has no real pool; one of auto, {', '.join(FORMATS)} has"
            )
        if self.order not in ("layer", "block"):
            raise ConfigError(f"order must be 'layer' or 'block', not {self.order!r}")
        if self.head_dim > 256 or self.vector_bytes % VECTOR_BYTES:
            raise ConfigError(
                f"head_dim {self.head_dim} x {self.element_bytes} bytes must be a multiple of {VECTOR_BYTES} bytes, "
                "and head_dim at most 256"
            )
        if self.chunk_bytes % VECTOR_BYTES:
            raise ConfigError(
                f"block_size {self.block_size} x num_kv_heads {self.num_kv_heads} gives {self.scale_bytes} bytes of "
                f"scales a block, not a multiple of {VECTOR_BYTES}"
            )

    # -- format ---------------------------------------------------------------------------------------------------

    @property
    def storage(self) -> str:
        """Format of the cache with `auto` resolved: a key of `FORMATS`."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def torch_dtype(self) -> str:
        """Name of the torch dtype of the stored numbers."""
        return FORMATS[self.storage][0]

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored number."""
        return FORMATS[self.storage][1]

    @property
    def scaling(self) -> Scaling:
        """How stored numbers are scaled: not at all, by one constant a layer for K and one for V, or one scale a vector."""
        return FORMATS[self.storage][2]

    @property
    def vector_bytes(self) -> int:
        """Bytes of one K or V vector, scale not included."""
        return self.head_dim * self.element_bytes

    # -- sizes ----------------------------------------------------------------------------------------------------

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales at the end of a chunk."""
        return 8 * self.block_size * self.num_kv_heads if self.scaling == "per_token_head" else 0

    @property
    def chunk_bytes(self) -> int:
        """Bytes that one layer keeps of one block."""
        vectors = 2 * self.block_size * self.num_kv_heads
        return vectors * kv_head_bytes(self.storage, self.head_dim, self.dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers: what the ledger divides the KV budget by."""
        return self.num_layers * self.chunk_bytes

    def arena_bytes(self, num_blocks: int) -> int:
        """Bytes of the arena that holds `num_blocks` blocks and NO_BLOCK."""
        return (num_blocks + 1) * self.block_bytes

    # -- places ---------------------------------------------------------------------------------------------------

    def layer_stride_bytes(self, num_blocks: int) -> int:
        """Distance from a chunk to the same block's chunk in the next layer."""
        return self.chunk_bytes if self.order == "block" else (num_blocks + 1) * self.chunk_bytes

    @property
    def block_stride_bytes(self) -> int:
        """Distance from a chunk to the next block's chunk in the same layer."""
        return self.block_bytes if self.order == "block" else self.chunk_bytes

    def layer_shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """`[num_blocks + 1, 2, block_size, num_kv_heads, head_dim]`."""
        return (num_blocks + 1, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def layer_strides(self) -> tuple[int, int, int, int, int]:
        """Strides of a layer's view, in elements, in the order of `layer_shape`."""
        token = self.num_kv_heads * self.head_dim
        block = self.block_stride_bytes // self.element_bytes
        return (block, self.block_size * token, token, self.head_dim, 1)

    @property
    def scale_strides(self) -> tuple[int, int, int, int]:
        """Strides of the scales' view `[num_blocks + 1, 2, block_size, num_kv_heads]`, in float32 elements."""
        return (
            self.block_stride_bytes // 4,
            self.block_size * self.num_kv_heads,
            self.num_kv_heads,
            1,
        )

    @property
    def scale_offset_bytes(self) -> int:
        """Where the scales begin inside a chunk."""
        return self.chunk_bytes - self.scale_bytes

    def slot(self, block_id: int, offset: int) -> int:
        """The slot of token `offset` of a block. Slots of block 0 name no place: what is sent there is not written."""
        return block_id * self.block_size + offset
