"""Where results go: found out before a long run, not after it."""

from __future__ import annotations

import errno
from pathlib import Path


def make_room(folder: Path | None, *files: Path | None) -> None:
    """Make the folder of results and those that the files go to.

    Raises: NotADirectoryError, IsADirectoryError for a name that is taken by the other kind; OSError where nothing can be written.
    """
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "is a file; a folder is needed", str(folder))
        folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        if file is not None:
            if file.is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a folder; a file name is needed", str(file))
            file.parent.mkdir(parents=True, exist_ok=True)
