"""The decision core: what an engine decides, and nothing of how it is done. Standard library only.

`EngineCore` takes arrivals and departures, answers `plan` with a `StepPlan` and takes its `StepResult` back with `commit`.
"""

from .admission import Admission, AdmissionBase, Every, Rejection
from .batch_shape import BatchShape
from .blocks import BlockPool, DoubleFreeError, IntegrityError
from .config import ConfigError, EngineConfig
from .durations import Durations
from .engine import EngineCore
from .facts import ProgressError
from .forking import Forking
from .plan import Executor, ScheduledRequest, StepPlan, StepResult
from .policy import Batching, Policy
from .request import Namespace, Outcome, Request, RequestSpec, State, samples
from .tables import BlockTable, BlockTables
from .view import EngineView, RunningView

__all__ = [
    "Admission",
    "AdmissionBase",
    "BatchShape",
    "Batching",
    "BlockPool",
    "BlockTable",
    "BlockTables",
    "ConfigError",
    "DoubleFreeError",
    "Durations",
    "EngineConfig",
    "EngineCore",
    "EngineView",
    "Every",
    "Executor",
    "Forking",
    "IntegrityError",
    "Namespace",
    "Outcome",
    "Policy",
    "ProgressError",
    "Rejection",
    "Request",
    "RequestSpec",
    "RunningView",
    "ScheduledRequest",
    "State",
    "StepPlan",
    "StepResult",
    "samples",
]
