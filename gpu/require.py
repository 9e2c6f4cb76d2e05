"""Torch and triton are optional: what to say when one of them is needed and is not there."""

from __future__ import annotations

import importlib
from types import ModuleType

INSTALL = "pip install 'kvtwin[gpu]'"
"""The command that brings both."""


class MissingExtraError(ImportError):
    """A library that only the real twin needs is not installed. The message says what needs it and how to get it."""


def require(name: str, purpose: str) -> ModuleType:
    """The module `name`, imported now.

    Raises:
        MissingExtraError: it is not installed; the message names `purpose` and the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name.partition(".")[0]:
            raise
        raise MissingExtraError(f"{purpose} needs {name}, which is not installed: {INSTALL}", name=name) from error
