"""Where results go: found out before a long run, not after it."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path


def make_room(folder: Path | None, *files: Path | None) -> None:
    """Make the folder of results and those that the files go to, and try whether they can be written to.

    Raises: NotADirectoryError, IsADirectoryError for a name that is taken by the other kind; OSError where nothing can be written, each
    of the path that was given.
    """
    if folder is not None:
        _make(folder, folder)
    for file in files:
        if file is not None:
            if file.is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a folder; a file name is needed", str(file))
            _make(file.parent, file)


def _make(folder: Path, wanted: Path) -> None:
    """A folder in which files can be made, for what is `wanted` there."""
    taken = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
    if taken is not None:
        beneath = "" if taken == wanted else f", and {wanted} lies under it"
        raise NotADirectoryError(errno.ENOTDIR, f"is a file; a folder is needed{beneath}", str(taken))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(wanted)) from None
