"""What a degradation ladder is made of: pressure signals, actions, rungs with their thresholds, and whom it spares.

Each rung has a trigger (a pressure signal and two thresholds, so that it does not flutter), an action, and a guard: requests
at least as important as the guard are never touched. Rungs are tried in the configured order; all off is the plain engine.
No engine that was read does this (engine-policies §3); the actions are kvtwin's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .config import ConfigError

SIGNALS: dict[str, str] = {
    "kv_usage": "share of the pool that is owned",
    "shortage": "blocks that the decoding requests will lack within the next two blocks' worth of steps, as a share of the pool",
    "queue_s": "seconds that the next request to be tried has waited",
    "longest_queue_s": "seconds that the request below the guard that has waited longest has waited, wherever it stands in the queue",
    "preemptions": "preemptions within the last 64 decode steps",
    "workspace": "share of the memory left for steps that the latest step needed; such a ladder looks at every step",
    "oom": "out-of-memory events since the ladder was last all off",
}
"""Pressure signals by name."""

ACTIONS: dict[str, str] = {
    "drop_cache": "cached blocks that nobody holds are forgotten",
    "no_reuse": "new requests neither look up nor leave anything in the prefix cache",
    "pause_admission": "nobody below the guard is admitted; the others go past them",
    "shrink_step": "a step computes at most a part of its token budget",
    "micro_batch": "a step is computed in several forward passes, each with a part of the temporary memory",
    "cap_new": "requests below the guard that start now get fewer output tokens",
    "cap_running": "running requests below the guard get fewer output tokens",
    "offload_cache": "cached blocks that nobody holds are saved to the CPU prefix tier",
    "swap_out": "running requests below the guard are saved to the CPU pool until usage falls",
    "pause": "running requests below the guard give up their blocks until usage falls, saved or to be recomputed",
    "truncate": "running requests below the guard keep their first block and a window of their context",
    "run_on_cpu": "running requests below the guard go on on the CPU executor until usage falls, and come back when the rung is off",
    "shed": "waiting requests below the guard are sent away, least important first, with a time to come back",
}
"""What a rung can do, by name, and what its users see."""

LOSSY = frozenset({"truncate"})
"""Actions that change answers by definition; a request says that they did, and so does whoever goes on as a copy of it."""

SECONDS = frozenset({"queue_s", "longest_queue_s"})
"""Signals that are seconds waited."""

WHOEVER_IT_IS = frozenset({"drop_cache", "offload_cache", "micro_batch"})
"""Actions on the engine as a whole: the guard spares nobody from them, and they take nothing from anybody's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One step of the ladder."""

    action: str
    """One of `ACTIONS`."""
    signal: str = "kv_usage"
    """One of `SIGNALS`."""
    on: float
    """The rung goes on when the signal is at or above this."""
    off: float
    """It goes off again when the signal is below this."""
    hold_s: float = 1.0
    """Shortest time it stays on."""
    value: float = 0.0
    """What the action is measured by: the share of the token budget (`shrink_step`), passes (`micro_batch`, at least 2), output tokens
    (`cap_new`, `cap_running`), context tokens kept (`truncate`), the usage to fall to (`swap_out`, `pause`, `run_on_cpu`), the seconds
    after which requests are sent away (`shed`, where the signal is not itself in seconds; else that is `off`)."""

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ConfigError(f"rung action {self.action!r} is not known; known are {', '.join(ACTIONS)}")
        if self.signal not in SIGNALS:
            raise ConfigError(f"rung signal {self.signal!r} is not known; known are {', '.join(SIGNALS)}")
        if self.off < 0:
            raise ConfigError(
                f"rung {self.action} goes off below {self.off:g}; no signal is ever below 0, so off must be at least 0"
            )
        if self.off > self.on:
            raise ConfigError(
                f"rung {self.action} goes off below {self.off}, above where it goes on ({self.on}): it would flutter"
            )
        if self.hold_s < 0:
            raise ConfigError(f"rung {self.action} has hold_s {self.hold_s:g}; it must be at least 0")
        self._check_value()

    def _check_value(self) -> None:
        if self.action == "shed" and self.signal in SECONDS and self.value:
            raise ConfigError(
                f"rung shed has a value of {self.value:g}, but with the signal {self.signal} those go that have waited {self.off:g} s "
                "(off); leave value out"
            )
        if self.action == "shed" and self.value < 0:
            raise ConfigError(f"rung shed has a value of {self.value:g}; seconds waited, at least 0")
        if self.action == "micro_batch" and (self.value < 2 or self.value != int(self.value)):
            raise ConfigError(f"rung micro_batch needs a whole number of passes, at least 2, not {self.value:g}")
        needs_value = {"shrink_step", "cap_new", "cap_running", "truncate", "swap_out", "pause", "run_on_cpu"}
        if self.action in needs_value and self.value <= 0:
            raise ConfigError(f"rung {self.action} needs a value above 0, has {self.value:g}")
        if self.action == "shrink_step" and self.value > 1:
            raise ConfigError(f"rung shrink_step needs a share of the token budget, at most 1, not {self.value:g}")
        if self.action in ("swap_out", "pause", "run_on_cpu") and self.value > 1:
            raise ConfigError(f"rung {self.action} needs a share of the pool to fall to, at most 1, not {self.value:g}")
        if self.action in ("cap_new", "cap_running", "truncate") and self.value != int(self.value):
            raise ConfigError(f"rung {self.action} needs a whole number of tokens, not {self.value:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderConfig:
    """A ladder: its rungs, mildest first, and whom it spares."""

    rungs: tuple[Rung, ...]
    """In the order in which they go on; a rung goes on only when all milder rungs of the same signal are on."""
    guard_priority: int = 0
    """Requests whose priority is this or more important (smaller) are never degraded."""

    @property
    def counts_below_guard(self) -> bool:
        """Whether it must know who waits below the guard, wherever they stand."""
        return any(rung.action == "shed" or rung.signal == "longest_queue_s" for rung in self.rungs)


def standard_ladder(ttft_limit_s: float = 2.0, guard_priority: int = 0) -> LadderConfig:
    """kvtwin's own ladder for a service whose first tokens are due within `ttft_limit_s` seconds.

    Unimportant requests are held back while decodes would run out of blocks; shortened when the next of them has waited a
    quarter of the limit; and sent away, with a time to come back, when it has waited seven tenths of it: what is started later than
    that would be late, and would make those behind it late too.
    """
    return LadderConfig(
        rungs=(
            Rung(action="pause_admission", signal="shortage", on=0.0001, off=0.0001, hold_s=0.0),
            Rung(action="cap_new", signal="queue_s", on=0.25 * ttft_limit_s, off=0.125 * ttft_limit_s, value=512),
            Rung(action="shed", signal="queue_s", on=0.7 * ttft_limit_s, off=0.7 * ttft_limit_s, hold_s=0.0),
        ),
        guard_priority=guard_priority,
    )


def check_ladder(config: LadderConfig, *, swap: bool, tier: bool = False, cpu: bool = False) -> None:
    """Refuse a ladder that the engine cannot carry out. Raises ConfigError with the reason."""
    actions: Sequence[str] = [rung.action for rung in config.rungs]
    for action in actions:
        if actions.count(action) > 1:
            raise ConfigError(f"the ladder has {action} twice; a rung of each kind is enough")
    if "swap_out" in actions and not swap:
        raise ConfigError("the ladder has swap_out, but there is no CPU pool to save to: set num_cpu_blocks and swap")
    if "offload_cache" in actions and not tier:
        raise ConfigError(
            "the ladder has offload_cache, but there is no CPU prefix tier to save to: set num_cpu_prefix_blocks"
        )
    if "run_on_cpu" in actions and not cpu:
        raise ConfigError("the ladder has run_on_cpu, but there is no CPU executor: set cpu_token_s and num_cpu_blocks")
