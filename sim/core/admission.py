"""Who may enter: the verdict on an arrival, and on starting the request at the head of the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .config import ConfigError, EngineConfig
from .look import RequestLook
from .need import slots_needed
from .request import RequestSpec
from .view import EngineView

FOREVER = 1 << 62
"""More steps than any run has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why a request is turned away."""

    code: str
    """For counting, and for a server to map: `exceeds_kv_pool`, `queue_full`, …"""
    reason: str
    """For the client: a sentence with the numbers."""
    http_status: int
    """413 or 400: never fits, trying again is useless; 503: the server is overloaded; 429: this client sends too much."""
    retry_after_s: float | None = None
    """When trying again can help; None when it never can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferral:
    """Why the head of the queue cannot start now, whatever room there is: those behind it may go first (see `deferral`)."""

    reason: str
    """For counting: `lora_slots`, `remote_kv`, …"""
    why: str
    """For the client, if it comes to that: a clause with the numbers."""
    give_up_after_s: float
    """It is sent away when it has been deferred for so long."""


@dataclass(frozen=True, slots=True)
class Displacement:
    """An arrival may enter, in the place of queued requests that are less important."""

    victims: tuple[tuple[str, Rejection], ...]
    """Who has to go, and what it is told; requests that wait and have never run (`EngineView.is_queued`)."""


class Admission(Protocol):
    """An admission policy: a filter on arrivals and a gate before the batch. It may look, at the view, and not touch."""

    steady: bool
    """True if, while requests only decode and time only passes, `may_start` never turns from no to anything else, at least as long as
    the pool gets fuller, or, where windows slide and it may get emptier, fewer blocks are free than the request needs. The engine then
    leaps over steps in which the queue stands still; otherwise it asks again as soon as `steps_of_no` says, which is at every step."""

    may_defer: bool
    """True if `may_start` may answer with a Deferral."""

    def steps_of_no(self, view: EngineView) -> int:
        """For how many steps, the one being planned included, asking again can be left out if requests only decode, and the pool gets no
        emptier: the latest answer stays a no (or, if another policy said no, this one's own does not matter), and this object learns
        nothing by being asked.
        """
        ...

    def arrive(self, spec: RequestSpec, view: EngineView) -> Rejection | Displacement | None:
        """Judge an arrival; None lets it into the queue, a Displacement too, in the place of others. Counts of requests and tokens
        are exact here, free blocks are not.
        """
        ...

    def may_start(self, request: RequestLook, need_blocks: int, view: EngineView) -> bool | Rejection | Deferral:
        """Whether the head of the queue, which would take `need_blocks` from the free queue, may start now.

        False leaves it, and everyone behind it, in the queue; a Rejection sends it away; a Deferral (see `deferral`, and set
        `may_defer`) sets it aside, and those behind it may go first.
        """
        ...

    def preempted(self, view: EngineView) -> None:
        """Hear that a running request lost its blocks."""
        ...

    def withdraw(self, spec: RequestSpec, view: EngineView) -> None:
        """Take back what `arrive` set aside for this request: it said yes, and another policy then said no."""
        ...

    def diagnose(self) -> tuple[str, ...]:
        """Sentences for whoever reads the results: what this policy made requests wait for, when that is worth knowing."""
        ...


def no_answer(said: object, spec: RequestSpec) -> ConfigError:
    """The error for what a policy may not say of an arrival."""
    return ConfigError(
        f"an admission policy says {said!r} of the arrival {spec.request_id!r}; it must be None, a Rejection or a Displacement"
    )


class AdmissionBase:
    """Lets everybody in; a policy overrides what it cares about."""

    steady = True
    may_defer = False

    def steps_of_no(self, view: EngineView) -> int:
        """One that is steady need not be asked; else at every step."""
        return FOREVER if self.steady else 1

    def arrive(self, spec: RequestSpec, view: EngineView) -> Rejection | Displacement | None:
        """Everybody may queue."""
        return None

    def may_start(self, request: RequestLook, need_blocks: int, view: EngineView) -> bool | Rejection | Deferral:
        """Everybody may start."""
        return True

    def preempted(self, view: EngineView) -> None:
        """Nothing to learn from it."""

    def withdraw(self, spec: RequestSpec, view: EngineView) -> None:
        """Nothing was set aside."""

    def diagnose(self) -> tuple[str, ...]:
        """Nothing to say."""
        return ()


