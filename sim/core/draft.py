"""The decisions of one step while they are being made."""

from __future__ import annotations

from dataclasses import dataclass, field

from .admission import Rejection
from .plan import CpuMove
from .request import Request


@dataclass(slots=True)
class Share:
    """What one request that is not in the decode set computes in this step."""

    request: Request
    num_tokens: int
    context_tokens: int
    new_blocks: list[int]
    """Blocks that joined its table for this step, prefix hits included."""

    @property
    def samples(self) -> bool:
        """Whether the request's last known token is computed."""
        return self.context_tokens + self.num_tokens == self.request.num_tokens

    def count(self) -> None:
        """Its tokens have been computed."""
        request, end = self.request, self.context_tokens + self.num_tokens
        request.recomputed_tokens += max(0, min(end, request.computed_high) - self.context_tokens)
        request.computed_high = max(request.computed_high, end)
        request.num_computed_tokens = end


@dataclass(slots=True)
class Draft:
    """A step in the making. Blocks are taken and given back as it grows; counts of tokens move when it is committed."""

    budget: int
    """Tokens that may still be scheduled."""
    budget_below_guard: int = 1 << 62
    """Tokens of prompts that requests below the ladder's guard may still take."""
    decode: bool = True
    """Whether the decode set computes in this step."""
    decode_blocks: dict[int, list[int]] = field(default_factory=dict)
    """New blocks of decode-set members, by admission order."""
    shares: dict[int, Share] = field(default_factory=dict)
    """Everything else that is scheduled, by admission order."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    uncopied: dict[int, int] = field(default_factory=dict)
    """By target, the sources of copies that were taken back with what their requests were given: what they have computed lies there."""
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    """Running requests that lost their blocks, swapped out or not."""
    swap_outs: list[tuple[str, list[tuple[int, int]]]] = field(default_factory=list)
    """`(request_id, (device block, CPU block) pairs)` to save before anything is written."""
    swap_ins: list[tuple[str, list[tuple[int, int]]]] = field(default_factory=list)
    """`(request_id, (CPU block, device block) pairs)` to restore before they are read."""
    to_cpu: list[CpuMove] = field(default_factory=list)
    from_cpu: list[CpuMove] = field(default_factory=list)
    """Requests that go on on the CPU executor, and those that come back."""
    unservable: list[tuple[Request, str]] = field(default_factory=list)
    """Requests that outgrew the whole pool, with the reason."""
    turned_away: list[tuple[Request, Rejection]] = field(default_factory=list)
    """Queued requests that the admission policy rejected when their turn came."""
    released: list[tuple[str, list[int]]] = field(default_factory=list)
    resting: frozenset[int] = frozenset()
    """Running requests that take no part in the step, by admission order."""
    decodes_rest: bool = False
    """Whether decodes are among them, so that the next step has others."""
    prompt_budget: int = 1 << 62
    """Prompt tokens that the step may still take."""
    prompts_left: int = 1 << 62
    """Prompts that it may still take."""
    turn_left: int = 0
    """Steps, this one included, that belong to the decodes whoever comes."""
    blocks_come: bool = False
    """Whether a running request was left out because the blocks it lacks come back with the step under way, or when they are saved."""

    @property
    def short(self) -> bool:
        """Whether running requests lacked blocks: nobody new may take any."""
        return bool(self.preempted) or self.blocks_come

    @property
    def changed_queue(self) -> bool:
        """Whether somebody left the running set or the queue, so that a second look may find something to do."""
        return bool(self.preempted or self.unservable or self.turned_away)

    def count_share(self, request: Request) -> Share | None:
        """A request that has left: its share, if it has one, was computed all the same, and is no longer part of the step."""
        share = self.shares.pop(request.order, None)
        if share is not None:
            share.count()
        return share
