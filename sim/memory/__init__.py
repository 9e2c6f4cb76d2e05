"""The memory account: what an engine's GPU memory is spent on, and how many KV blocks that leaves."""

from .build import build_ledger
from .ledger import Ledger, LedgerLine, blocks_for_tokens

__all__ = ["Ledger", "LedgerLine", "blocks_for_tokens", "build_ledger"]
