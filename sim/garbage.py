"""How seldom the garbage collector looks for cycles while a run allocates."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def few_collections() -> Iterator[None]:
    """Let the garbage collector look for cycles seldom: requests and blocks are no garbage, and looking through all of them every few
    hundred objects costs a fifth of a run. The interpreter's own setting is put back.
    """
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
