"""The seam between deciding and doing: what a step is, what it cost, and what it looked like.

`EngineCore.plan` returns a `StepPlan`; an `Executor` carries it out and answers with a `StepResult`; `EngineCore.commit`
takes the result. Nothing else passes between the core and the world that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from .batch_shape import BatchShape
from .clock import to_s
from .durations import Durations

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuMove:
    """A request that leaves a device's pool for the CPU executor, or comes back from it."""

    request_id: str
    computed_tokens: int
    """Tokens whose KV exists when it moves."""
    most_tokens: int
    """Tokens whose KV it has room for on the CPU: from there on nothing slides out of a window, and all are kept."""
    group_tables: tuple[tuple[int, ...], ...]
    """Its block tables on the device, one an attention group, in token order, up to `computed_tokens`; 0 stands for a block that is out
    of the group's window."""


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
    to_cpu: tuple[CpuMove, ...] = ()
    """Those of the swap-outs that go on on the CPU executor, until they are swapped in or have all their tokens."""
    from_cpu: tuple[CpuMove, ...] = ()
    """Those of the swap-ins that come from there; the tables are the ones that they come to have."""
    ended_on_cpu: tuple[str, ...] = ()
    """Those who went there and have ended since the previous plan, served there or waiting to come back. What they had there is free;
    their CPU blocks alone do not tell it, because who waits to come back gives up those that it needs no more.
    """
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
class Untold:
    """What became of blocks and sequences since the latest plan: when no other plan follows, nothing else tells an executor of it."""

    slid: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """As `StepPlan.slid`."""
    releases: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """As `StepPlan.releases`."""
    forks: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    """As `StepPlan.forks`: also of sequences that ended with the very token that they were forked with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomReport:
    """A step that ran out of memory: the engine takes it back and goes on smaller."""

    op: str
    """What was being allocated: a ledger line or an operator."""
    requested_bytes: int
    free_bytes: int


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What came of a plan: how long each step took, and what the model said. Never changed."""

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


def as_told(entries: Sequence[tuple[str, Sequence[T]]]) -> tuple[tuple[str, tuple[T, ...]], ...]:
    """`(request_id, items)` as plans tell them."""
    return tuple([(request_id, tuple(items)) for request_id, items in entries]) if entries else ()
