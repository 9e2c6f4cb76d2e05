"""Prefix sharing between requests: which leading blocks of a prompt were in an earlier prompt, and in which.

A conversation looks like this to a cache: each turn's prompt begins with the whole prompt of the turn before. So a
request either starts a conversation, sharing only the blocks that everyone shares, or continues an earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.workload.lengths import class_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from sim.workload.lengths import Floats, Ints

WINDOW_REQUESTS = 8192
"""A conversation is continued within so many requests (99.5 % of the turns of the Mooncake conversation trace are)."""
LENGTH_WEIGHT = 4.0
"""How much a parent of another length counts, against one of another age (both as logarithms of the ratio)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTable:
    """Statistics of prefix sharing."""

    block_tokens: int
    """Tokens that one content id names."""
    shared_blocks: int
    """Leading blocks that all requests have in common (a system prompt)."""
    follow_share: tuple[float, ...]
    """Share of requests that continue an earlier one, for each class of prompts (classes of equal share, shortest first)."""
    hit_probabilities: tuple[float, ...]
    """From 0 to 1, increasing."""
    hit_quantiles: tuple[tuple[float, ...], ...]
    """Share of a continuing prompt's blocks that were seen before, at each of `hit_probabilities`, one row for each class."""
    age_probabilities: tuple[float, ...]
    """From 0 to 1, increasing."""
    age_quantiles: tuple[int, ...]
    """Requests between a turn and the one it continues, at each of `age_probabilities`. Counted in requests, not seconds,
    so that the sharing does not change with the rate."""

    def content_ids(self, input_tokens: Ints, input_ranks: Floats, rng: np.random.Generator) -> list[tuple[int, ...]]:
        """One tuple of content ids a request `[n]`, naming the blocks of its prompt (the last may be partial).

        The continued request is the one whose age and length come nearest to what the statistics ask for, among those
        long enough that nobody continues yet. Early in a workload ages are shorter than recorded, as the continued
        request must be in the workload itself.
        """
        import numpy as np

        num_requests = len(input_tokens)
        follow_rank, hit_rank, age_rank = rng.random((num_requests, 3)).T
        classes = class_of(input_ranks, len(self.follow_share))
        blocks = -(-input_tokens // self.block_tokens)
        hit_share = np.empty(num_requests)
        for number, quantiles in enumerate(self.hit_quantiles):
            here = classes == number
            hit_share[here] = np.interp(hit_rank[here], self.hit_probabilities, quantiles)
        hits = np.rint(hit_share * blocks).astype(np.int64)
        continues = (follow_rank < np.array(self.follow_share)[classes]) & (hits > self.shared_blocks)
        parents = _Parents(blocks)
        log_ages = np.log(np.interp(age_rank, self.age_probabilities, self.age_quantiles))

        chains: list[tuple[int, ...]] = []
        next_id = self.shared_blocks
        for i, (count, hit) in enumerate(zip(blocks.tolist(), hits.tolist(), strict=True)):
            parent = parents.take(i, hit, float(log_ages[i])) if continues[i] else None
            if parent is None:
                beginning = tuple(range(min(self.shared_blocks, count)))
            else:
                beginning = chains[parent][: min(hit, count)]
            fresh = count - len(beginning)
            chains.append(beginning + tuple(range(next_id, next_id + fresh)))
            next_id += fresh
        return chains


class _Parents:
    """Chooses which earlier request a turn continues; each is continued once, while there is a choice."""

    def __init__(self, blocks: Ints) -> None:
        """`blocks`: content blocks of each prompt `[n]`, in order of arrival."""
        import numpy as np

        self._blocks = blocks
        # The last block of a prompt is partial, so a next turn shares all but that one.
        self._log_whole: Floats = np.log(np.maximum(blocks - 1, 1))
        self._log_age: Floats = np.log(np.arange(WINDOW_REQUESTS, 0, -1))
        self._free: npt.NDArray[np.bool_] = np.ones(len(blocks), dtype=np.bool_)

    def take(self, child: int, hit_blocks: int, log_age: float) -> int | None:
        """The request to continue, or None when there is none before `child`."""
        import numpy as np

        if child == 0:
            return None
        first = max(0, child - WINDOW_REQUESTS)
        window = slice(first, child)
        long_enough = np.flatnonzero(self._free[window] & (self._blocks[window] >= hit_blocks))
        if not len(long_enough):
            # Nobody free is long enough: share as much as there is, with the longest.
            return first + int(self._blocks[window].argmax())
        age_miss = np.abs(self._log_age[WINDOW_REQUESTS - child + first :][long_enough] - log_age)
        length_miss = np.abs(self._log_whole[window][long_enough] - np.log(hit_blocks))
        parent = first + int(long_enough[np.argmin(age_miss + LENGTH_WEIGHT * length_miss)])
        self._free[parent] = False
        return parent
