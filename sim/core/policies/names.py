"""Policies by name, as a scenario file chooses them: a registry is a dict.

An admission policy is made with its arguments, and with the engine's settings where it has a parameter `config`. An order of the queue
is made with its arguments, and gives what makes an engine's queue from its view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..admission import Admission, CanEverFit, FreeBlocks
from ..clock import to_fs
from ..config import ConfigError, EngineConfig
from ..waiting import FcfsQueue, aging_queue, priority_queue
from .caps import MaxInFlight, MaxKvBlocks, MaxQueuedTokens, MaxRunning
from .fair_queue import FairQueue
from .latency import TtftDeadline
from .lora_slots import LoraSlots
from .new_token_ratio import NewTokenRatio, RatioSettings
from .predicted_peak import PredictedPeak
from .queues import BackOfTheQueue, QueueFactory, arrival_queue, deadline_queue, shortest_predicted_queue
from .reservation import ContiguousReservation, FullReservation
from .tenants import PriorityShares, TokenBucket

_SGLANG = RatioSettings()


def _free_blocks(config: EngineConfig, watermark_blocks: int = 0) -> FreeBlocks:
    if watermark_blocks >= config.num_gpu_blocks:
        raise ConfigError(
            f"the watermark is {watermark_blocks} blocks of a pool of {config.num_gpu_blocks}: only one request would ever run; lower it"
        )
    return FreeBlocks(watermark_blocks)


def _new_token_ratio(
    conservativeness: float = _SGLANG.conservativeness,
    start: float = _SGLANG.start,
    floor_share: float = _SGLANG.floor_share,
    decay_steps: int = _SGLANG.decay_steps,
    clip_new_tokens: int = _SGLANG.clip_new_tokens,
    retract_decode_steps: int = _SGLANG.retract_decode_steps,
) -> NewTokenRatio:
    return NewTokenRatio(
        RatioSettings(
            conservativeness=conservativeness,
            start=start,
            floor_share=floor_share,
            decay_steps=decay_steps,
            clip_new_tokens=clip_new_tokens,
            retract_decode_steps=retract_decode_steps,
        )
    )


ADMISSIONS: dict[str, Callable[..., Admission]] = {
    "can-ever-fit": CanEverFit,
    "free-blocks": _free_blocks,
    "max-in-flight": MaxInFlight,
    "max-queued-tokens": MaxQueuedTokens,
    "max-running": MaxRunning,
    "max-kv-blocks": MaxKvBlocks,
    "full-reservation": FullReservation,
    "contiguous-reservation": ContiguousReservation,
    "new-token-ratio": _new_token_ratio,
    "predicted-peak": PredictedPeak,
    "ttft-deadline": TtftDeadline,
    "token-bucket": TokenBucket,
    "lora-slots": LoraSlots,
    "priority-shares": PriorityShares,
}
"""Admission policies by name."""


def _aging(s_per_level: float) -> QueueFactory:
    if s_per_level <= 0:
        raise ConfigError(f"s_per_level is {s_per_level:g}; seconds of waiting that are worth a level, above 0")
    return aging_queue(to_fs(s_per_level))


def _fair(input_weight: int = 1, output_weight: int = 2) -> QueueFactory:
    FairQueue.check(input_weight, output_weight)
    return lambda view: FairQueue(view, input_weight=input_weight, output_weight=output_weight)


def _deadline(deadline_s: float | Mapping[int, float], late_last: bool = True) -> QueueFactory:
    return deadline_queue(deadline_s, late_last=late_last)


QUEUES: dict[str, Callable[..., QueueFactory]] = {
    "fcfs": lambda: FcfsQueue,
    "back-of-the-queue": lambda: BackOfTheQueue,
    "arrival": lambda: arrival_queue,
    "priority": lambda: priority_queue,
    "aging": _aging,
    "shortest-predicted": lambda: shortest_predicted_queue,
    "fair": _fair,
    "deadline": _deadline,
}
"""Orders of the queue by name."""
