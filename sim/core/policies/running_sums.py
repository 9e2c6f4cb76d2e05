"""Sums over running requests that are asked for at every step, at the price of a sum only when somebody comes or goes."""

from __future__ import annotations

from bisect import bisect_left

from ..view import EngineView


class RunningSums:
    """Output tokens that running requests may still produce, each clipped.

    While nobody starts or stops decoding, each loses one a decode step; those that are clipped stand still until they come below the
    clip.
    """

    def __init__(self, clip_tokens: int) -> None:
        self._clip = clip_tokens
        self._key: tuple[int, int] | None = None
        self._clock = 0
        self._left: list[int] = []
        """Ascending."""
        self._below: list[int] = [0]
        """`_below[i]` is the sum of the first i of them."""

    def to_come(self, view: EngineView) -> int:
        """Sum over running requests of `min(output cap - output tokens, clip)`."""
        if not view.all_decoding:
            return sum(
                min(max(view.output_cap(running) - running.output_tokens, 0), self._clip) for running in view.running()
            )
        key = (view.decode_version, view.num_running)
        if key != self._key:
            self._key, self._clock = key, view.decode_clock
            self._left = sorted(view.output_cap(running) - running.output_tokens for running in view.running())
            self._below = [0]
            for left in self._left:
                self._below.append(self._below[-1] + left)
        passed = view.decode_clock - self._clock
        unclipped = bisect_left(self._left, self._clip + passed)  # those with left - passed < clip
        return self._below[unclipped] - unclipped * passed + (len(self._left) - unclipped) * self._clip
