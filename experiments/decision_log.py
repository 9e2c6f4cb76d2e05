"""The decision log as a file: JSON Lines, streamed, and under its own name only when it is whole."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class DecisionLogFile:
    """Writes one compact JSON line an entry into a temporary file beside `path`, which takes its name when the block ends well.

    After an error or an interrupt nothing is left and an older file at `path` stays as it was. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder; a file name is needed", str(self._path))
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.", suffix=".tmp")
        self._temporary = Path(name)
        self._stream = os.fdopen(handle, "w", encoding="utf-8")
        return self

    def write(self, entry: dict[str, Any]) -> None:
        """Append one entry."""
        self._stream.write(json.dumps(entry, separators=(",", ":")))
        self._stream.write("\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stream.close()
        except OSError as problem:  # what was still to be written does not fit
            error = error or problem
        if error is None:
            umask = os.umask(0)
            os.umask(umask)
            self._temporary.chmod(0o666 & ~umask)
            self._temporary.replace(self._path)
            return
        self._temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk does not say of which file
            raise OSError(error.errno, error.strerror, str(self._path)) from None
