"""What a run left behind, and how to read it."""

from .recorder import RunRecord
from .result import Result
from .summary import mark_columns, request_columns, summarize, timeline_columns

__all__ = ["Result", "RunRecord", "mark_columns", "request_columns", "summarize", "timeline_columns"]
