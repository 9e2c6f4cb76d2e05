"""Arguments of kernels, checked before a launch: a wrong shape must be an error with a name, not a wrong answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ArgumentError(ValueError):
    """An argument has the wrong shape, dtype, device or strides. The message names it and says what would be right."""


def check_tensor(
    name: str,
    tensor: Any,
    shape: Sequence[int | None],
    *,
    dtype: Any = None,
    like: Any = None,
    contiguous: bool = False,
    strided: bool = False,
) -> None:
    """Verify one tensor argument.

    Args:
        name: what to call it in the message.
        tensor: the argument.
        shape: expected sizes; None where any size is right.
        dtype: the one dtype, or a tuple of the dtypes, that it may have; None for any.
        like: a tensor on whose device it must lie.
        contiguous: whether it must be dense. Otherwise only its last dimension must be.
        strided: whether even that may have any stride.

    Raises:
        ArgumentError: what does not hold, with the numbers.
    """
    actual = tuple(tensor.shape)
    if len(actual) != len(shape) or any(
        want is not None and want != got for want, got in zip(shape, actual, strict=True)
    ):
        wanted = ", ".join("?" if size is None else str(size) for size in shape)
        raise ArgumentError(f"{name} must have the shape [{wanted}], not {list(actual)}")
    if dtype is not None:
        allowed = dtype if isinstance(dtype, tuple) else (dtype,)
        if tensor.dtype not in allowed:
            names = " or ".join(str(each).removeprefix("torch.") for each in allowed)
            raise ArgumentError(f"{name} must be {names}, not {str(tensor.dtype).removeprefix('torch.')}")
    if like is not None and tensor.device != like.device:
        raise ArgumentError(f"{name} must be on {like.device}, like the others, not on {tensor.device}")
    if contiguous and not tensor.is_contiguous():
        raise ArgumentError(f"{name} must be contiguous; its strides are {tensor.stride()}")
    if not strided and actual and actual[-1] > 1 and tensor.stride(-1) != 1:
        raise ArgumentError(f"the last dimension of {name} must be dense; its stride is {tensor.stride(-1)}")


def check_range(name: str, value: float, low: float, high: float | None = None) -> None:
    """Verify that `low <= value` and, with `high`, `value <= high`.

    Raises:
        ArgumentError: it does not.
    """
    if not low <= value or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ArgumentError(f"{name} must be {limit}, not {value}")
