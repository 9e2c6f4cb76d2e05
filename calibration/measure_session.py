"""One session of measuring: what is left of the passes over a design, until the budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .design import DesignPoint, pass_order
from .errors import CalibrationError, StepTooLargeError
from .step_log import Step, StepRun

if TYPE_CHECKING:
    from .rig import StepRig, Timed

MOST_SKIPPED = 0.25
"""If more than this share of the designed steps run out of memory, the range is too wide for the device."""
REFERENCE_EVERY = 8
SAVE_EVERY_S = 2.0
WARM_UP_S = 0.5
MOST_WARM_UP = 0.2
"""Share of a session that warming up may take; a step as large as any is run at least once."""
MOST_OVERRUN = 4.0
"""The first pass is finished even when the budget is spent, up to so many times the budget: without it nothing can be fitted."""


class Session:
    """One stretch of measuring: what is left of the passes, until the budget is spent."""

    def __init__(
        self,
        rig: StepRig,
        points: tuple[DesignPoint, ...],
        seed: int,
        before: StepRun | None,
        budget_s: float,
        started_s: float,
    ) -> None:
        """`before` is the run that is gone on with; `started_s` is when this session began, by `time.perf_counter`."""
        self._rig, self._points, self._seed, self._budget_s = rig, points, seed, budget_s
        self._steps = list(before.steps) if before else []
        self._number = 1 + max((step.session for step in self._steps), default=-1)
        spent_s = before.spent_s if before else 0.0
        self._started_s = started_s - spent_s
        self.skipped: dict[int, str] = (
            {one["point"]: one["why"] for one in before.document.get("skipped", ())} if before else {}
        )
        """Designed steps that ran out of memory, and what they lacked; they are not tried again."""
        self.clocks: list[dict[str, Any]] = list(before.document.get("clocks", ())) if before else []
        """What the driver said of a GPU's clocks after each reference step."""
        self._warm_until_s = spent_s + (budget_s - spent_s) * MOST_WARM_UP

    @property
    def steps(self) -> list[Step]:
        """What was timed so far, in earlier sessions too."""
        return self._steps

    @property
    def _spent_s(self) -> float:
        return time.perf_counter() - self._started_s

    def work(self, save: Callable[[], None], tell: Callable[[str], None]) -> None:
        """Measure and save. What was measured is saved also when something stops it.

        Raises: CalibrationError when the reference step, or too many others, run out of memory.
        """
        self._warm_up()
        try:
            saved_s = self._spent_s
            for count, (number, point) in enumerate(self._rest()):
                if self._spent_s >= self._budget_s * (1.0 if number else MOST_OVERRUN):
                    return
                if count % REFERENCE_EVERY == 0:
                    self._time(-1, self._points[0])
                    self._note_clocks()
                self._time(number, point)
                if self._spent_s - saved_s > SAVE_EVERY_S:
                    save()
                    saved_s = self._spent_s
                    tell(f"pass {number + 1}, {len(self._steps)} steps, {saved_s:.0f} of {self._budget_s:.0f} s")
        finally:
            save()

    def _warm_up(self) -> None:
        """The largest steps once, so that everything is loaded and compiled, then the reference for a while."""
        for point in self._points:
            if point.group == "corner" and point.point not in self.skipped:
                self._run(point)
                if self._spent_s > self._warm_until_s:
                    break
        until_s = min(self._spent_s + WARM_UP_S, self._warm_until_s)
        while self._spent_s < until_s:
            self._run(self._points[0])

    def _run(self, point: DesignPoint) -> Timed | None:
        """Run a step; None, and it is skipped from now on, when it runs out of memory."""
        try:
            return self._rig.run(point)
        except StepTooLargeError as error:
            if point.group == "reference":
                raise
            self.skipped[point.point] = str(error)
            if len(self.skipped) > MOST_SKIPPED * len(self._points):
                raise CalibrationError(
                    f"{len(self.skipped)} of {len(self._points)} designed steps ran out of memory, the last: {error}; lower "
                    "--max-num-batched-tokens, --max-num-seqs or --max-model-len"
                ) from error
            return None

    def _note_clocks(self) -> None:
        found = self._rig.clocks()
        if found is not None:
            self.clocks.append({"elapsed_s": round(self._spent_s, 3), **found})

    def _rest(self) -> Iterator[tuple[int, DesignPoint]]:
        """`(pass, point)` that were not timed yet, for ever."""
        done = {(step.pass_, step.point) for step in self._steps}
        number = max((step.pass_ for step in self._steps if step.pass_ >= 0), default=0)
        while True:
            for point in pass_order(self._points, self._seed, number):
                if (number, point.point) not in done and point.point not in self.skipped:
                    yield number, point
            number += 1

    def _time(self, number: int, point: DesignPoint) -> None:
        timed = self._run(point)
        if timed is None:
            return
        self._steps.append(
            Step(
                session=self._number,
                pass_=number,
                point=point.point,
                group=point.group,
                elapsed_s=self._spent_s,
                duration_us=timed.duration_us,
                shape=point.shape,
                workspace_bytes=timed.workspace_bytes,
                process_bytes=timed.process_bytes,
                device_bytes=timed.device_bytes,
                served_by=timed.served_by,
            )
        )
