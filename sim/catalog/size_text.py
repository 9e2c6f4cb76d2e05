"""A number of bytes as a reader takes it in."""

from __future__ import annotations

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def size_text(size: int) -> str:
    """A size as PyTorch prints it: in the largest unit of which it has one.

    >>> size_text(512), size_text(3 * 2**29)
    ('512 bytes', '1.50 GiB')
    """
    for unit, scale in _UNITS:
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} bytes"
