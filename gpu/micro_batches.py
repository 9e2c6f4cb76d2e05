"""Micro-batches: one step's work as several forward passes, each with a part of the tokens and of the temporary tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .batch import Work


def micro_batches(work: Sequence[Work], parts: int) -> list[list[Work]]:
    """`work` in at most `parts` passes of nearly equal numbers of tokens, in its order.

    The order is kept because a request may read blocks that one before it fills in the same step: its pass comes later then, or
    is the same. A chunk of a prompt that crosses a border is computed in two chunks, the second on top of the first.

    Raises:
        ValueError: `parts` is below 1.
    """
    if parts < 1:
        raise ValueError(f"a step is computed in at least one pass, not in {parts}")
    total = sum(item.num_tokens for item in work)
    passes: list[list[Work]] = []
    left, rest = total, list(work)
    for index in range(min(parts, total)):
        room = -(-left // (min(parts, total) - index))
        left -= room
        taken: list[Work] = []
        while room:
            item = rest.pop(0)
            if item.num_tokens > room:
                head, tail = _cut(item, room)
                rest.insert(0, tail)
                item = head
            taken.append(item)
            room -= item.num_tokens
        passes.append(taken)
    return passes


def _cut(item: Work, tokens: int) -> tuple[Work, Work]:
    """The first `tokens` tokens of a chunk, and what is left to compute on top of them."""
    return (
        replace(item, token_ids=item.token_ids[:tokens], samples=False),
        replace(item, token_ids=item.token_ids[tokens:], context_tokens=item.context_tokens + tokens),
    )
