"""Block copies of one plan in batches, each of which one kernel call may do in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def independent(copies: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Copies in batches within which the order does not matter.

    >>> list(independent([(1, 2), (1, 3), (4, 1)]))
    [[(1, 2), (1, 3)], [(4, 1)]]
    """
    batch: list[tuple[int, int]] = []
    for source, target in copies:
        if any(target in pair or source == pair[1] for pair in batch):
            yield batch
            batch = []
        batch.append((source, target))
    if batch:
        yield batch
