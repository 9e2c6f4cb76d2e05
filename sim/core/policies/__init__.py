"""Policies to choose from: who may enter, in which order, and engines as compositions of them. Standard library only.

Victims are in `sim.core.preemption`, the simplest queues in `sim.core.waiting`, the simplest admissions in `sim.core.admission`.
"""

from .caps import FrontDoor, Level, MaxInFlight, MaxKvBlocks, MaxQueuedTokens, MaxRunning
from .fair_queue import FairQueue
from .latency import TtftDeadline
from .lora_slots import LoraSlots
from .new_token_ratio import NewTokenRatio, RatioSettings
from .predicted_peak import PredictedPeak
from .presets import PRESETS, Preset, preset_of
from .promises import Promises
from .queues import BackOfTheQueue, arrival_queue, deadline_queue, shortest_predicted_queue
from .reservation import ContiguousReservation, FullReservation
from .survival import Survival
from .tenants import PriorityShares, TokenBucket

__all__ = [
    "PRESETS",
    "BackOfTheQueue",
    "ContiguousReservation",
    "FairQueue",
    "FrontDoor",
    "FullReservation",
    "Level",
    "LoraSlots",
    "MaxInFlight",
    "MaxKvBlocks",
    "MaxQueuedTokens",
    "MaxRunning",
    "NewTokenRatio",
    "PredictedPeak",
    "Preset",
    "PriorityShares",
    "Promises",
    "RatioSettings",
    "Survival",
    "TokenBucket",
    "TtftDeadline",
    "arrival_queue",
    "deadline_queue",
    "preset_of",
    "shortest_predicted_queue",
]
