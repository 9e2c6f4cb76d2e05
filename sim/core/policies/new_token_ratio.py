"""SGLang's adaptive over-commit: reserve a share of what running requests may still produce, and learn the share from experience."""

from __future__ import annotations

from dataclasses import dataclass

from ..admission import FOREVER, AdmissionBase, Rejection
from ..config import ConfigError
from ..look import RequestLook
from ..request import RequestSpec
from ..view import EngineView
from .running_sums import RunningSums


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioSettings:
    """Source: SGLang v0.5.17 `server_args` and `global_config` (engine-policies §1.3.4)."""

    conservativeness: float = 1.0
    """`--schedule-conservativeness`: scales the ratio to start with; 0.3 takes in more, 1.3 less."""
    start: float = 0.7
    """Ratio of a fresh or idle engine, before it is scaled."""
    floor_share: float = 0.14
    """The floor, as a share of the scaled start."""
    decay_steps: int = 600
    """Decode steps from the start to the floor."""
    clip_new_tokens: int = 4096
    """Most output tokens that are counted a request, whatever its cap."""
    retract_decode_steps: int = 20
    """Steps of room a request that a retraction should make (`retract_decode_steps`)."""

    def __post_init__(self) -> None:
        if self.conservativeness < 0 or not 0 < self.start <= 1 or not 0 <= self.floor_share <= 1:
            raise ConfigError(
                f"conservativeness {self.conservativeness} must be at least 0, start {self.start} in (0, 1], floor_share "
                f"{self.floor_share} in [0, 1]"
            )
        if min(self.decay_steps, self.clip_new_tokens) < 1 or self.retract_decode_steps < 0:
            raise ConfigError("decay_steps and clip_new_tokens must be at least 1, retract_decode_steps at least 0")

    @property
    def first(self) -> float:
        """0.7 by default."""
        return min(self.start * self.conservativeness, 1.0)

    @property
    def floor(self) -> float:
        """0.098 by default."""
        return self.first * self.floor_share

    @property
    def step(self) -> float:
        """What each decode step takes off: 0.0010033 by default."""
        return (self.first - self.floor) / self.decay_steps


class NewTokenRatio(AdmissionBase):
    """Start the head of the queue if its prompt, its whole output cap and a page fit beside a share of what running requests may add.

    In tokens: `extend + min(max_new, 4096) + page < free - ratio * sum(min(max_new_i - out_i, 4096))`. The ratio falls a little with
    every decode step, down to a floor; a retraction raises it to `(sum(out_i) + 20 n) / (sum(max_new_i) + 1)` over the n survivors, at
    most 1; an idle engine starts afresh. Waived when nothing runs. With several attention groups what is to come counts in each;
    windows are not credited, and nor are larger blocks. Source: SGLang v0.5.17 `PrefillAdder`, `retract_decode` (§1.3.3
    to 1.3.5).

    Not steady: the ratio falls, and what running requests may still add gets less, while they only decode; so a no turns into a yes at
    some step. How soon it can at the earliest is known.
    """

    steady = False

    def __init__(self, settings: RatioSettings | None = None) -> None:
        self.settings = settings or RatioSettings()
        self._ratio = self.settings.first
        self._clock = 0
        self._sums = RunningSums(self.settings.clip_new_tokens)
        self._short = 0.0
        """By how many tokens the latest request missed what it asks for, before what the running may add is counted; 0 if it has nothing to
        do with that."""
        self._to_come = 0
        """What they could add then."""

    def ratio(self, view: EngineView) -> float:
        """The ratio now: it is kept as of the last retraction or idle moment, and falls linearly from there."""
        settings = self.settings
        # A ratio raised above the start by a retraction falls by the same amount a step.
        return max(settings.floor, self._ratio - settings.step * (view.decode_clock - self._clock))

    def arrive(self, spec: RequestSpec, view: EngineView) -> Rejection | None:
        """Everybody may queue; an arrival at an idle engine finds the ratio as at the start."""
        if not view.num_in_flight:
            self._set(self.settings.first, view)
        return None

    def may_start(self, request: RequestLook, need_blocks: int, view: EngineView) -> bool | Rejection:
        """Compare tokens, in whole pages."""
        self._short = 0.0
        if not view.num_running:
            return True
        page, free = view.block_size, view.num_free_blocks
        if need_blocks > free:
            return False
        to_come = min(max(view.output_cap(request.spec) - request.num_output_tokens, 0), self.settings.clip_new_tokens)
        groups = view.num_groups  # a token takes a slot in each
        asked = need_blocks * page + groups * (to_come + page)
        if asked >= free * page:  # no need to look at everybody
            return False
        self._to_come = self._sums.to_come(view)
        self._short = free * page - asked
        return asked < free * page - self.ratio(view) * groups * self._to_come

    def steps_of_no(self, view: EngineView) -> int:
        """Until the ratio, and what running requests may add, could have fallen far enough: each of those loses at most a token a step."""
        if not self._short:
            return FOREVER  # too few blocks are free, and they get fewer
        low, high = 1, self.settings.decay_steps + self.settings.clip_new_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self._short_of(middle - 1, view):
                low = middle
            else:
                high = middle - 1
        return low

    def _short_of(self, steps: int, view: EngineView) -> bool:
        """Whether the latest request would be short so many steps from now, if nobody came and no block were taken; with a token to
        spare, as this is arithmetic with fractions.
        """
        ratio = max(self.settings.floor, self.ratio(view) - self.settings.step * steps)
        left = max(self._to_come - steps * view.num_running, 0)
        return self._short + 1 <= ratio * view.num_groups * left

    def preempted(self, view: EngineView) -> None:
        """Raise the ratio to what the survivors have really used of their caps."""
        out = caps = num = 0
        for running in view.running():
            num += 1
            out += running.output_tokens
            caps += view.output_cap(running)
        if num:
            self._set(min(1.0, (out + self.settings.retract_decode_steps * num) / (caps + 1)), view)

    def _set(self, ratio: float, view: EngineView) -> None:
        self._ratio, self._clock = ratio, view.decode_clock