class Every(AdmissionBase):
    """All of several policies: the first that objects decides, and what the others set aside is given back (vLLM #58192)."""

    def __init__(self, policies: Sequence[Admission]) -> None:
        self.policies = tuple(policies)
        self._asked: Sequence[Admission] = ()
        self.steady = all(policy.steady for policy in policies)
        self.may_defer = any(policy.may_defer for policy in policies)

    def arrive(self, spec: RequestSpec, view: EngineView) -> Rejection | Displacement | None:
        """The first rejection; else all who have to go for it."""
        victims: dict[str, Rejection] = {}
        for position, policy in enumerate(self.policies):
            said = policy.arrive(spec, view)
            if isinstance(said, Rejection):
                for agreed in self.policies[:position]:
                    agreed.withdraw(spec, view)
                return said
            if isinstance(said, Displacement):
                victims |= dict(said.victims)
            elif said is not None:
                raise no_answer(said, spec)
        return Displacement(tuple(victims.items())) if victims else None

    def may_start(self, request: RequestLook, need_blocks: int, view: EngineView) -> bool | Rejection | Deferral:
        """The first objection."""
        for position, policy in enumerate(self.policies):
            said = policy.may_start(request, need_blocks, view)
            if not said or isinstance(said, Rejection | Deferral):
                self._asked = self.policies[: position + 1]
                return said
        return True

    def steps_of_no(self, view: EngineView) -> int:
        """As long as those need not be asked who were asked last: up to the one who said no."""
        return min((policy.steps_of_no(view) for policy in self._asked), default=FOREVER if self.steady else 1)

    def preempted(self, view: EngineView) -> None:
        """Everybody hears."""
        for policy in self.policies:
            policy.preempted(view)

    def withdraw(self, spec: RequestSpec, view: EngineView) -> None:
        """Everybody gives back."""
        for policy in self.policies:
            policy.withdraw(spec, view)

    def diagnose(self) -> tuple[str, ...]:
        """What each has to say."""
        return tuple(sentence for policy in self.policies for sentence in policy.diagnose())


class CanEverFit(AdmissionBase):
    """Turn away at once what can never be served: what is longer than the context or larger than the pool.

    vLLM V1 lacks the second rule, and a request longer than the pool blocks its queue for ever (#39734).
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def arrive(self, spec: RequestSpec, view: EngineView) -> Rejection | None:
        """Compare what the request asks for with the limits that do not move."""
        config = self._config
        output_tokens = spec.max_tokens or 1  # without a cap only the first token is sure to come
        asked = spec.input_tokens + output_tokens
        if asked > config.max_model_len:
            return Rejection(
                code="exceeds_max_model_len",
                http_status=400,
                reason=(
                    f"{spec.input_tokens} prompt + {output_tokens} output tokens = {asked}, "
                    f"but max_model_len is {config.max_model_len} tokens"
                ),
            )
        slots = slots_needed(spec.input_tokens, output_tokens)
        need = config.most_blocks(slots)
        if need > config.num_gpu_blocks:
            return Rejection(
                code="exceeds_kv_pool",
                http_status=413,
                reason=(
                    f"{spec.input_tokens} prompt + {output_tokens} output tokens need {need} KV blocks{_kinds(config)}, "
                    f"but the whole pool has {config.num_gpu_blocks}{_in_tokens(config)}"
                ),
            )
        return None


class FreeBlocks(AdmissionBase):
    """Start the head of the queue as soon as its blocks are free, beyond a watermark left for the growth of others.

    vLLM V1's gate with the watermark of V0, which is waived when nothing runs: it could block for ever too.
    """

    def __init__(self, watermark_blocks: int = 0) -> None:
        if watermark_blocks < 0:
            raise ConfigError(f"the watermark is {watermark_blocks} blocks; it must be at least 0")
        self._watermark_blocks = watermark_blocks

    def may_start(self, request: RequestLook, need_blocks: int, view: EngineView) -> bool | Rejection | Deferral:
        """Compare the need with what is free."""
        spare = self._watermark_blocks if view.num_running else 0
        return need_blocks + spare <= view.num_free_blocks


def default_admission(config: EngineConfig) -> Admission:
    """What vLLM V1 does, plus the early verdict on what can never fit."""
    return Every([CanEverFit(config), FreeBlocks(config.watermark_blocks)])


def _kinds(config: EngineConfig) -> str:
    if config.kv_groups:
        return f" in {len(config.kv_groups)} attention groups"
    return f" of {config.block_size} tokens"


def _in_tokens(config: EngineConfig) -> str:
    return "" if config.kv_groups else f" ({config.num_gpu_blocks * config.block_size} tokens)"
