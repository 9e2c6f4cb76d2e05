"""The seam between deciding and doing: what a step is, what it cost, and what it looked like.

`EngineCore.plan` returns a `StepPlan`; an `Executor` carries it out and answers with a `StepResult`; `EngineCore.commit`
takes the result. Nothing else passes between the core and the world that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from .clock import to_s


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What a cost model needs to know about the work of one step; no identities, only sizes."""

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


@dataclass(frozen=True, slots=True)
class Segment:
    """`steps` consecutive step durations in arithmetic progression: `first_fs + i * growth_fs` for i in [0, steps)."""

    steps: int
    first_fs: int
    growth_fs: int = 0

    def total_fs(self, steps: int) -> int:
        """Sum of the first `steps` durations."""
        return steps * self.first_fs + self.growth_fs * (steps * (steps - 1) // 2)

    def moment_fs(self, steps: int) -> int:
        """Sum of `i * duration_i` over the first `steps` durations."""
        pairs = steps * (steps - 1) // 2
        squares = (steps - 1) * steps * (2 * steps - 1) // 6
        return self.first_fs * pairs + self.growth_fs * squares


@dataclass(frozen=True, slots=True)
class Durations:
    """The durations of the consecutive steps of a stretch, kept in closed form. Steps are numbered from 0."""

    segments: tuple[Segment, ...]

    @classmethod
    def one(cls, duration_fs: int) -> Durations:
        """A single step."""
        return cls((Segment(1, duration_fs),))

    @classmethod
    def affine(cls, steps: int, first_fs: int, growth_fs: int) -> Durations:
        """`steps` steps, each `growth_fs` longer than the one before."""
        return cls((Segment(steps, first_fs, growth_fs),))

    @classmethod
    def measured(cls, durations_fs: Sequence[int]) -> Durations:
        """Steps with durations that were measured one by one."""
        return cls(tuple(Segment(1, duration_fs) for duration_fs in durations_fs))

    @property
    def steps(self) -> int:
        """How many steps there are."""
        if len(self.segments) == 1:
            return self.segments[0].steps
        return sum(segment.steps for segment in self.segments)

    @property
    def total_fs(self) -> int:
        """Duration of the whole stretch."""
        return sum(segment.total_fs(segment.steps) for segment in self.segments)

    def before_fs(self, step: int) -> int:
        """Time from the start of the stretch to the start of `step` (equally: to the end of `step - 1`)."""
        if len(self.segments) == 1:
            return self.segments[0].total_fs(step)
        total = 0
        for segment in self.segments:
            if step <= segment.steps:
                return total + segment.total_fs(step)
            total += segment.total_fs(segment.steps)
            step -= segment.steps
        return total

    def moment_fs(self, step: int) -> int:
        """Sum of `i * duration_i` over steps i in [0, step)."""
        if len(self.segments) == 1:
            return self.segments[0].moment_fs(step)
        total = done = 0
        for segment in self.segments:
            taken = min(step - done, segment.steps)
            total += segment.moment_fs(taken) + done * segment.total_fs(taken)
            done += taken
            if done == step:
                break
        return total

    def started_by(self, elapsed_fs: int) -> int:
        """Number of steps begun before `elapsed_fs`: the step in progress then is the last that counts (at least 1).

        A step occupies the half-open interval `(start, end]`: what happens at the very end of a step belongs to it.
        """
        low, high = 1, self.steps
        while low < high:
            middle = (low + high) // 2
            if self.before_fs(middle) >= elapsed_fs:
                high = middle
            else:
                low = middle + 1
        return low

    def without_first(self) -> Durations:
        """All steps but the first."""
        head, *rest = self.segments
        if head.steps == 1:
            return Durations(tuple(rest))
        return Durations((Segment(head.steps - 1, head.first_fs + head.growth_fs, head.growth_fs), *rest))

    def prefix(self, steps: int) -> Durations:
        """The first `steps` steps."""
        kept: list[Segment] = []
        for segment in self.segments:
            if steps <= 0:
                break
            taken = min(steps, segment.steps)
            kept.append(Segment(taken, segment.first_fs, segment.growth_fs))
            steps -= taken
        return Durations(tuple(kept))


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of one step."""

    request_id: str
    num_tokens: int
    """Tokens computed in this step."""
    context_tokens: int
    """Tokens whose KV exists before this step."""
    block_table: tuple[int, ...]
    """Every block the step may read or write, in token order; 0 stands for a block that slid out of the window."""
    samples: bool
    """True when the step computes the request's last known token, so that a new one is sampled from it."""
    group_tables: tuple[tuple[int, ...], ...] = ()
    """Of a model with several attention groups the table of each, in the order of `EngineConfig.kv_groups`; `block_table` is the first.
    Empty for a model with one."""


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """One step, or `repeat` equal decode steps, decided; everything an executor must do is in here. A step that computes nothing
    (`shape.num_tokens` is 0) only begins copies and takes no time.

    The blocks of the first step are allocated when the plan is made. Those of later steps of a stretch are allocated
    by `commit`, for the steps that were really done; an executor that runs them asks `scheduled(step)` for the table
    that step will see, which is exact because nothing else touches the pool while a plan is out.
    """

    step: int
    """Number of the first step, counted from 0 over the engine's life."""
    repeat: int
    """How many times the decode step is repeated; 1 for every step that is not a pure decode."""
    start_fs: int
    shape: BatchShape
    """Sizes of the first step; each repetition adds `decode_seqs` to `decode_context_tokens` and 1 to `decode_max_context_tokens`."""
    copies: tuple[tuple[int, int], ...] = ()
    """Block copies `(source, destination)` that must be done before anything is written."""
    swap_outs: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = ()
    """`(request_id, (device block, CPU block) pairs)` to save to the CPU pool before anything else is done."""
    swap_ins: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = ()
    """`(request_id, (CPU block, device block) pairs)` to restore after the swap-outs and before anything is computed."""
    slid: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """`(request_id, block_ids)` that slid out of attention windows in the later steps of the previous plan's stretch, in order: the tables
    of those steps show NO_BLOCK in their place, and others may have been given them since."""
    saves: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """`(fence, (device block, CPU block) pairs)` to begin to save to the CPU prefix tier, after all earlier steps; the core hears when
    they are saved (`EngineCore.pass_fence`), and until then rewrites neither end."""
    loads: tuple[tuple[str, int, tuple[tuple[int, int], ...]], ...] = ()
    """`(request_id, fence, (CPU block, device block) pairs)` to begin to load from it; nobody uses the blocks before the core has heard."""
    to_cpu: tuple[str, ...] = ()
    """Requests among the swap-outs that go on on the CPU executor, until they are swapped in or have all their tokens."""
    releases: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """`(request_id, block_ids)` given back since the previous plan."""
    forks: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    """`(child, source, blocks)`: from this plan on the child's tokens are the source's, as they were after the previous plan, and
    `blocks` is the table that they share; empty if the child waits for blocks of its own. What the child held before is the first that
    it gives back in `releases`."""
    admitted: tuple[str, ...] = ()
    """Requests that start (or start again) with this plan."""
    preempted: tuple[str, ...] = ()
    """Requests that lost their blocks to it."""
    scheduled: Callable[[int], tuple[ScheduledRequest, ...]] = field(repr=False)
    """`scheduled(i)` for i in [0, repeat): the requests of step `step + i`, in running order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomReport:
    """A step that ran out of memory: the engine takes it back and goes on smaller."""

    op: str
    """What was being allocated: a ledger line or an operator."""
    requested_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What came of a plan: how long each step took, and what the model said."""

    durations: Durations
    """One duration a step that was done; fewer than `plan.repeat` when the stretch was cut."""
    stopped: frozenset[str] = frozenset()
    """Requests whose last sampled token ended the sequence (end-of-sequence, stop string)."""
    forked: Mapping[str, str] | None = None
    """Child to source: sequences that go on, after the last step, as copies of another one of their request (beam search). None when
    nobody looked at scores: then the requests' own fate holds."""
    tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Sampled token ids a request, where a real model ran; empty in a simulation."""

    workspace_share: float | None = None
    """Share of the memory left for steps that the last of them needed, where the executor knows."""
    oom: OomReport | None = None
    """Set when the last of the steps failed for lack of memory: it took its time and computed nothing."""

    @property
    def steps(self) -> int:
        """Steps done, one that ran out of memory included."""
        return self.durations.steps

    @property
    def steps_computed(self) -> int:
        """Steps whose tokens count."""
        return self.steps - (self.oom is not None)

    @property
    def duration_s(self) -> float:
        """Duration of all steps done, in seconds."""
        return to_s(self.durations.total_fs)

    def cut(self, steps: int) -> StepResult:
        """The result of a stretch that was ended after `steps` steps."""
        oom = self.oom if steps == self.steps else None
        return StepResult(
            durations=self.durations.prefix(steps),
            stopped=self.stopped,
            forked=self.forked,
            tokens=self.tokens,
            workspace_share=self.workspace_share,
            oom=oom,
        )


class Executor(Protocol):
    """Carries out a plan: a cost model that prices it, or a device that runs it."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Do (or price) every step of `plan`; a stretch of k steps gives k durations."""
        ...
