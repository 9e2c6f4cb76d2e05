"""The degradation ladder: explicit, reversible steps that meet pressure before it becomes a failure.

`Ladder` turns rungs on and off as pressure comes and goes; `Knobs` are what it turns. What rungs there are is in `rungs`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .clock import to_fs
from .rungs import SECONDS, LadderConfig, Rung
from .view import EngineView


@dataclass(slots=True)
class Knobs:
    """What the ladder has turned: the scheduler obeys these, whoever turned them."""

    reuse: bool = True
    admit_below_guard: bool = True
    """Off: nobody below the guard starts or comes back while anything runs."""
    step_share: float = 1.0
    """Share of the token budget a step may use."""
    passes: int = 1
    """Forward passes of a step."""
    cap_new: int | None = None
    """Output tokens that a request below the guard may produce, if it starts now."""
    shed_after_s: float | None = None
    """Requests below the guard that have waited this long are sent away."""
    guard_priority: int = 0

    def spares(self, priority: int) -> bool:
        """Whether a request of this priority is never touched."""
        return priority <= self.guard_priority


@dataclass(slots=True)
class _State:
    on: bool = False
    since_fs: int = 0


class Ladder:
    """Climbs and descends. Asked once before every step; between two answers the engine may leap only if `may_leap` says so."""

    def __init__(self, config: LadderConfig, knobs: Knobs) -> None:
        self.config = config
        self.knobs = knobs
        knobs.guard_priority = config.guard_priority
        self._states = [_State() for _ in config.rungs]
        self._preemption_clocks: list[int] = []
        self._ooms = 0
        self.workspace_share = 0.0
        """Share of the workspace that the latest step needed."""

    @property
    def watches_workspace(self) -> bool:
        """Whether a rung's signal is what steps need."""
        return any(rung.signal == "workspace" for rung in self.config.rungs)

    def holds_until_fs(self, action: str) -> int | None:
        """When the rung of this action may go off at the earliest; None if it is not on."""
        for rung, state in zip(self.config.rungs, self._states, strict=True):
            if rung.action == action and state.on:
                return state.since_fs + to_fs(rung.hold_s)
        return None

    @property
    def active(self) -> list[Rung]:
        """The rungs that are on, mildest first."""
        return [rung for rung, state in zip(self.config.rungs, self._states, strict=True) if state.on]

    def note_preemption(self, clock: int) -> None:
        """A running request lost its blocks."""
        self._preemption_clocks.append(clock)

    def note_oom(self) -> None:
        """A step ran out of memory."""
        self._ooms += 1

    def update(self, view: EngineView) -> list[tuple[Rung, bool]]:
        """Turn rungs on and off for the state before this step; returns the changes, in order."""
        changes: list[tuple[Rung, bool]] = []
        milder_on: dict[str, bool] = {}
        values: dict[str, float] = {}
        for rung, state in zip(self.config.rungs, self._states, strict=True):
            if rung.signal not in values:
                values[rung.signal] = self._signal(rung.signal, view)
            value = values[rung.signal]
            if not state.on and value >= rung.on and milder_on.get(rung.signal, True):
                state.on, state.since_fs = True, view.now_fs
                changes.append((rung, True))
            elif state.on and value < rung.off and view.now_fs - state.since_fs >= to_fs(rung.hold_s):
                state.on = False
                changes.append((rung, False))
            milder_on[rung.signal] = milder_on.get(rung.signal, True) and state.on
        if changes:
            self._turn_knobs()
            if not any(state.on for state in self._states):
                self._ooms = 0
        return changes

    def blocks_until_change(self, view: EngineView) -> int | None:
        """How many blocks may be taken before a rung could change, if only decoding goes on; None when every step must be asked."""
        if any(state.on for state in self._states) or view.num_waiting:
            return None
        room = view.num_free_blocks
        for rung in self.config.rungs:
            if rung.signal == "kv_usage":
                room = min(room, int(rung.on * view.num_blocks) - 1 - view.num_owned_blocks)
            elif rung.signal == "shortage":
                room = min(room, view.num_free_blocks - view.blocks_needed_soon - 1)
            elif rung.signal == "workspace" or (rung.signal == "preemptions" and self._preemption_clocks):
                return None
        return room if room >= 0 else None

    def _signal(self, name: str, view: EngineView) -> float:
        if name == "kv_usage":
            return view.num_owned_blocks / view.num_blocks
        if name == "shortage":
            return max(0, view.blocks_needed_soon - view.num_free_blocks) / view.num_blocks
        if name == "queue_s":
            return view.oldest_wait_s
        if name == "longest_queue_s":
            return view.longest_wait_s
        if name == "preemptions":
            self._preemption_clocks = [clock for clock in self._preemption_clocks if view.decode_clock - clock < 64]
            return len(self._preemption_clocks)
        if name == "workspace":
            return self.workspace_share
        return self._ooms

    def _turn_knobs(self) -> None:
        knobs, active = self.knobs, {rung.action: rung for rung in self.active}
        knobs.reuse = "no_reuse" not in active
        knobs.admit_below_guard = not active.keys() & {"pause_admission", "pause", "swap_out"}
        knobs.step_share = active["shrink_step"].value if "shrink_step" in active else 1.0
        knobs.passes = int(active["micro_batch"].value) if "micro_batch" in active else 1
        knobs.cap_new = int(active["cap_new"].value) if "cap_new" in active else None
        shed = active.get("shed")
        knobs.shed_after_s = None if shed is None else shed.off if shed.signal in SECONDS else shed.value
