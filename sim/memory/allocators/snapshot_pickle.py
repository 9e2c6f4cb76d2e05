"""Read a pickle that holds nothing but plain data, and refuse every other.

A pickle is a program. This one may build dictionaries, lists, tuples, sets, numbers, texts, bytes, booleans and None; as soon
as it names anything to import, it is refused, before anything is imported or called.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any, NoReturn


class SnapshotError(ValueError):
    """A memory snapshot cannot be read. Says what is wrong with it."""


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that knows no names."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        """Every import a pickle can ask for goes through here: all are refused."""
        raise SnapshotError(
            f"the file asks to load {module_name}.{global_name}, which a memory snapshot never needs; a pickle that loads names "
            "can run code, so it was not read any further"
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        """References to objects outside the file are refused too."""
        raise SnapshotError(
            f"the file refers to an object outside itself ({pid!r}), which a memory snapshot never does"
        )


def load_plain(data: bytes) -> Any:
    """The plain data of a pickle.

    Raises SnapshotError if the bytes are no pickle, are cut off, or ask for anything but plain data.
    """
    try:
        return _PlainUnpickler(BytesIO(data)).load()
    except SnapshotError:
        raise
    except Exception as error:  # a damaged pickle makes the unpickler raise nearly anything
        raise SnapshotError(
            f"the file is no complete pickle, or not one of plain data ({type(error).__name__}: {error}); a snapshot is what "
            "torch.cuda.memory._dump_snapshot writes"
        ) from error
