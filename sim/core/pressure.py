"""What the engine does about pressure: climb the ladder before a step, learn from a step that ran out of memory."""

from __future__ import annotations

from .batch_shape import BatchShape
from .config import ConfigError
from .draft import Draft
from .ladder import Ladder
from .plan import OomReport
from .relief import cap_output, pause_running, truncate_context
from .request import Request
from .rungs import LadderConfig, Rung, check_ladder
from .scheduler import Scheduler
from .shedding import shed

_STEPS_TO_RECOVER = 16
"""Good steps after which the token cap that an out-of-memory step left behind doubles."""


class Pressure:
    """Turns the scheduler's knobs. Without a ladder only out-of-memory steps move anything."""

    def __init__(self, scheduler: Scheduler, ladder: LadderConfig | None, *, swap: bool) -> None:
        self._scheduler = scheduler
        self._ladder: Ladder | None = None
        if ladder is not None:
            check_ladder(ladder, swap=swap, tier=scheduler.offload is not None, cpu=scheduler.cpu_server is not None)
            self._ladder = Ladder(ladder, scheduler.knobs)
        self._ooms_in_a_row = 0
        self._steps_since_oom = 0
        self.oom_events = 0
        """Steps that ran out of memory so far."""

    @property
    def watches_queue(self) -> bool:
        """Whether a request that merely waits may change a decision."""
        return self._ladder is not None

    @property
    def watches_workspace(self) -> bool:
        """Whether a decision depends on how much memory steps need."""
        return self._ladder is not None and self._ladder.watches_workspace

    def note_workspace(self, share: float | None) -> None:
        """The latest step needed this share of the workspace. Raises ConfigError if the ladder must know and nobody does."""
        if not self.watches_workspace:
            return
        assert self._ladder is not None
        if share is None:
            raise ConfigError(
                "a rung of the ladder has the signal workspace, but this executor does not say what its steps need: it takes a simulated "
                "device with a memory limit"
            )
        self._ladder.workspace_share = share

    def cpu_held_until_fs(self) -> int | None:
        """Until when those on the CPU executor stay there at least; None if the rung is off."""
        return None if self._ladder is None else self._ladder.holds_until_fs("run_on_cpu")

    def note_preemptions(self, count: int) -> None:
        """So many running requests have just lost their blocks."""
        if self._ladder is not None:
            for _ in range(count):
                self._ladder.note_preemption(self._scheduler.decode.clock)

    def blocks_until_change(self) -> int | None:
        """Blocks that decoding may take before a rung could move; None when every step must be asked."""
        if self._scheduler.token_cap is not None:
            return None
        if self._ladder is None:
            return self._scheduler.pool.num_free
        return self._ladder.blocks_until_change(self._scheduler.view)

    def climb(self, now_fs: int) -> tuple[list[tuple[Rung, bool]], Draft] | None:
        """Let the ladder react to the state before a step. Returns the rungs that moved, and what they took from running requests, and
        whom they sent away; None without a ladder.
        """
        if self._ladder is None:
            return None
        scheduler, relief = self._scheduler, Draft(budget=0)
        changes = self._ladder.update(scheduler.view_at(now_fs))
        for rung, on in changes:
            if rung.action == "drop_cache" and on:
                scheduler.pool.drop_cached()
            elif rung.action == "offload_cache":
                assert scheduler.offload is not None  # `check_ladder`
                scheduler.offload.saves.save_all = on
            elif rung.action == "run_on_cpu" and not on:
                assert scheduler.cpu_server is not None  # `check_ladder`
                scheduler.cpu_server.give_back(now_fs)
        for rung in self._ladder.active:
            if rung.action in ("pause", "swap_out"):
                pause_running(scheduler, rung.value, rung.action, relief, now_fs)
            elif rung.action == "run_on_cpu":
                assert scheduler.cpu_server is not None  # `check_ladder`
                scheduler.cpu_server.relieve(rung.value, relief, now_fs)
            elif rung.action in ("cap_running", "truncate"):
                self._lighten(rung, relief, now_fs)
        shed(scheduler, relief, scheduler.view.now_fs)
        return changes, relief

    def after_step(self, oom: OomReport | None, shape: BatchShape) -> tuple[Request, str] | None:
        """After a step that ran out of memory, go on with half its tokens; if that fails too, say who must end, and why.

        That is the running request that asks for most. After 16 good steps the cap doubles, until it is gone.
        """
        scheduler = self._scheduler
        if oom is None:
            self._recover()
            return None
        self.oom_events += 1
        self._ooms_in_a_row += 1
        self._steps_since_oom = 0
        if self._ladder is not None:
            self._ladder.note_oom()
        scheduler.token_cap = max(1, shape.num_tokens // 2)
        if self._ooms_in_a_row < 2 or not scheduler.running:
            return None
        victim = max(scheduler.running.values(), key=self._claim)
        return victim, (
            f"out of memory in {oom.op}: {oom.requested_bytes} bytes wanted, {oom.free_bytes} free, "
            f"also after the step was cut to {shape.num_tokens} tokens"
        )

    def _recover(self) -> None:
        scheduler = self._scheduler
        self._ooms_in_a_row = 0
        self._steps_since_oom += 1
        if scheduler.token_cap is not None and self._steps_since_oom % _STEPS_TO_RECOVER == 0:
            scheduler.token_cap *= 2
            if scheduler.token_cap >= scheduler.config.max_num_batched_tokens:
                scheduler.token_cap = None

    def _claim(self, request: Request) -> tuple[int, int, int]:
        """What a request asks of the next step; ties by how unimportant, then how recent it is."""
        missing = self._scheduler.decode.known(request) - self._scheduler.decode.computed(request)
        return missing, request.spec.priority, request.order

    def _lighten(self, rung: Rung, relief: Draft, now_fs: int) -> None:
        scheduler = self._scheduler
        for request in list(scheduler.running.values()):
            if scheduler.knobs.spares(request.spec.priority):
                continue
            if rung.action == "cap_running":
                cap_output(scheduler, request, int(rung.value), rung.action)
            elif blocks := truncate_context(scheduler, request, int(rung.value), now_fs):
                relief.released.append((request.request_id, blocks))
