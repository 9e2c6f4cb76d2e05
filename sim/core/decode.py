"""The decode set: requests that each compute one token a step, moved forward together.

Most steps of an engine change nothing but lengths. So lengths are not stored: a member that joined at clock c with n computed
tokens has `n + (clock - c)` now, kept as `anchor = n - c`. A step then costs arithmetic, and work is left only where something
happens: a block boundary (members are filed by the clock residue at which they need a block) and a completion (a heap by
the clock at which it falls).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from .durations import Durations
from .request import Request


class DecodeSet:
    """Members hold exactly the blocks that cover their computed tokens; all advance one token a step."""

    def __init__(self, block_size: int, slots_per_block: int = 0, slots_per_token: int = 1) -> None:
        self.block_size = block_size
        self.slots_per_block = slots_per_block or block_size
        self.slots_per_token = slots_per_token
        """Slots of a block, and those that a token fills in all attention groups together (`EngineConfig.slots_per_token`)."""
        self.clock = 0
        """Steps in which the set computed since the engine started; the unit of all anchors."""
        self.last_end_fs = 0
        """When the latest of them ended."""
        self._fresh: dict[int, Request] = {}
        self._by_residue: list[dict[int, Request]] = [{} for _ in range(block_size)]
        self._completions: list[tuple[int, int, Request]] = []
        self._longest: list[tuple[int, int, Request]] = []
        """Heap of `(-anchor, order, request)`: members grow together, so the longest stays the longest until it leaves."""
        self._size = 0
        self._anchor_sum = 0
        self._dropped_sum = 0
        self._emptied_sum = 0
        self.busy_fs = 0
        """Duration of all steps so far."""
        self.clock_fs = 0
        """Integral over them of the clock that each step ended with: a member that stays gains `anchor + clock` token-time."""
        self.version = 0
        """Changes whenever the members change."""

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Members in no particular order."""
        for bucket in self._by_residue:
            yield from bucket.values()

    def computed(self, request: Request) -> int:
        """Tokens of a member (or, for others, of the request) whose KV exists."""
        return request.anchor + self.clock if request.decoding else request.num_computed_tokens

    def slots_filled(self, request: Request, tokens: int) -> int:
        """Token slots that `tokens` tokens of a request, a member or not, fill; what it gave back while it ran counts no more."""
        return tokens * self.slots_per_token - (len(request.table) - request.held_blocks) * self.slots_per_block

    def known(self, request: Request) -> int:
        """Prompt and sampled tokens; a member has exactly one that is not computed."""
        return request.anchor + self.clock + 1 if request.decoding else request.num_tokens

    def last_token_fs(self, request: Request) -> int:
        """When a request that has a token got its latest."""
        if request.decoding and request.order not in self._fresh:
            return self.last_end_fs
        assert request.last_token_fs is not None
        return request.last_token_fs

    def needs_block(self, request: Request) -> bool:
        """Whether the next token of a request that holds just what its computed tokens need begins a block."""
        return self.computed(request) % self.block_size == 0

    @property
    def context_tokens(self) -> int:
        """Sum over members of the KV length that the next step reads, its new tokens included."""
        return self._anchor_sum + self._size * (self.clock + 1) - self._dropped_sum

    @property
    def max_context_tokens(self) -> int:
        """The longest KV length the next step reads, its new token included; 0 without members, or if some dropped tokens."""
        if self._dropped_sum:
            return 0
        while self._longest and not self._is_longest(self._longest[0]):
            heappop(self._longest)
        return self.clock + 1 - self._longest[0][0] if self._longest else 0

    @property
    def filled_slots(self) -> int:
        """Sum over members of the slots of their blocks that hold a token."""
        return self.slots_per_token * (self._anchor_sum + self._size * self.clock) - self._emptied_sum

    @property
    def fresh(self) -> Iterable[Request]:
        """Members that joined since the set last computed."""
        return self._fresh.values()

    def join(self, request: Request) -> None:
        """Add a request that has one known token left to compute."""
        request.anchor = request.num_computed_tokens - self.clock
        request.finish_clock = self.clock + request.target_tokens - request.num_tokens
        request.decoding = True
        request.settled_fs, request.settled_clock_fs = self.busy_fs, self.clock_fs
        self._fresh[request.order] = request
        self.version += 1
        self._by_residue[-request.anchor % self.block_size][request.order] = request
        heappush(self._completions, (request.finish_clock, request.order, request))
        heappush(self._longest, (-request.anchor, request.order, request))
        self._size += 1
        self._anchor_sum += request.anchor
        self._dropped_sum += request.dropped_tokens
        request.emptied_slots = (len(request.table) - request.held_blocks) * self.slots_per_block
        self._emptied_sum += request.emptied_slots

    def leave(self, request: Request) -> None:
        """Remove a member and store its token counts."""
        self._settle(request)
        request.num_computed_tokens = request.anchor + self.clock
        request.num_tokens = request.num_computed_tokens + 1
        request.decoding = False
        if self._fresh.pop(request.order, None) is None:
            start, _ = request.decode_spans.pop()
            if start < self.clock:
                request.decode_spans.append((start, self.clock))
            request.last_token_fs = self.last_end_fs
        self.version += 1
        del self._by_residue[-request.anchor % self.block_size][request.order]
        self._size -= 1
        self._anchor_sum -= request.anchor
        self._dropped_sum -= request.dropped_tokens
        self._emptied_sum -= request.emptied_slots
        if len(self._completions) > 64 + 2 * self._size:  # most entries belong to requests that left early
            self._completions = [entry for entry in self._completions if self._is_current(entry)]
            heapify(self._completions)
        if len(self._longest) > 64 + 2 * self._size:
            self._longest = [entry for entry in self._longest if self._is_longest(entry)]
            heapify(self._longest)

    def retarget(self, request: Request, target_tokens: int) -> None:
        """Let a member finish at another length, which is above its known tokens."""
        request.target_tokens = target_tokens
        request.finish_clock = self.clock + target_tokens - self.known(request)
        heappush(self._completions, (request.finish_clock, request.order, request))

    def drop(self, request: Request, tokens: int, blocks: int) -> None:
        """A member's context lost `tokens` more tokens from its middle, and its tables `blocks` blocks."""
        self.empty(request, blocks)
        request.dropped_tokens += tokens
        self._dropped_sum += tokens

    def empty(self, request: Request, blocks: int, elapsed_fs: int = 0) -> None:
        """A member gave back `blocks` full blocks, `elapsed_fs` after what `passed` has counted."""
        self._settle(request)
        slots = blocks * self.slots_per_block
        request.emptied_slots += slots
        self._emptied_sum += slots
        request.token_fs += slots * elapsed_fs  # they held their tokens until now

    def passed(self, durations: Durations, total_fs: int, computed: int, failed: bool) -> None:
        """Steps of `total_fs` together were done, in the first `computed` of which every member computed a token; the last may have
        `failed`.

        Called before `advance`. A step that computes counts with the tokens it writes.
        """
        self.busy_fs += total_fs
        self.clock_fs += (self.clock + (computed > 0)) * total_fs
        if computed and computed + failed > 1:
            self.clock_fs += durations.moment_fs(computed + failed)
        if computed and failed:  # it has the tokens of the step before it
            self.clock_fs -= total_fs - durations.before_fs(computed)

    def _settle(self, request: Request) -> None:
        """Count a member's token-time up to now."""
        slots = self.slots_per_token * request.anchor - request.emptied_slots
        request.token_fs += slots * (self.busy_fs - request.settled_fs)
        request.token_fs += self.slots_per_token * (self.clock_fs - request.settled_clock_fs)
        request.settled_fs, request.settled_clock_fs = self.busy_fs, self.clock_fs

    def advance(self, steps: int, first_end_fs: int, end_fs: int) -> None:
        """Every member computed one token in each of `steps` steps, the first of which ended at `first_end_fs`, the last at `end_fs`.

        Members that joined since the set last computed have waited for others' steps in between: their first gap is their own.
        """
        for request in self._fresh.values():
            assert request.last_token_fs is not None  # a request joins when it has got a token
            request.other_gaps_fs.append(first_end_fs - request.last_token_fs)
            request.decode_spans.append((self.clock + 1, self.clock + 1))
        self._fresh.clear()
        self.clock += steps
        self.last_end_fs = end_fs

    def at(self, ahead: int, offset: int) -> dict[int, Request]:
        """Members, by admission order, that will have computed `offset` tokens and whole blocks in the step `ahead` steps from now."""
        return self._by_residue[(self.clock + ahead - offset) % self.block_size]

    def steps_at(self, offset: int, stop: int) -> list[int]:
        """The steps from now, in [1, stop), in which any member is `at` this offset."""
        size, buckets, now = self.block_size, self._by_residue, self.clock - offset
        return [step for step in range(1, stop) if buckets[(now + step) % size]]

    def needing_block(self, ahead: int = 0) -> list[Request]:
        """Members that need a new block in the step `ahead` steps from now, in running order."""
        bucket = self._by_residue[(self.clock + ahead) % self.block_size]
        return [bucket[order] for order in sorted(bucket)]

    def num_needing_block(self, ahead: int = 0) -> int:
        """How many members need a new block in that step."""
        return len(self._by_residue[(self.clock + ahead) % self.block_size])

    def steps_that_fit(self, free_blocks: int, first: int, limit: int) -> int:
        """How many of the steps `first, first + 1, …` ahead, at most `limit`, can be given blocks from `free_blocks`."""
        whole_turns = (
            min(free_blocks // self._size, limit // self.block_size) if self._size else limit // self.block_size
        )
        steps = whole_turns * self.block_size  # in block_size steps every member needs exactly one block
        free_blocks -= whole_turns * self._size
        while steps < limit:
            free_blocks -= self.num_needing_block(first + steps)
            if free_blocks < 0:
                break
            steps += 1
        return steps

    def steps_to_completion(self) -> int | None:
        """Steps until the next member is finished; None when there is no member."""
        while self._completions and not self._is_current(self._completions[0]):
            heappop(self._completions)
        return self._completions[0][0] - self.clock if self._completions else None

    def completed(self) -> list[Request]:
        """Members that are finished at this clock."""
        done: list[Request] = []
        while self.steps_to_completion() == 0:
            done.append(heappop(self._completions)[2])
        return done

    def _is_current(self, entry: tuple[int, int, Request]) -> bool:
        finish_clock, order, request = entry
        return request.decoding and request.finish_clock == finish_clock and request.order == order

    @staticmethod
    def _is_longest(entry: tuple[int, int, Request]) -> bool:
        anchor, _, request = entry
        return request.decoding and request.anchor == -anchor
