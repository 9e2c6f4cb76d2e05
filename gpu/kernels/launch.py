"""What the launchers share: one layer of the cache as they see it, tile sizes, and what the device can do.

Needs torch, not triton, so that the torch twins can use it where triton does not exist.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch

from gpu.check import ArgumentError, check_tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Formats a model computes in."""
E4M3 = torch.float8_e4m3fn
"""The format of an fp8 cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel launch, decided but not done: a device runs it, `gpu.compile_check` compiles it for a device that is
    not there.
    """

    kernel: Any
    """The `@triton.jit` function."""
    grid: tuple[int, ...]
    """Programs along each axis."""
    arguments: tuple[Any, ...]
    """What comes before the compile-time constants, in order: tensors and numbers."""
    constants: dict[str, Any]
    """Compile-time constants by name."""
    num_warps: int
    """Warps of 32 threads a program."""

    def run(self) -> None:
        """Launch it on the current stream of the current device, which must be the tensors' (or run it in the interpreter)."""
        self.kernel[self.grid](*self.arguments, **self.constants, num_warps=self.num_warps)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVView:
    """One layer of the paged cache, as kernels see it. Shares the pool's memory."""

    kv: Any
    """`[num_blocks + 1, 2, block_size, num_kv_heads, head_dim]`; all but the block dimension are dense."""
    bits: Any
    """`kv`, seen as uint8 when it is fp8: kernels do fp8 by integer arithmetic where the device has no instruction."""
    scale: Any = None
    """`[num_blocks + 1, 2, block_size, num_kv_heads]` float32 for an fp8 cache. With a constant scale for K and one for V
    it is an expanded view of two numbers: all strides but that of dimension 1 are 0."""
    dynamic: bool = False
    """True when `store_kv` computes and writes a scale a vector."""

    @classmethod
    def of(cls, kv: Any, scale: Any = None, *, dynamic: bool = False) -> KVView:
        """A view of `kv`, checked.

        Raises:
            ArgumentError: shapes, strides or formats that no kernel reads; fp8 without scales, or scales without fp8.
        """
        check_tensor("kv", kv, (None, 2, None, None, None), dtype=(*FLOATS, E4M3))
        blocks, _, block_size, heads, head_dim = kv.shape
        token = heads * head_dim
        if kv.stride()[1:] != (block_size * token, token, head_dim, 1):
            raise ArgumentError(f"a chunk of kv must be dense; the strides are {kv.stride()}")
        if (kv.dtype is E4M3) != (scale is not None):
            raise ArgumentError("an fp8 cache needs scales, and only an fp8 cache has them")
        if scale is not None:
            check_tensor("scale", scale, (blocks, 2, block_size, heads), dtype=torch.float32, like=kv, strided=True)
        return cls(kv=kv, bits=kv.view(torch.uint8) if kv.dtype is E4M3 else kv, scale=scale, dynamic=dynamic)

    @property
    def scaling_code(self) -> int:
        """0: not fp8, 1: scales are given, 2: scales are computed when a vector is stored."""
        return 0 if self.scale is None else 2 if self.dynamic else 1

    def scale_arguments(self) -> tuple[Any, tuple[int, ...]]:
        """The scale pointer and its four strides; something harmless without fp8."""
        return (self.bits, (0, 0, 0, 0)) if self.scale is None else (self.scale, tuple(self.scale.stride()))

    def check_new_tokens(self, key: Any, value: Any, slot_mapping: Any) -> int:
        """Verify the arguments of `store_kv`; returns the number of tokens."""
        _, _, _, heads, head_dim = self.kv.shape
        num_tokens = int(slot_mapping.shape[0])
        check_tensor("slot_mapping", slot_mapping, (num_tokens,), dtype=torch.int64, like=self.kv, contiguous=True)
        for name, vectors in (("key", key), ("value", value)):
            check_tensor(name, vectors, (num_tokens, heads, head_dim), dtype=FLOATS, like=self.kv)
            if num_tokens and heads > 1 and vectors.stride(1) != head_dim:
                raise ArgumentError(f"the heads of {name} must be dense; its strides are {vectors.stride()}")
        return num_tokens


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def warps_for(elements: int, per_thread: int = 8) -> int:
    """Warps for a tile of `elements` when each thread holds about `per_thread` of them: 1, 2, 4 or 8."""
    return max(1, min(8, next_power_of_2(elements) // (32 * per_thread)))


def interpreted() -> bool:
    """True where Triton kernels are run by its interpreter (`TRITON_INTERPRET=1` before triton is imported)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def capability(device_index: int) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return int(major), int(minor)


def native_fp8(tensor: Any) -> bool:
    """Whether the tensor's device converts e4m3 in hardware (compute capability 8.9 and later)."""
    return bool(tensor.is_cuda) and capability(tensor.device.index or 0) >= (8, 9)


def dot_in_float32(dtype: Any) -> bool:
    """Whether matrix products of `dtype` inputs are done in float32: always for float32; for bfloat16 also in the
    interpreter, whose numpy has no bfloat16 and would multiply the bits as integers.
    """
    return dtype is torch.float32 or (dtype is torch.bfloat16 and interpreted())
