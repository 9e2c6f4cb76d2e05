"""Forking: which sequences of one request go on as copies of which others, and when. Pure arithmetic.

Beam search keeps the `width` best continuations at every token: a beam none of whose continuations is among them dies, and another
beam with several goes on in its place too. Which beams those are depends on scores that only a model has; here, as with the length
of an output, the request carries its fate: a hash of (seed, request, number of tokens) decides. `change` is how often that
happens; it is a setting, not a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import shake_128

_TOP = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Forking:
    """How the sequences of one request come from each other. All start as copies of the first, when it has computed the prompt."""

    width: int
    """Sequences, at least 1."""
    change: float = 0.0
    """Probability that a sequence is replaced by a copy of another one at a token; 0 for independent samples. At least one
    sequence survives every token, so 0.3 of 4 beams is about 1.2 forks a token."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"a request of {self.width} sequences; it must have at least 1")
        if not 0.0 <= self.change < 1.0:
            raise ValueError(f"the probability of a change is {self.change}; it must be at least 0 and below 1")

    def replaced(self, name: str, tokens: int) -> tuple[tuple[int, int], ...]:
        """`(sequence, the one it continues as a copy of)` when the sequences of request `name` have got `tokens` output tokens.

        Nobody is both: those that are copied survive.
        """
        if not self.change or self.width < 2:
            return ()
        drawn = shake_128(f"{self.seed}:{name}:{tokens}".encode()).digest(8 * self.width)
        numbers = [int.from_bytes(drawn[at : at + 4], "little") for at in range(0, 8 * self.width, 4)]
        dies = self.change * _TOP
        survivors = [slot for slot in range(self.width) if numbers[2 * slot] >= dies]
        if not survivors or len(survivors) == self.width:
            return ()
        return tuple(
            (slot, survivors[numbers[2 * slot + 1] * len(survivors) // _TOP])
            for slot in range(self.width)
            if numbers[2 * slot] < dies
        )
