"""Who may enter: the verdict on an arrival, and on starting the request at the head of the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .config import EngineConfig
from .need import slots_needed
from .request import Request, RequestSpec
from .view import EngineView


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


class Admission(Protocol):
    """An admission policy: a filter on arrivals and a gate before the batch. It may look, at the view, and not touch."""

    steady: bool
    """True if, while requests only decode, the pool only gets fuller and time only passes, `may_start` never turns from no to
    anything else. The engine then leaps over steps in which the queue stands still; otherwise it asks again at every step."""

    def arrive(self, spec: RequestSpec, view: EngineView) -> Rejection | None:
        """Judge an arrival; None lets it into the queue. Counts of requests and tokens are exact here, free blocks are not."""
        ...

    def may_start(self, request: Request, need_blocks: int, view: EngineView) -> bool | Rejection:
        """Whether the head of the queue, which would take `need_blocks` from the free queue, may start now.

        False leaves it, and everyone behind it, in the queue; a Rejection sends it away.
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


class AdmissionBase:
    """Lets everybody in; a policy overrides what it cares about."""

    steady = True

    def arrive(self, spec: RequestSpec, view: EngineView) -> Rejection | None:
        """Everybody may queue."""
        return None

    def may_start(self, request: Request, need_blocks: int, view: EngineView) -> bool | Rejection:
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
        self.steady = all(policy.steady for policy in policies)

    def arrive(self, spec: RequestSpec, view: EngineView) -> Rejection | None:
        """The first rejection."""
        for position, policy in enumerate(self.policies):
            said = policy.arrive(spec, view)
            if said is not None:
                for agreed in self.policies[:position]:
                    agreed.withdraw(spec, view)
                return said
        return None

    def may_start(self, request: Request, need_blocks: int, view: EngineView) -> bool | Rejection:
        """The first objection."""
        for policy in self.policies:
            said = policy.may_start(request, need_blocks, view)
            if said is not True:
                return said
        return True

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
                    f"{spec.input_tokens} prompt + {output_tokens} output tokens need {need} KV blocks of {config.block_size} tokens, "
                    f"but the whole pool has {config.num_gpu_blocks} ({config.num_gpu_blocks * config.block_size} tokens)"
                ),
            )
        return None


class FreeBlocks(AdmissionBase):
    """Start the head of the queue as soon as its blocks are free, beyond a watermark left for the growth of others.

    vLLM V1's gate with the watermark of V0, which is waived when nothing runs: it could block for ever too.
    """

    def __init__(self, watermark_blocks: int = 0) -> None:
        self._watermark_blocks = watermark_blocks

    def may_start(self, request: Request, need_blocks: int, view: EngineView) -> bool | Rejection:
        """Compare the need with what is free."""
        spare = self._watermark_blocks if view.num_running else 0
        return need_blocks + spare <= view.num_free_blocks


def default_admission(config: EngineConfig) -> Admission:
    """What vLLM V1 does, plus the early verdict on what can never fit."""
    return Every([CanEverFit(config), FreeBlocks(config.watermark_blocks)])
