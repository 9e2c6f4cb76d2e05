"""A policy: the objects that decide where engines differ. A preset is one of these and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .admission import Admission, default_admission
from .batching import NO_LIMITS, Batching, BatchLimits
from .config import ConfigError, EngineConfig
from .cpu_server import CpuExecutor
from .eviction import EVICTIONS
from .preemption import VictimPolicy, last_admitted, worst_priority
from .retention import Retention
from .rungs import LadderConfig
from .view import EngineView
from .waiting import FcfsQueue, WaitingQueue, priority_queue

__all__ = ["BatchLimits", "Batching", "Policy", "scheduling_policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How an engine decides. Objects are made afresh for each engine, because some of them learn."""

    name: str = "vllm-v1"
    admission: Callable[[EngineConfig], Admission] = default_admission
    """Who may enter, and when."""
    queue: Callable[[EngineView], WaitingQueue] = FcfsQueue
    """In which order the waiting are tried; most orders do not look at the view."""
    victim: VictimPolicy = last_admitted
    """Who gives way when blocks run out."""
    batching: Batching = Batching.MIXED
    """What may share a step."""
    limits: BatchLimits = NO_LIMITS
    """How much of prompts and decodes one step takes."""
    cuts_first_only: bool = False
    """Of the prompts that start in a step only the first may be computed in part; who is behind it and does not fit whole waits
    (nano-vllm)."""
    eviction: str = "lru"
    """In which order free blocks are taken, and the prefix cache forgets: one of `eviction.EVICTIONS`."""
    retention: tuple[Retention, ...] = ()
    """What of every request is kept for how long, for the eviction `retention`; a request's own ranges go before these."""
    ladder: LadderConfig | None = None
    """Steps of degradation under pressure; None for an engine that only queues, preempts or fails."""
    cpu_executor: CpuExecutor | None = None
    """The slow server that the rung `run_on_cpu` of the ladder moves requests to."""
    swap: bool = False
    """Save a victim's blocks to the CPU pool, when it has room, instead of computing them again."""

    def __post_init__(self) -> None:
        if self.eviction not in EVICTIONS:
            raise ConfigError(f"eviction is {self.eviction!r}; known are {', '.join(EVICTIONS)}")
        if self.retention and self.eviction != "retention":
            raise ConfigError(
                f"retention gives {len(self.retention)} ranges, but the eviction order {self.eviction} ignores them; set eviction to "
                "retention, or leave the ranges out"
            )


def scheduling_policy(config: EngineConfig) -> Policy:
    """vLLM V1 with its `scheduling_policy` flag."""
    if config.scheduling_policy == "priority":
        return Policy(queue=priority_queue, victim=worst_priority)
    return Policy()
