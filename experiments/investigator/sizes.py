"""Sizes as messages print them: a number with few digits, which stands for an interval of bytes.

Two roundings lie between a tensor and the figure in an out-of-memory message. The allocator asks CUDA for a whole segment
(2 MiB for anything up to 1 MiB, 20 MiB up to 10 MiB, above that a multiple of 2 MiB), and the figure is printed with two
decimals of a unit. `tensor_interval` undoes both.

**Source:** c10/cuda/CUDACachingAllocator.cpp, `get_allocation_size` and `format_size`.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_UNITS = {
    "b": 1,
    "byte": 1,
    "bytes": 1,
    "kib": KIB,
    "kb": KIB,
    "mib": MIB,
    "mb": MIB,
    "gib": GIB,
    "gb": GIB,
    "tib": GIB << 10,
    "tb": GIB << 10,
}

BOGUS_BYTES = 1 << 60
"""No GPU has this: drivers without per-process figures (WSL, containers) print 17179869184.00 GiB = 2^64 bytes."""


@dataclass(frozen=True, slots=True)
class Size:
    """A printed size."""

    bytes: float
    """As printed."""
    half_bytes: float
    """Half the last printed digit: the true figure lies within `bytes` ± this."""

    @property
    def low(self) -> float:
        """Smallest number of bytes that prints so."""
        return self.bytes - self.half_bytes

    @property
    def high(self) -> float:
        """Largest number of bytes that prints so."""
        return self.bytes + self.half_bytes

    @property
    def gib(self) -> float:
        """In GiB."""
        return self.bytes / GIB

    def __str__(self) -> str:
        return show(self.bytes)


def parse_size(number: str, unit: str | None) -> Size | None:
    """The size printed as `number` `unit` (GiB where no unit is printed); None for what is no number or no possible size.

    Decimal unit names are read as binary ones: engines print GB and mean GiB.

    >>> parse_size("786.00", "MiB").bytes == 786 * MIB
    True
    """
    digits = number.replace(",", "").rstrip(".")
    try:
        value = float(digits)
    except ValueError:
        return None
    scale = _UNITS[(unit or "gib").lower()]
    decimals = len(digits.partition(".")[2])
    half = 0.0 if scale == 1 else 0.5 * scale * 10.0**-decimals
    size = value * scale
    return Size(size, half) if 0 <= size < BOGUS_BYTES else None


def show(size: float) -> str:
    """Bytes for a reader, as PyTorch prints them.

    >>> show(302.5 * MIB)
    '302.50 MiB'
    """
    magnitude = abs(size)
    for scale, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if magnitude >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} bytes"


def tensor_interval(tried: Size) -> tuple[float, float]:
    """Bytes `(more than, at most)` of a tensor for which the allocator tried to get a segment that prints as `tried`."""
    if tried.high <= 2 * MIB + tried.half_bytes:
        return 0.0, float(min(MIB, tried.high))
    if tried.low <= 20 * MIB <= tried.high:
        return float(MIB), 20.0 * MIB
    return tried.low - 2 * MIB, tried.high
