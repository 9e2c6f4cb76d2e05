"""EngineCore: the whole engine, minus doing anything.

A world (simulated or real) feeds it arrivals and departures, asks for a plan, has it executed, and commits the result.
The core never sleeps, reads a clock or draws a random number; the same calls give the same decisions, always.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .admission import Displacement, Rejection, no_answer
from .audit import check_books
from .blocks import BlockPool
from .chains import KeyTable
from .config import EngineConfig
from .departures import Departures
from .draft import Draft
from .facts import Arrived, Committed, EngineFacts, ProgressError
from .groups import tables_of
from .lag import Lag
from .loads import Load
from .log import Decisions, DecisionSink
from .plan import ScheduledRequest, StepPlan, StepResult, as_told
from .policy import Policy, scheduling_policy
from .prefix import BlockKeys
from .pressure import Pressure
from .progress import charge_slots, count_shares, reached_end
from .request import Outcome, Request, RequestSpec, State
from .saves import Save
from .scheduler import Scheduler
from .stretch import log_rows, scheduled_in, shape_of, steps_alike


class EngineCore(EngineFacts):
    """Admission, scheduling and memory of one engine replica."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        policy: Policy | None = None,
        decision_sink: DecisionSink | None = None,
    ) -> None:
        self.config = config
        policy = scheduling_policy(config) if policy is None else policy
        self.pool = BlockPool(config.num_gpu_blocks, eviction=policy.eviction)
        self.tables = tables_of(self.pool, config)
        self._keys = KeyTable()
        self._admission = policy.admission(config)
        self._scheduler = Scheduler(config, self.tables, self._admission, policy)
        self._pressure = Pressure(self._scheduler, policy.ladder, swap=policy.swap and config.num_cpu_blocks > 0)
        self._offload = self._scheduler.offload
        self._lag = Lag(self._scheduler) if config.async_scheduling else None
        self._requests = self._scheduler.requests
        self._next_seq = 0
        self._sink = decision_sink
        self._slid: list[tuple[str, list[int]]] = []
        """What slid out of windows in the later steps of the latest plan."""
        self._plan: StepPlan | None = None
        self._draft: Draft | None = None
        self._leaving: list[Request] = []
        self._departures = Departures(self._scheduler, self._lag)
        self.swapped_out_blocks = 0
        self.swapped_in_blocks = 0
        """Blocks copied to and from the CPU pool so far."""

    def take_ended(self) -> list[Request]:
        """Requests that ended since the last call, in order."""
        return self._departures.take_ended()

    # -- arrivals and departures --------------------------------------------------------------------------------------

    def add(self, spec: RequestSpec, now_fs: int) -> Arrived:
        """A request arrives: it is queued, or rejected with a reason.

        Raises ValueError for a request id that is in the system already, ConfigError for what an admission policy may not answer.
        """
        if spec.request_id in self._requests:
            raise ValueError(f"request id {spec.request_id!r} is already in the system; ids must be unique")
        request = Request(
            spec,
            self._next_seq,
            now_fs,
            BlockKeys(spec, self.config.block_size, self._keys),
            self.tables.new(spec.request_id),
        )
        request.target_tokens = min(request.target_tokens, self.config.max_model_len)
        self._next_seq += 1
        said = self._admission.arrive(spec, self._scheduler.view_at(now_fs))
        if isinstance(said, Rejection):
            self._departures.reject(request, said, now_fs)
            return Arrived(request, may_change_plan=True, may_start=True)  # the log must show it at the right step
        if said is not None and not isinstance(said, Displacement):
            raise no_answer(said, spec)
        for victim_id, rejection in said.victims if said is not None else ():
            self._departures.displace(self._requests[victim_id], rejection, now_fs)
        self._requests[spec.request_id] = request
        self._scheduler.backlog_tokens += spec.input_tokens
        if self._lag is not None and self._lag.busy:
            became_head = self._lag.arrived(request)
        else:
            became_head = self._scheduler.enter(request)
        may_start = became_head and self._scheduler.num_slots_taken < self.config.max_num_seqs
        changes = may_start or said is not None or (became_head and self._pressure.watches_queue)
        return Arrived(request, changes, may_start)

    def abort(
        self, request_id: str, now_fs: int, outcome: Outcome = Outcome.ABORTED, reason: str = "the client went away"
    ) -> bool:
        """A client leaves, in whatever state its request is. False if the request has ended (or never was). The name of a request that
        forks stands for all of its sequences.

        The blocks of a request in a step under way return when the step is committed; its output of that step is dropped.
        """
        request = self._requests.get(request_id)
        if request is None:
            names = [member.request_id for member in self._scheduler.families.members(request_id)]
            if self._lag is not None:
                names += [each.request_id for each in self._lag.arrivals if each.spec.sample_of == request_id]
            left = [self.abort(each, now_fs, outcome, reason) for each in names]
            return any(left)
        if request.abort_fs is not None:
            return False
        request.outcome, request.reason = outcome, reason
        planned_ahead = self._lag is not None and self._lag.busy
        if planned_ahead and (request.state is not State.RUNNING or self._plan is None):
            self._departures.leave_unseen(request, now_fs)
        elif self._plan is not None and request.state in (State.RUNNING, State.LOADING):
            request.abort_fs = now_fs
            self._leaving.append(request)
        else:
            self._departures.leave(request, now_fs)
        return True

    # -- the step -------------------------------------------------------------------------------------------------

    def plan(self, now_fs: int, max_repeat: int | None = None) -> StepPlan | None:
        """Decide the next step, or a stretch of equal decode steps (at most `max_repeat`). None when there is nothing to do.

        Raises RuntimeError if a plan is out already, ProgressError if requests wait for ever.
        """
        if self._plan is not None:
            raise RuntimeError(f"step {self._plan.step} is under way; commit it before planning the next")
        if max_repeat is not None and max_repeat < 1:
            raise ValueError(f"max_repeat is {max_repeat}; a plan has at least 1 step")
        scheduler, lag = self._scheduler, self._lag
        after_pause = lag is not None and not lag.busy
        if lag is not None:
            lag.look_back(now_fs)
            self._hear_copies(now_fs, now_fs - scheduler.looks_back_fs)
        self.pool.tick(now_fs)
        self.wake(now_fs)
        completed = None if self._offload is None else self._offload.saves.take_completed()
        self._climb(now_fs)
        draft, after_pause = self._next_draft(now_fs, after_pause)
        saves: tuple[Save, ...] = ()
        loads: tuple[Load, ...] = ()
        if self._offload is not None and completed is not None:
            saves, loads = self._offload.begin(completed, blocks_come=draft.blocks_come)
            self._decisions.saved += [list(pairs) for _, pairs in saves]
            self._decisions.loaded += [(request_id, list(pairs)) for request_id, _, pairs in loads]
        if not (draft.shares or (draft.decode and len(scheduler.decode)) or saves or loads):
            self._assert_progress()
            return None
        decisions = self._decisions
        step, shape = scheduler.steps_done, shape_of(draft, scheduler, decisions)
        if scheduler.knobs.passes > 1:
            shape = replace(shape, passes=max(1, min(scheduler.knobs.passes, shape.num_tokens)))
        plan = StepPlan(
            step=step,
            repeat=self._repeat(draft, max_repeat, after_pause),
            start_fs=now_fs,
            shape=replace(shape, after_pause=True) if after_pause else shape,
            copies=tuple(decisions.copied),
            swap_outs=as_told(decisions.swapped_out),
            swap_ins=as_told(decisions.swapped_in),
            slid=as_told(self._slid),
            saves=saves,
            loads=loads,
            to_cpu=tuple(decisions.to_cpu),
            from_cpu=tuple(decisions.from_cpu),
            ended_on_cpu=scheduler.swapping.take_ended(),
            releases=as_told(decisions.released),
            forks=tuple(decisions.forked),
            admitted=tuple(decisions.admitted),
            preempted=tuple(decisions.preempted),
            scheduled=lambda ahead: self._scheduled(step, ahead),
        )
        self._plan, self._draft, self._slid = plan, draft, []
        if self._sink is not None:
            self._log(step, now_fs, draft.decode_blocks, decisions)
        self._departures.decisions = Decisions()
        for request in lag.planned(now_fs) if lag is not None else ():
            self._departures.learn(request, now_fs)
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now_fs: int) -> Committed:
        """Take the result of the plan that is out; for a stretch that was cut, of the steps that were done.

        Raises ValueError if it is another plan, or the result has no steps or more than the plan.
        """
        if plan is not self._plan or self._draft is None:
            raise ValueError(f"the plan of step {plan.step} is not the one under way")
        steps = result.steps
        if not 1 <= steps <= plan.repeat:
            raise ValueError(f"a result of {steps} steps for a plan of {plan.repeat}")
        scheduler, decode, draft, departures = self._scheduler, self._scheduler.decode, self._draft, self._departures
        computed = steps - (result.oom is not None)
        members = len(decode) if draft.decode and computed else 0
        written = decode.filled_slots + members * decode.slots_per_token
        usage, table_slots, emptied = self._leap(plan, result)
        total_fs = result.durations.total_fs
        written += charge_slots(scheduler, draft, computed > 0, total_fs)
        decode.passed(result.durations, total_fs, computed if members else 0, result.oom is not None)
        first_gap_fs = None
        if members:
            first_end_fs = plan.start_fs + result.durations.before_fs(1)
            first_gap_fs = first_end_fs - decode.last_end_fs
            decode.advance(computed, first_end_fs, plan.start_fs + result.durations.before_fs(computed))
        scheduler.steps_done += steps
        self._plan = self._draft = None
        if result.oom is not None:
            scheduler.take_back(draft, now_fs)
            draft.shares = {}
        if self._lag is None:
            self._hear_copies(now_fs, now_fs)
        lag = self._lag if result.oom is None else None
        if lag is not None:
            for request in lag.committed(plan.start_fs + result.durations.before_fs(steps - 1)):
                departures.discard_share(draft, request)
                departures.learn(request, now_fs)
        failed = result.oom is not None
        departures.settle(self._leaving, draft, decoded=members > 0, failed=failed, now_fs=now_fs)
        self._leaving = []
        count_shares(scheduler, draft, now_fs)
        if scheduler.families:
            scheduler.looks_back_fs = 0 if lag is None else lag.looks_back_fs(now_fs)
            self._decisions.note_forks(scheduler.families.after_step(result.forked, result.stopped, now_fs))
            scheduler.looks_back_fs = 0
        finished = reached_end(scheduler, result)
        for order in sorted(finished):
            departures.finish(finished[order], finished[order].request_id in result.stopped, now_fs)
        if result.oom is not None:
            self._catch_up(now_fs)  # what was planned ahead of a step that failed is void
        if plan.shape.computes:
            self._pressure.note_workspace(result.workspace_share)
        if (hopeless := self._pressure.after_step(result.oom, plan.shape)) is not None:
            departures.fail(*hopeless, now_fs)
        return Committed(
            steps, computed, usage, table_slots, emptied, written, members * decode.slots_per_token, first_gap_fs
        )

    def pass_fence(self, fence: int, now_fs: int, *, done: bool = True) -> None:
        """A copy that a plan began has ended, or failed (`done` is False: what it was to bring is computed instead). The next decision
        may differ because of it, so a stretch under way must be cut; while a plan is out nothing moves before its commit, and an engine
        that plans ahead hears of it when it hears of that step's other news.

        Raises KeyError for a fence that no copy under way has.
        """
        if self._offload is None or not self._offload.is_under_way(fence):
            raise KeyError(f"fence {fence} has passed, but no copy under way has it")
        self._offload.ended(fence, now_fs, done=done)
        if self._plan is None and (self._lag is None or not self._lag.busy):
            self._hear_copies(now_fs, now_fs)

    def wake(self, now_fs: int) -> None:
        """Time has passed for the CPU executor: who has all tokens there has finished. The next decision may differ."""
        server = self._scheduler.cpu_server
        for request in server.finished(now_fs) if server is not None and server.serving else ():
            assert request.last_token_fs is not None
            self._departures.finish(request, False, request.last_token_fs)

    def idled(self, duration_fs: int) -> None:
        """So much time has passed since `plan` answered that there was nothing to do, for the accounts of those who run."""
        decode = self._scheduler.decode
        for request in self._scheduler.running.values():
            slots = decode.slots_filled(request, decode.computed(request))
            request.token_fs += slots * duration_fs

    def close(self, now_fs: int) -> None:
        """The run is over: log what was decided after the last step."""
        if self._sink is not None and self._decisions.any:
            self._sink(self._decisions.entry(self.steps, []), now_fs)
        self._departures.decisions = Decisions()

    def check(self) -> None:
        """Verify the books. Raises IntegrityError naming the blocks or requests that are wrong."""
        known = self.num_unfinished
        if self._lag is not None:
            known += len(self._lag.late) - len(self._scheduler.departing) - len(self._lag.arrivals)
        check_books(self._scheduler, self._draft, known)

    # -- parts of a plan --------------------------------------------------------------------------------------------

    def _climb(self, now_fs: int) -> None:
        """Let the ladder react to what may be known."""
        climbed = self._pressure.climb(now_fs)
        if climbed is not None:
            moved, relief = climbed
            self._decisions.ladder += [(rung.action, "on" if on else "off") for rung, on in moved]
            self._note(relief, now_fs)

    def _next_draft(self, now_fs: int, after_pause: bool) -> tuple[Draft, bool]:
        """The next step, or a draft of nothing; and whether it follows on a pause, as it does when it cannot be planned ahead."""
        scheduler, lag = self._scheduler, self._lag
        while True:
            draft = scheduler.draft(now_fs)
            self._note(draft, now_fs)
            if draft.shares or (draft.decode and len(scheduler.decode)):
                return draft, after_pause
            if draft.changed_queue:
                continue
            if lag is None or not lag.busy:
                return draft, after_pause
            after_pause = True
            self._catch_up(now_fs)
            if scheduler.cpu_server is not None and scheduler.cpu_server.serving:
                self._climb(now_fs)  # whom the rung keeps on the CPU may come back to an idle device

    def _repeat(self, draft: Draft, max_repeat: int | None, after_pause: bool) -> int:
        """How often the drafted step is repeated."""
        room = None if max_repeat == 1 else self._pressure.blocks_until_change()
        lag, offload, taken = self._lag, self._offload, None
        if room is None or (lag is not None and (after_pause or lag.has_news)):
            return 1
        if offload is not None:
            if lag is not None and offload.has_news:
                return 1
            taken = offload.saves.blocks_until_next()
            if taken is None:
                return 1
        return steps_alike(draft, self._scheduler, room, taken, max_repeat)

    def _note(self, draft: Draft, now_fs: int) -> None:
        """Move the decisions of a draft to the log, and end what it found unservable."""
        self._decisions.note(draft)
        self._pressure.note_preemptions(len(draft.preempted))
        if draft.swap_outs or draft.swap_ins:
            self.swapped_out_blocks += sum(len(pairs) for _, pairs in draft.swap_outs)
            self.swapped_in_blocks += sum(len(pairs) for _, pairs in draft.swap_ins)
        for request, rejection in draft.turned_away:
            if request.ended_fs is None:
                self._departures.reject(request, rejection, now_fs)
            else:
                self._departures.learn(request, now_fs, holds=False)
        for request, reason in draft.unservable:
            if request.ended_fs is None:
                self._departures.end(request, Outcome.FAILED, reason, now_fs)
            else:
                self._departures.learn(request, now_fs, holds=False)

    def _hear_copies(self, now_fs: int, until_fs: int) -> None:
        """Let the tier know of the copies that had ended by `until_fs`."""
        for failed in () if self._offload is None else self._offload.hear(now_fs, until_fs):
            self._departures.requeue(failed, now_fs)

    def _catch_up(self, now_fs: int) -> None:
        """Nothing can be planned ahead, or what was is void: all that has happened is known."""
        self._departures.catch_up(now_fs)
        if self._lag is not None:
            self._decisions.note_forks(self._scheduler.families.learn_outcomes(now_fs))
            self._hear_copies(now_fs, now_fs)

    def _assert_progress(self) -> None:
        if self._offload is not None and self._offload.in_flight:
            return
        if self.wake_fs is None and self.num_waiting and not self.num_running and not self.pool.num_quarantined:
            head = (
                self._scheduler.swapping.swapped[0]
                if self._scheduler.swapping.swapped
                else self._scheduler.waiting.head()
            )
            assert head is not None
            raise ProgressError(
                f"{self.num_waiting} requests wait and none can start, though nothing runs: the first, {head.request_id}, has "
                f"{head.num_tokens} tokens, and {self.pool.num_free} of {self.pool.num_blocks} blocks are free"
            )

    def _scheduled(self, step: int, ahead: int) -> tuple[ScheduledRequest, ...]:
        """The requests of step `step + ahead`, with the tables they will have then.

        Raises RuntimeError if the plan that starts at `step` is not out any more, ValueError if it has no such step.
        """
        if self._draft is None or self._plan is None or self._plan.step != step:
            raise RuntimeError(f"the plan of step {step} has been committed: its tables may be gone")
        if not 0 <= ahead < self._plan.repeat:
            raise ValueError(f"step {ahead} of a plan of {self._plan.repeat} steps was asked for; they count from 0")
        return scheduled_in(ahead, self._draft, self._scheduler)

    # -- parts of a commit ------------------------------------------------------------------------------------------

    def _leap(
        self, plan: StepPlan, result: StepResult
    ) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...], tuple[int, ...]]:
        """Do the allocations of the later steps of a stretch, in the order in which single steps would have done them."""
        assert self._draft is not None
        scheduler, steps, before_fs = self._scheduler, result.steps, result.durations.before_fs
        slots_per_block = scheduler.decode.slots_per_block
        usage, emptied = [(0, self.pool.num_owned)], [0]
        table_slots = [scheduler.holdings.table_blocks * slots_per_block]
        took: dict[int, list[int]] = {}
        at, logged = 0, 1
        for at, slid, took, owned in scheduler.growth.through(steps, plan.start_fs, before_fs):
            usage.append((at, owned))
            table_slots.append(scheduler.holdings.table_blocks * slots_per_block)
            emptied.append(emptied[-1])
            if slid:
                self._slid += slid
                emptied[-1] += sum([len(blocks) for _, blocks in slid]) * slots_per_block
            if self._sink is not None:
                self._log_between(plan, logged, at, before_fs)
                self._log(plan.step + at, plan.start_fs + before_fs(at), took, Decisions(released=slid))
                logged = at + 1
        if self._sink is not None:
            self._log_between(plan, logged, steps, before_fs)
        if 0 < result.steps_computed < steps:  # the last step ran out of memory: what it took is taken back
            self._draft.decode_blocks = took if at == result.steps_computed else {}
        return tuple(usage), tuple(table_slots), tuple(emptied)

    def _log_between(self, plan: StepPlan, first: int, stop: int, before_fs: Callable[[int], int]) -> None:
        """Log the steps [first, stop) of a stretch, in which no table changes."""
        for ahead in range(first, stop):
            self._log(plan.step + ahead, plan.start_fs + before_fs(ahead), {}, Decisions())

    def _log(self, step: int, start_fs: int, grown: dict[int, list[int]], decisions: Decisions) -> None:
        assert self._sink is not None
        assert self._draft is not None
        self._sink(decisions.entry(step, log_rows(self._draft, self._scheduler, grown)), start_fs)
