"""Departures: how requests leave the engine, for their clients and for the scheduler.

Both happen at once, unless steps are planned ahead (`lag`): then a client may have its answer while the scheduler does not know yet,
and what the request holds comes back later.
"""

from __future__ import annotations

from collections.abc import Iterable

from .admission import Rejection
from .draft import Draft
from .lag import Lag, ends_by_length
from .loads import Loading
from .log import Decisions
from .request import Outcome, Request, State
from .scheduler import Scheduler


class Departures:
    """Ends requests with an outcome and a reason, and gives back what they hold."""

    def __init__(self, scheduler: Scheduler, lag: Lag | None) -> None:
        self._scheduler = scheduler
        self._lag = lag
        self._longest = scheduler.config.max_model_len
        self.decisions = Decisions()
        """What was decided since the latest plan; the engine begins a new one with each. Rejections and blocks given back are put here."""
        self._ended: list[Request] = []

    def take_ended(self) -> list[Request]:
        """Requests that ended for their clients since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended

    # -- for client and scheduler at once -----------------------------------------------------------------------------

    def end(self, request: Request, outcome: Outcome, reason: str, now_fs: int) -> None:
        """A request that holds nothing any more has ended."""
        self._forget(request)
        self.tell(request, outcome, reason, now_fs)

    def retire(self, request: Request, now_fs: int) -> None:
        """Take a request out of the running set and give its blocks back."""
        self._scheduler.retire(request)
        self._give_back(request, now_fs)

    def reject(self, request: Request, rejection: Rejection, now_fs: int) -> None:
        """Turn a request away, with the time to come back."""
        request.finish_reason, request.retry_after_s = rejection.code, rejection.retry_after_s
        self.end(request, Outcome.REJECTED, rejection.reason, now_fs)
        self.decisions.rejected.append((request.request_id, rejection.reason))

    def fail(self, request: Request, reason: str, now_fs: int) -> None:
        """A running request cannot go on."""
        self.retire(request, now_fs)
        self.end(request, Outcome.FAILED, reason, now_fs)

    def displace(self, victim: Request, rejection: Rejection, now_fs: int) -> None:
        """Send a queued request away, in whose place a more important one has come."""
        if self._lag is None or not self._lag.busy:
            self._scheduler.waiting.discard(victim)
            self.reject(victim, rejection, now_fs)
            return
        victim.finish_reason, victim.retry_after_s = rejection.code, rejection.retry_after_s
        self.tell(victim, Outcome.REJECTED, rejection.reason, now_fs)
        self.decisions.rejected.append((victim.request_id, rejection.reason))
        self._lag.ended(victim, foreseen=False)

    def finish(self, request: Request, stopped: bool, now_fs: int) -> None:
        """A request has all its tokens; `stopped`: the model ended it."""
        scheduler, lag, spec = self._scheduler, self._lag, request.spec
        unheard = lag is not None
        if request.state is State.ON_CPU:  # beside the steps, but what is planned ahead does not know
            if lag is not None and lag.busy:
                lag.ended(request, foreseen=False)
            else:
                unheard = False
                assert scheduler.cpu_server is not None
                scheduler.cpu_server.free(request)
        elif lag is None:
            self.retire(request, now_fs)
        else:
            lag.ended(request, foreseen=not stopped and ends_by_length(request, self._longest))
        scheduler.drain.ended(now_fs, spec, request.num_output_tokens, others_wait=scheduler.num_waiting > 0)
        capped = (
            request.num_output_tokens >= (spec.max_tokens or spec.output_tokens + 1)
            or request.num_tokens >= self._longest
        )
        request.finish_reason = "length" if capped and not stopped else "stop"
        request.last_token_fs = now_fs
        (self.tell if unheard else self.end)(request, Outcome.FINISHED, f"{request.num_output_tokens} tokens", now_fs)

    # -- clients that leave -------------------------------------------------------------------------------------------

    def leave(self, request: Request, now_fs: int) -> None:
        """The client of a request leaves, and no step is under way that computes it."""
        scheduler = self._scheduler
        if request.state is State.WAITING:
            self._leave_queue(request)
        elif request.state is State.SWAPPED:
            scheduler.swapping.drop(request)
        elif request.state is State.ON_CPU:
            assert scheduler.cpu_server is not None
            scheduler.cpu_server.stop(request, now_fs)
            scheduler.cpu_server.free(request)
        elif request.state is State.LOADING:
            self._drop_loading(request, now_fs)
        else:
            self.retire(request, now_fs)
        self._end_left(request, now_fs)

    def _leave_queue(self, request: Request) -> None:
        """A waiting request goes, from the queue or from its family."""
        if request.spec.forking is None or not self._scheduler.families.drop(request):
            self._scheduler.waiting.discard(request)

    def leave_unseen(self, request: Request, now_fs: int) -> None:
        """The client of a request leaves; the next plan does not know of it."""
        assert self._lag is not None
        if request.state is State.ON_CPU:
            assert self._scheduler.cpu_server is not None
            self._scheduler.cpu_server.stop(request, now_fs)
        self.tell(request, request.outcome or Outcome.ABORTED, request.reason, now_fs)
        self._lag.ended(request, foreseen=False)

    def settle(self, left: Iterable[Request], draft: Draft, *, decoded: bool, failed: bool, now_fs: int) -> None:
        """Let go of the requests whose clients left during the step that is being committed. Their output of it is dropped, unless the
        next one is planned already. `decoded`: whether the decode set computed; `failed`: whether the step ran out of memory.
        """
        for request in left:
            if request.state is State.LOADING:
                self._drop_loading(request, now_fs)
                self._end_left(request, now_fs)
            elif self._lag is not None and not failed:
                self._leave_late(self._lag, draft, request, decoded, now_fs)
            else:
                draft.count_share(request)
                got_token = request.decoding and decoded and not failed
                self.retire(request, now_fs)
                request.num_tokens -= got_token  # the token of the last step was never delivered
                self._end_left(request, now_fs)

    def _leave_late(self, lag: Lag, draft: Draft, request: Request, decoded: bool, now_fs: int) -> None:
        """The next step is planned without knowing that the client left: the token of this one was in vain, and counts."""
        in_vain = int(request.decoding and decoded)
        share = draft.count_share(request)
        if share is not None and share.samples:
            request.num_tokens += 1
            in_vain = 1
        known = self._scheduler.decode.known(request)
        reached = known >= request.target_tokens and ends_by_length(request, self._longest)
        lag.ended(request, foreseen=reached, in_vain=in_vain)
        left_fs = now_fs if request.abort_fs is None else request.abort_fs
        self.tell(request, request.outcome or Outcome.ABORTED, request.reason, left_fs)

    def requeue(self, loading: Loading, now_fs: int) -> None:
        """A load has failed: its request waits again, and will be computed."""
        assert self._scheduler.offload is not None
        released = self._scheduler.offload.loads.give_up(loading, now_fs)
        self.decisions.released.append((loading.request.request_id, released))
        self._scheduler.waiting.put_back(loading.request)

    def _drop_loading(self, request: Request, now_fs: int) -> None:
        assert self._scheduler.offload is not None
        why = request.outcome.value if request.outcome else "aborted"
        released = self._scheduler.offload.loads.drop(request, why, now_fs)
        if released:
            self.decisions.released.append((request.request_id, released))

    def _end_left(self, request: Request, now_fs: int) -> None:
        ended_fs = now_fs if request.abort_fs is None else request.abort_fs
        self.end(request, request.outcome or Outcome.ABORTED, request.reason, ended_fs)

    # -- news that come late --------------------------------------------------------------------------------------------

    def discard_share(self, draft: Draft, request: Request) -> None:
        """What the step computed for a request that had ended is dropped."""
        assert self._lag is not None
        share = draft.count_share(request)
        if share is not None:
            self._lag.discarded_tokens += share.num_tokens

    def learn(self, request: Request, now_fs: int, *, holds: bool = True) -> None:
        """The scheduler hears of a request that has ended; what it `holds` comes back."""
        assert self._lag is not None
        scheduler = self._scheduler
        if not holds:
            pass
        elif scheduler.departing.pop(request.order, None) is not None:
            scheduler.departed()
            self._give_back(request, now_fs)
        elif request.state is State.WAITING:
            self._leave_queue(request)
        elif request.state is State.SWAPPED:
            scheduler.swapping.drop(request)
        elif request.state is State.LOADING:
            self._drop_loading(request, now_fs)
        elif request.state is State.ON_CPU:
            assert scheduler.cpu_server is not None
            scheduler.cpu_server.free(request)
        else:
            self.retire(request, now_fs)
        request.num_tokens -= self._lag.late.pop(request)
        self._forget(request)
        scheduler.num_unseen = self._lag.num_unseen

    def catch_up(self, now_fs: int) -> None:
        """Nothing can be planned ahead: let the scheduler know all that has happened."""
        for request in self._lag.catch_up() if self._lag is not None else ():
            self.learn(request, now_fs)

    def tell(self, request: Request, outcome: Outcome, reason: str, now_fs: int) -> None:
        """A request has ended for its client."""
        scheduler = self._scheduler
        request.outcome, request.reason, request.ended_fs = outcome, reason, now_fs
        if scheduler.requests.pop(request.request_id, None) is not None and request.first_token_fs is None:
            scheduler.backlog_tokens -= request.spec.input_tokens
        self._ended.append(request)

    def _forget(self, request: Request) -> None:
        """A request has ended for the scheduler."""
        families = self._scheduler.families
        copies = () if request.spec.forking is None else families.members(request.spec.sample_of)
        self._scheduler.holdings.forget_private(request, [copy for copy in copies if copy is not request])
        if request.spec.forking is not None:
            families.ended(request)
        request.state = State.ENDED

    def _give_back(self, request: Request, now_fs: int) -> None:
        why = request.outcome.value if request.outcome else "finished"
        released = self._scheduler.holdings.release(request, why, now_fs, reusable=False)
        self.decisions.released.append((request.request_id, released))
