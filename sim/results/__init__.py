"""What a run left behind, and how to read it."""

from .bill import bill_columns
from .memory_curve import memory_columns
from .oom_log import oom_log, oom_snapshot
from .recorder import RunRecord
from .result import Result
from .summary import itl_columns, mark_columns, request_columns, summarize, timeline_columns

__all__ = [
    "Result",
    "RunRecord",
    "bill_columns",
    "itl_columns",
    "mark_columns",
    "memory_columns",
    "oom_log",
    "oom_snapshot",
    "request_columns",
    "summarize",
    "timeline_columns",
]
