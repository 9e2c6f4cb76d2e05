"""The decision core: what an engine decides, and nothing of how it is done. Standard library only.

`EngineCore` takes arrivals and departures, answers `plan` with a `StepPlan` and takes its `StepResult` back with `commit`.
"""

from .admission import Admission, PoolView, Rejection
from .blocks import BlockPool, DoubleFreeError, IntegrityError
from .config import ConfigError, EngineConfig
from .engine import EngineCore, ProgressError
from .plan import BatchShape, Durations, Executor, ScheduledRequest, StepPlan, StepResult
from .request import Namespace, Outcome, Request, RequestSpec, State
from .tables import BlockTable, BlockTables

__all__ = [
    "Admission",
    "BatchShape",
    "BlockPool",
    "BlockTable",
    "BlockTables",
    "ConfigError",
    "DoubleFreeError",
    "Durations",
    "EngineConfig",
    "EngineCore",
    "Executor",
    "IntegrityError",
    "Namespace",
    "Outcome",
    "PoolView",
    "ProgressError",
    "Rejection",
    "Request",
    "RequestSpec",
    "ScheduledRequest",
    "State",
    "StepPlan",
    "StepResult",
]
