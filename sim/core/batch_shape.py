"""BatchShape: the sizes of a step, all that a cost model needs; and those of its parts, if it is computed in several passes."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(slots=True, unsafe_hash=True)
class BatchShape:
    """What a cost model needs to know about the work of one step; no identities, only sizes. Never changed, so it can be a key."""

    prefill: tuple[tuple[int, int], ...] = ()
    """One `(num_tokens, context_tokens)` a prefill chunk: tokens computed now, tokens already in the KV cache."""
    decode_seqs: int = 0
    """Sequences that compute exactly one token."""
    decode_context_tokens: int = 0
    """Sum over those sequences of the KV length the attention reads, the new token included, in the first step."""
    decode_max_context_tokens: int = 0
    """The longest of those KV lengths; 0 where it is not known. A batch waits for its longest sequence."""
    sampled_seqs: int = 0
    """Rows that reach the LM head and the sampler: decodes, and prefill chunks that end their prompt."""
    copied_blocks: int = 0
    """Block copies on the device (copy-on-write)."""
    swapped_blocks: int = 0
    """Blocks moved between the device and the CPU pool, both directions together."""
    after_pause: bool = False
    """Whether nothing was under way when the step was planned: the host's work before it is hidden behind no other step."""

    passes: int = 1
    """In how many forward passes the step is computed, each with a part of its tokens; at most as many as it has tokens."""

    def later(self, steps: int) -> BatchShape:
        """The shape of the same decode step `steps` repetitions later."""
        longest = self.decode_max_context_tokens
        return replace(
            self,
            decode_context_tokens=self.decode_context_tokens + steps * self.decode_seqs,
            decode_max_context_tokens=longest + steps if longest else 0,
        )

    def split(self) -> tuple[BatchShape, ...]:
        """Its passes, each a step of one pass: nearly equal numbers of tokens, decodes first, then prompts in their order.

        Sizes, not identities: contexts of decodes are shared out evenly. Copies and swaps come before the first pass.

        >>> [part.num_tokens for part in BatchShape(prefill=((7, 0),), decode_seqs=4, passes=3).split()]
        [4, 4, 3]
        """
        if self.passes == 1:
            return (self,)
        decodes, context, rest = self.decode_seqs, self.decode_context_tokens, list(self.prefill)
        ends, left, made = self.sampled_seqs - self.decode_seqs, self.num_tokens, []
        for index in range(self.passes):
            room = -(-left // (self.passes - index))
            left -= room
            seqs = min(room, decodes)
            share = context * seqs // decodes if seqs else 0
            chunks, whole = _taken(rest, room - seqs)
            sampled = max(0, min(ends, whole)) if left else ends
            ends, decodes, context = ends - sampled, decodes - seqs, context - share
            made.append(
                BatchShape(
                    prefill=chunks,
                    decode_seqs=seqs,
                    decode_context_tokens=share,
                    decode_max_context_tokens=self.decode_max_context_tokens if seqs else 0,
                    sampled_seqs=seqs + sampled,
                    copied_blocks=0 if index else self.copied_blocks,
                    swapped_blocks=0 if index else self.swapped_blocks,
                    after_pause=self.after_pause and not index,
                )
            )
        return tuple(made)

    @property
    def computes(self) -> bool:
        """Whether it has any tokens: a step without only begins copies."""
        return bool(self.decode_seqs or self.prefill)

    @property
    def prefill_tokens(self) -> int:
        """Prompt (or recomputed) tokens computed in the step."""
        return sum([num_tokens for num_tokens, _ in self.prefill]) if self.prefill else 0

    @property
    def num_tokens(self) -> int:
        """All tokens computed in the step."""
        return self.prefill_tokens + self.decode_seqs


def _taken(chunks: list[tuple[int, int]], tokens: int) -> tuple[tuple[tuple[int, int], ...], int]:
    """Take `tokens` tokens off the front of `chunks`, cutting the last if need be; and how many chunks end with them."""
    found: list[tuple[int, int]] = []
    whole = 0
    while tokens:
        size, context = chunks.pop(0)
        taken = min(size, tokens)
        found.append((taken, context))
        tokens -= taken
        if taken < size:
            chunks.insert(0, (size - taken, context + taken))
        else:
            whole += 1
    return tuple(found), whole
