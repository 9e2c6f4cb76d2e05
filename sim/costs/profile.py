"""Prices from a fitted profile: tables of measured kernels, added up as the engine runs them.

A decode step of n sequences that read S tokens of KV, the longest of them m, costs exactly

    base(n) + line_n(S) + skew(n) * (n * m - S)

where line_n is piecewise linear with whole femtoseconds for slopes. Each decode step adds n to S and 1 to m, so the last
term stays as it is: a stretch of steps is a few arithmetic progressions, one a piece of the line crossed.
"""

from __future__ import annotations

from bisect import bisect_left
from math import ceil
from typing import Any

from sim.core.batch_shape import BatchShape
from sim.core.clock import to_fs
from sim.core.durations import Durations

from .piecewise import IntegerLine
from .terms import TILE, StepTerms


class FittedProfile:
    """Prices steps by `StepTerms`. Pure: the caches, and the largest shapes seen, only remember."""

    def __init__(self, terms: StepTerms, *, name: str, notes: tuple[str, ...] = ()) -> None:
        """`name` is what reports print; `notes` say where the prices come from and how good they are."""
        self.name, self.terms, self._notes = name, terms, notes
        self._lines: dict[int, tuple[int, IntegerLine, int]] = {}
        self._tokens_fs: dict[int, int] = {}
        self._rows_fs: dict[int, int] = {}
        self._prefill_fs: dict[tuple[int, int], tuple[int, int]] = {}
        self._step_fs, self._seq_fs = to_fs(terms.step_s), to_fs(terms.seq_s)
        self._gap_fs = to_fs(terms.gap_s)
        self._copy_fs, self._swap_fs = to_fs(terms.copy_block_s), to_fs(terms.swap_block_s)
        self._excess_fs = to_fs(terms.excess_token_s)
        self._launch_fs, self._tile_fs = to_fs(terms.chunk_launch_s), to_fs(terms.mixed_tile_s)
        self._seen = {"tokens": 0, "decodes": 0, "mean context tokens": 0}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.terms, self.name, self._notes)

    def copy_fs(self, num_blocks: int) -> int:
        """Time to move KV blocks over the host link, as swaps within a step are priced."""
        return self._swap_fs * num_blocks

    def step_fs(self, shape: BatchShape) -> int:
        """Duration of one step of this shape."""
        moved = self._copy_fs * shape.copied_blocks + self._swap_fs * shape.swapped_blocks
        if not shape.prefill:
            if not shape.decode_seqs:
                return self._step_fs + moved
            return moved + self._decode(
                shape.decode_seqs, shape.decode_context_tokens, shape.decode_max_context_tokens, shape.sampled_seqs
            )
        sequences = shape.decode_seqs + len(shape.prefill)
        return (
            self._step_fs
            + self._seq_fs * sequences
            + self._gap_fs
            + moved
            + self._tokens(shape.num_tokens)
            + self._rows(shape.sampled_seqs)
            + self._attention(shape)
        )

    def host_fs(self, sequences: int) -> int:
        """The host's part of a step with so many sequences."""
        return self._step_fs + self._seq_fs * sequences

    def decode_stretch(
        self, decode_seqs: int, context_tokens: int, steps: int, max_context_tokens: int = 0
    ) -> Durations:
        """Durations of `steps` pure decode steps, in closed form."""
        base, line, skew = self._line(decode_seqs)
        base += self._rows(decode_seqs) + skew * _excess(decode_seqs, context_tokens, max_context_tokens)
        self._note(decode_seqs, decode_seqs, context_tokens + (steps - 1) * decode_seqs)
        return Durations(line.along(context_tokens, decode_seqs, steps, base))

    def warnings(self) -> list[str]:
        """Where the prices come from, and which shapes of the run lay beyond what was measured."""
        limits = (self.terms.max_tokens, self.terms.max_seqs, self.terms.max_context_tokens)
        beyond = [
            f"{seen:,} {what} in a step (measured up to {limit:,})"
            for (what, seen), limit in zip(self._seen.items(), limits, strict=True)
            if seen > limit
        ]
        extrapolated = [f"profile {self.name} was used beyond its range: {', '.join(beyond)}"] if beyond else []
        return [*self._notes, *extrapolated]

    def _decode(self, seqs: int, context: int, longest: int, rows: int) -> int:
        base, line, skew = self._line(seqs)
        self._note(seqs, seqs, context)
        return base + self._rows(rows) + line(context) + skew * _excess(seqs, context, longest)

    def _line(self, seqs: int) -> tuple[int, IntegerLine, int]:
        """For so many decodes: the constant part, attention over the sum of contexts, and the price of a token of excess."""
        if seqs not in self._lines:
            grid = self.terms.decode
            line = IntegerLine([round(knot) * seqs for knot in grid.y], grid.row(seqs))
            rate = line.values[-1] / line.knots[-1]
            base = self._step_fs + self._seq_fs * seqs + self._gap_fs + self._tokens(seqs)
            self._lines[seqs] = base, line, round(self.terms.decode_skew(seqs) * rate) + self._excess_fs
        return self._lines[seqs]

    def _attention(self, shape: BatchShape) -> int:
        """Attention of a step with prefill chunks, and decodes beside them."""
        seqs, context = shape.decode_seqs, shape.decode_context_tokens
        self._note(shape.num_tokens, seqs, context)
        chunks = shape.prefill
        work_fs = self._prefill(chunks)
        if not seqs:
            return self._launch_fs + work_fs
        terms, mean = self.terms, context / seqs
        excess = _excess(seqs, context, shape.decode_max_context_tokens)
        beside_s = terms.mixed(seqs, mean) * (1.0 + terms.mixed_skew(seqs) * excess / context)
        beside_fs = to_fs(beside_s) + self._excess_fs * excess
        q = max(1.0, terms.overlap(seqs + sum(-(-tokens // TILE) for tokens, _ in chunks)))
        longer, shorter = max(work_fs, beside_fs), min(work_fs, beside_fs)
        both_fs = longer + shorter if q == 1.0 else round(longer * (1.0 + (shorter / longer) ** q) ** (1.0 / q))
        both_fs += self._launch_fs + self._tile_fs * seqs * max(tokens for tokens, _ in chunks)
        if terms.mixed_ratio is None:
            return both_fs
        tokens = sum(chunk for chunk, _ in chunks)
        cached = sum(chunk * before for chunk, before in chunks) / tokens
        return round(both_fs * terms.mixed_ratio(tokens, cached, seqs, mean))

    def _prefill(self, chunks: tuple[tuple[int, int], ...]) -> int:
        """Work of chunks in one call, its launch left out. Chunks that fit on the GPU together take the time of the longest."""
        longest = filled = 0
        for chunk in chunks:
            if chunk not in self._prefill_fs:
                self._prefill_fs[chunk] = self._one_chunk(*chunk)
            work_fs, share_fs = self._prefill_fs[chunk]
            longest, filled = max(longest, work_fs), filled + share_fs
        return max(longest, filled)

    def _one_chunk(self, tokens: int, cached: int) -> tuple[int, int]:
        """A chunk's work, and the part of it in which the GPU is full."""
        work_fs = max(0, to_fs(self.terms.prefill(tokens, cached)) - self._launch_fs)
        if not self.terms.wave_tiles:
            return work_fs, work_fs
        waves = -(-tokens // TILE) / self.terms.wave_tiles
        return work_fs, round(work_fs * waves / ceil(waves))

    def _tokens(self, tokens: int) -> int:
        """Dense layers and collectives."""
        if tokens not in self._tokens_fs:
            sizes = self.terms.padded_sizes
            padded = sizes[bisect_left(sizes, tokens)] if sizes and tokens <= sizes[-1] else tokens
            collective_s = self.terms.all_reduce(padded) if self.terms.all_reduce else 0.0
            self._tokens_fs[tokens] = to_fs(self.terms.dense(padded) + self.terms.token_s * padded + collective_s)
        return self._tokens_fs[tokens]

    def _rows(self, rows: int) -> int:
        if rows not in self._rows_fs:
            self._rows_fs[rows] = to_fs(self.terms.rows(rows)) if rows else 0
        return self._rows_fs[rows]

    def _note(self, tokens: int, seqs: int, context: int) -> None:
        seen = self._seen
        seen["tokens"] = max(seen["tokens"], tokens)
        seen["decodes"] = max(seen["decodes"], seqs)
        seen["mean context tokens"] = max(seen["mean context tokens"], context // seqs if seqs else 0)


def _excess(seqs: int, context: int, longest: int) -> int:
    """Tokens by which contexts would grow if all were as long as the longest; 0 when that is not known."""
    return max(0, seqs * longest - context)


def _rebuild(terms: StepTerms, name: str, notes: tuple[str, ...]) -> FittedProfile:
    return FittedProfile(terms, name=name, notes=notes)
