"""Asynchronous scheduling: what the engine does not know yet when it plans the next step.

An engine that plans step k+1 while step k runs decides with what was known when step k started: the results of the steps before
it, and of step k only what is certain (how many tokens it computes, and who reaches a length limit in it; which token was
sampled does not matter here, a placeholder stands for it on the device). kvtwin calls `plan` when step k is over, so the news of
step k are kept from the plan instead:

* who arrived during step k is not in the queue yet;
* who ended unforeseen in step k (a stop token, a client that left) is still planned for, and computes tokens for nothing;
* a copy to or from the CPU prefix tier that ended during step k is still under way;
* who reached its length in step k is not, but its slot and its blocks are still taken: they come back with step k+1.

When nothing can be planned that way, the engine waits for step k, learns the news, and plans with nothing under way.
Source: vLLM V1 `--async-scheduling` (engine-policies §1.1.6).
"""

from __future__ import annotations

from .request import Request, State
from .scheduler import Scheduler
from .waiting import FcfsQueue


class Lag:
    """The news of the step under way, and when they become known."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.arrivals: list[Request] = []
        """Requests that will join the queue, in order of arrival."""
        self.late: dict[Request, int] = {}
        """Requests that ended for their client and not yet for the scheduler, with the tokens they were given in vain (0 or 1)."""
        self._seen_fs: int | None = None
        """Up to when the next plan may look: the start of the latest step. None when nothing was under way."""
        self.discarded_tokens = 0
        """Tokens computed for requests that had ended."""

    @property
    def busy(self) -> bool:
        """Whether a step is, or was until just now, under way."""
        return self._seen_fs is not None

    @property
    def num_unseen(self) -> int:
        """By how much more requests wait than the queues hold."""
        return len(self.arrivals) - sum(request.state in (State.WAITING, State.SWAPPED) for request in self.late)

    @property
    def leaves_order(self) -> bool:
        """Whether those who arrive now stand behind others whatever they are."""
        waiting = self._scheduler.waiting
        return isinstance(waiting, FcfsQueue) and len(waiting) > 0

    @property
    def has_news(self) -> bool:
        """Whether the next plan may differ from the one after it for a reason that is known already."""
        return bool(self.late or (self.arrivals and not self.leaves_order))

    def arrived(self, request: Request) -> bool:
        """Keep an arrival from the next plan; True if it may be the head of the queue once it is known."""
        behind = self.leaves_order or (isinstance(self._scheduler.waiting, FcfsQueue) and bool(self.arrivals))
        self.arrivals.append(request)
        self._scheduler.num_unseen = self.num_unseen
        return not behind

    def ended(self, request: Request, *, foreseen: bool, in_vain: int = 0) -> None:
        """A request has ended for its client. One that runs goes on as if it had not; if that was `foreseen`, as far as it holds things."""
        scheduler = self._scheduler
        self.late[request] = in_vain
        if request.state is not State.RUNNING:
            scheduler.num_unseen = self.num_unseen
        elif foreseen:
            scheduler.retire(request)
            scheduler.departing[request.order] = request
        elif request.decoding:
            scheduler.decode.leave(request)
            scheduler.catching_up[request.order] = request
            scheduler.catching_up = dict(sorted(scheduler.catching_up.items()))

    def looks_back_fs(self, now_fs: int) -> int:
        """How long ago what is known when the next step is planned was known."""
        return 0 if self._seen_fs is None else now_fs - self._seen_fs

    def look_back(self, now_fs: int) -> None:
        """A plan is to be made: show what it may see."""
        self._scheduler.num_unseen = 0
        self._scheduler.looks_back_fs = self.looks_back_fs(now_fs)

    def planned(self, start_fs: int) -> list[Request]:
        """A plan has been made: the news of the step before it are known. Returns those of `late` that take no part in the plan."""
        self._enter(self.arrivals)
        self._seen_fs = start_fs
        self._scheduler.looks_back_fs = 0
        return [request for request in self.late if request.state is not State.RUNNING]

    def committed(self, last_step_fs: int) -> list[Request]:
        """Steps are done, the last of which started at `last_step_fs`: the plan of that one knew who had arrived until then, and has queued
        them, before anything came of the step. Returns those of `late` whom the next plan will know of.
        """
        self._seen_fs = last_step_fs
        self._enter([request for request in self.arrivals if request.arrival_fs <= last_step_fs])
        return [request for request in self.late if request.state is State.RUNNING]

    def catch_up(self) -> list[Request]:
        """Nothing is under way any more: all that has happened is known. Returns everybody of `late`."""
        self._seen_fs = None
        self._scheduler.looks_back_fs = 0
        self._enter(self.arrivals)
        return list(self.late)

    def _enter(self, arrivals: list[Request]) -> None:
        for request in arrivals:
            self._scheduler.enter(request)
        self.arrivals = self.arrivals[len(arrivals) :]
        self._scheduler.num_unseen = self.num_unseen


def ends_by_length(request: Request, max_model_len: int) -> bool:
    """Whether a request that reached its target was sure to: a length limit ended it, and not, unforeseen, the model."""
    spec = request.spec
    limited = request.target_tokens < spec.input_tokens + spec.output_tokens  # by whichever limit
    return limited or spec.max_tokens == spec.output_tokens or request.target_tokens == max_model_len
