"""The memory account: what an engine's GPU memory is spent on, and how many KV blocks that leaves."""

from .build import build_ledger
from .fit import NoRoomError
from .ledger import Ledger, LedgerLine
from .ops import Op, Peak

__all__ = ["Ledger", "LedgerLine", "NoRoomError", "Op", "Peak", "build_ledger"]
