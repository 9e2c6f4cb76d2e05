"""Fields of a plain dictionary somebody else wrote, read with their type checked and the place in every error."""

from __future__ import annotations

from typing import Any, TypeVar

from .events import PoolId
from .snapshot_pickle import SnapshotError

T = TypeVar("T")


class Reader:
    """One dictionary, and where it is. Every method raises SnapshotError if the field is missing or of another type."""

    __slots__ = ("_data", "where")

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, dict):
            raise SnapshotError(f"{where} is a dictionary, not {_kind(data)}")
        self._data: dict[Any, Any] = data
        self.where = where

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        """A field of one type; `default` if it is missing."""
        value = self._data.get(name, default)
        if value is None and name not in self._data:
            raise SnapshotError(f"{self.where} has no {name!r}")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise SnapshotError(f"{self.where}: {name!r} is {_kind(value)}, expected {kind.__name__}")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number."""
        return self.get(name, int, default)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number that is not negative."""
        value = self.get(name, int, default)
        if value < 0:
            raise SnapshotError(f"{self.where}: {name!r} is negative ({value})")
        return value

    def optional_count(self, name: str) -> int | None:
        """A whole number that is not negative, or None if it is missing."""
        return self.count(name) if name in self._data else None

    def list_of(self, name: str) -> list[Any]:
        """A list."""
        return self.get(name, list)

    def items(self, name: str) -> list[Reader]:
        """The dictionaries in a list."""
        return [Reader(item, f"{self.where}.{name}[{index}]") for index, item in enumerate(self.list_of(name))]

    def pool(self, name: str) -> PoolId | None:
        """The id of a memory pool, two whole numbers; None if it is missing."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(type(part) is int for part in value):
            raise SnapshotError(f"{self.where}: {name!r} is {value!r}, expected two whole numbers")
        return (value[0], value[1])

    def tag(self) -> str:
        """The innermost stack frame as `file:line name`; empty if none was recorded."""
        frames = self._data.get("frames")
        if not isinstance(frames, list) or not frames or not isinstance(frames[0], dict):
            return ""
        frame = frames[0]
        return f"{frame.get('filename', '')}:{frame.get('line', '')} {frame.get('name', '')}"


def _kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
