"""One engine replica as a SimPy process: plan, execute, sleep, commit.

One event a stretch. A stretch under way is cut, at the end of the step in progress, when something happens that may change
the next decision. What clients do at the very moment a step ends is heard before the step is committed, whatever the order
in which the events were made: `Late` sees to that, and with it a stretch and its single steps see the same world.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import simpy
from simpy.events import NORMAL, EventPriority

from sim.core.engine import EngineCore
from sim.core.plan import Executor, StepPlan, StepResult
from sim.core.request import Outcome, Request, RequestSpec
from sim.results.recorder import Recorder

from .link import Link


class Late(simpy.Event):
    """A time-out that fires after everything else that happens at its time."""

    _PRIORITY = EventPriority(int(NORMAL) + 1)

    def __init__(self, env: simpy.Environment, delay_fs: int = 0) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        env.schedule(self, priority=self._PRIORITY, delay=delay_fs)


class Replica:
    """An engine, what executes its plans, and what records them. `serve` is its process."""

    def __init__(
        self,
        env: simpy.Environment,
        core: EngineCore,
        executor: Executor,
        recorder: Recorder,
        *,
        stepping: bool,
        check: bool,
        on_end: Callable[[Request], None],
        link: Callable[[Callable[[int, bool], None]], Link] | None = None,
    ) -> None:
        self.core = core
        self._env = env
        self._executor = executor
        self._recorder = recorder
        self._max_repeat = 1 if stepping else None
        self._check = check
        self._may_wake = core.may_wake
        self._on_end = on_end
        self._link = None if link is None else link(self._pass_fence)
        self._sleeping = False
        self._under_way: tuple[StepPlan, StepResult] | None = None
        self._idle: simpy.Event | None = None
        self._idle_since_fs: int | None = None
        self._alarm_fs: int | None = None
        self._process = env.process(self.serve())

    @property
    def num_unfinished(self) -> int:
        """Requests in the system."""
        return self.core.num_unfinished

    @property
    def num_owned_blocks(self) -> int:
        """KV blocks in use in the step in progress, however long the stretch it belongs to."""
        if self._under_way is None:
            return self.core.pool.num_owned
        plan, result = self._under_way
        return self.core.owned_blocks_in(result.durations.started_by(self._now_fs - plan.start_fs) - 1)

    @property
    def _now_fs(self) -> int:
        return int(self._env.now)

    def submit(self, spec: RequestSpec) -> None:
        """A client sends a request."""
        arrived = self.core.add(spec, self._now_fs)
        self._recorder.arrived(arrived, self.core)
        self._after_event(nudge=arrived.may_change_plan)

    def abort(self, request_id: str, outcome: Outcome, reason: str) -> None:
        """A client gives up on a request; nothing happens if it has ended."""
        self._account_idle()
        if self.core.abort(request_id, self._now_fs, outcome, reason):
            self._after_event(nudge=True)

    def serve(self) -> Generator[simpy.Event, Any, None]:
        """The engine's loop; it never ends, it only runs out of events."""
        core = self.core
        while True:
            plan = core.plan(self._now_fs, self._max_repeat)
            self._after_event(nudge=False)
            if plan is None:
                yield from self._wait_for_work()
                continue
            if self._link is not None:
                self._link.begin(plan)
            self._recorder.planned(plan, core)
            result = yield from self._sleep_through(plan, self._executor.execute(plan))
            committed = core.commit(plan, result, self._now_fs)
            self._recorder.committed(plan, result, committed, core)
            self._after_event(nudge=False)

    def _wait_for_work(self) -> Generator[simpy.Event, Any, None]:
        """Nothing can be done now; requests may still hold blocks, while theirs or others are copied."""
        self._idle_since_fs = self._now_fs
        self._idle = self._env.event()
        yield self._idle
        self._idle = None
        yield Late(self._env)  # others may arrive at the same moment
        self._account_idle()
        self._idle_since_fs = None

    def _account_idle(self) -> None:
        """Account for the time without a step up to now, before anything changes what is held."""
        if self._idle_since_fs is None or not self.core.pool.num_owned:
            return
        span_fs = self._now_fs - self._idle_since_fs
        self._idle_since_fs = self._now_fs
        self._recorder.idled(span_fs, *self.core.idle_holdings)
        self.core.idled(span_fs)

    def _set_alarm(self) -> None:
        """See to it that the core is woken when it wants to be."""
        wake_fs = self.core.next_wake_fs(self._now_fs)
        if wake_fs is not None and wake_fs != self._alarm_fs:
            self._alarm_fs = wake_fs
            alarm = self._env.timeout(wake_fs - self._now_fs)
            alarm.callbacks.append(self._ring)

    def _ring(self, alarm: simpy.Event) -> None:
        self._account_idle()
        self.core.wake(self._now_fs)
        self._after_event(nudge=True)

    def _pass_fence(self, fence: int, done: bool) -> None:
        """A copy has ended."""
        self._account_idle()
        self.core.pass_fence(fence, self._now_fs, done=done)
        self._after_event(nudge=True)

    def _sleep_through(self, plan: StepPlan, result: StepResult) -> Generator[simpy.Event, Any, StepResult]:
        """Let the steps of a plan pass; returns the result of those that did."""
        env = self._env
        self._sleeping, self._under_way = True, (plan, result)
        try:
            yield Late(env, result.durations.total_fs)
        except simpy.Interrupt:
            result = result.cut(result.durations.started_by(self._now_fs - plan.start_fs))
            yield Late(env, plan.start_fs + result.durations.total_fs - self._now_fs)
        self._sleeping, self._under_way = False, None
        return result

    def _after_event(self, *, nudge: bool) -> None:
        """Pass on who ended, verify the books if asked to, and let the loop know if its next decision may differ."""
        for request in self.core.take_ended():
            self._recorder.ended(request, self._now_fs, self.core)
            self._on_end(request)
        if self._check:
            self.core.check()
        if self._may_wake:
            self._set_alarm()
        if not nudge:
            return
        if self._idle is not None and not self._idle.triggered:
            self._idle.succeed()
        elif self._sleeping:
            self._sleeping = False
            self._process.interrupt()
