"""The simplest cost model: a step costs a constant, plus so much a token, a context token and a sequence.

For analytic tests, whose right answers need a known service time, and as the known truth that a calibration must recover.
"""

from __future__ import annotations

from sim.core.batch_shape import BatchShape
from sim.core.clock import to_fs, to_s
from sim.core.config import ConfigError
from sim.core.durations import Durations


class FixedCost:
    """`base + per_token * tokens + per_context_token * context + per_seq * sequences`, exactly, in whole femtoseconds.

    Tokens are all tokens computed in the step. Context is the KV that attention reads: `decode_context_tokens`, and for a prefill chunk the
    tokens cached before it. Sequences are decodes and prefill chunks together. Copies and swaps within a step are free; copies beside
    the steps take `per_copied_block` a block.

    >>> FixedCost(0.01, per_token_s=0.001).step_fs(BatchShape(decode_seqs=2, decode_context_tokens=9, sampled_seqs=2)) == 12 * 10**12
    True
    """

    __slots__ = ("base_fs", "name", "per_context_token_fs", "per_copied_block_fs", "per_seq_fs", "per_token_fs")

    def __init__(
        self,
        base_s: float,
        per_token_s: float = 0.0,
        per_context_token_s: float = 0.0,
        per_seq_s: float = 0.0,
        per_copied_block_s: float = 0.0,
        *,
        name: str = "fixed",
    ) -> None:
        """All costs are in seconds and at least 0.

        Raises:
            ConfigError: a negative cost.
        """
        given = {
            "base_s": base_s,
            "per_token_s": per_token_s,
            "per_context_token_s": per_context_token_s,
            "per_seq_s": per_seq_s,
            "per_copied_block_s": per_copied_block_s,
        }
        for key, value in given.items():
            if not 0.0 <= value < float("inf"):
                raise ConfigError(f"{key} is {value}; a cost is a finite number of seconds, at least 0")
        self.name = name
        self.base_fs = to_fs(base_s)
        self.per_token_fs = to_fs(per_token_s)
        self.per_context_token_fs = to_fs(per_context_token_s)
        self.per_seq_fs = to_fs(per_seq_s)
        self.per_copied_block_fs = to_fs(per_copied_block_s)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FixedCost) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        base, token, context, seq, copied = map(to_s, self._values())
        beside = f", per_copied_block_s={copied!r}" if copied else ""
        return f"FixedCost({base!r}, per_token_s={token!r}, per_context_token_s={context!r}, per_seq_s={seq!r}{beside})"

    def _values(self) -> tuple[int, int, int, int, int]:
        return (
            self.base_fs,
            self.per_token_fs,
            self.per_context_token_fs,
            self.per_seq_fs,
            self.per_copied_block_fs,
        )

    def scaled(self, factor: float) -> FixedCost:
        """Every cost times `factor`; exact for whole factors."""
        if factor < 0:
            raise ConfigError(f"factor is {factor}; a cost cannot become negative")
        copy = FixedCost(0.0, name=self.name)
        (
            copy.base_fs,
            copy.per_token_fs,
            copy.per_context_token_fs,
            copy.per_seq_fs,
            copy.per_copied_block_fs,
        ) = (round(value * factor) for value in self._values())
        return copy

    def step_fs(self, shape: BatchShape) -> int:
        """Duration of one step of this shape."""
        context = shape.decode_context_tokens + sum(cached for _, cached in shape.prefill)
        sequences = shape.decode_seqs + len(shape.prefill)
        return (
            self.base_fs
            + self.per_token_fs * shape.num_tokens
            + self.per_context_token_fs * context
            + self.per_seq_fs * sequences
        )

    def decode_stretch(
        self, decode_seqs: int, context_tokens: int, steps: int, max_context_tokens: int = 0
    ) -> Durations:
        """Durations of `steps` decode steps, each longer than the one before by the cost of its new context tokens."""
        first = self.step_fs(
            BatchShape(decode_seqs=decode_seqs, decode_context_tokens=context_tokens, sampled_seqs=decode_seqs)
        )
        return Durations.affine(steps, first, self.per_context_token_fs * decode_seqs)

    def copy_fs(self, num_blocks: int) -> int:
        """Time to move KV blocks between the device and CPU memory, one way."""
        return self.per_copied_block_fs * num_blocks

    def warnings(self) -> list[str]:
        """What a reader must know: these prices describe no real machine."""
        return ["step times are a fixed formula given by the user, not a model of a GPU"]
