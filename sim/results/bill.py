"""The bill: what each request's KV memory came to, as exact shares of what the pool had in use.

A block with c holders costs each of them 1/c of its time, so that the bills of all requests add up to the pool's integral of owned
blocks over time, to the last femtosecond. What a request pays for and does not fill is its waste: the end of its last block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from sim.catalog.gpus import GIB
from sim.core.clock import FS_PER_S
from sim.core.request import Request

_NOTHING = Fraction()
BILL_COLUMNS: dict[str, str] = {
    "request_id": "text",
    "tenant": "text",
    "kv_block_seconds": "float",
    "kv_gib_seconds": "float",
    "held_block_seconds": "float",
    "shared_block_seconds": "float",
    "saved_block_seconds": "float",
    "wasted_block_seconds": "float",
    "waste_share": "float",
    "peak_blocks": "int",
    "peak_gib": "float",
    "kv_block_fs": "text",
}
"""Columns of bill.csv, in order. `kv_block_seconds` is what the request pays: what it held (`held_block_seconds`) less what others
paid of it (`saved_block_seconds`); `shared_block_seconds` is the part of the held that had other holders too. `wasted_block_seconds`
is the part of the held that had no token in it, `waste_share` its share. `kv_block_fs` is the bill in block-femtoseconds as an exact
fraction: these sum to the pool's integral. GiB are of one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What one request's KV memory came to."""

    held_fs: int
    """Blocks in its table times femtoseconds, a shared block counted whole."""
    shared_fs: int
    """The part of it in which the blocks had other holders too."""
    saved_fs: Fraction
    """What the other holders pay of it."""
    unfilled_slot_fs: int
    """Token slots of its blocks that held no token, times femtoseconds."""

    @property
    def owed_fs(self) -> Fraction:
        """What it pays, in block-femtoseconds."""
        return self.held_fs - self.saved_fs


def bill_of(request: Request, slots_per_block: int) -> Bill:
    """The bill of a request that has ended; `slots_per_block` as `EngineConfig.slots_per_block`."""
    return Bill(
        held_fs=request.kv_block_fs,
        shared_fs=sum(request.shared_fs.values()),
        saved_fs=sum(
            (Fraction(time_fs * (holders - 1), holders) for holders, time_fs in request.shared_fs.items()), _NOTHING
        ),
        unfilled_slot_fs=request.kv_block_fs * slots_per_block - request.token_fs,
    )


def bill_columns(requests: Sequence[Request], slots_per_block: int, block_bytes: int) -> dict[str, list[Any]]:
    """The columns of bill.csv, one value a request. `block_bytes` are those of one block on one rank."""
    bills = [bill_of(request, slots_per_block) for request in requests]
    gib = block_bytes / GIB
    owed_fs = [bill.owed_fs for bill in bills]
    owed_s = [owed.numerator / (owed.denominator * FS_PER_S) for owed in owed_fs]
    return {
        "request_id": [request.request_id for request in requests],
        "tenant": [request.spec.tenant for request in requests],
        "kv_block_seconds": owed_s,
        "kv_gib_seconds": [owed * gib for owed in owed_s],
        "held_block_seconds": [bill.held_fs / FS_PER_S for bill in bills],
        "shared_block_seconds": [bill.shared_fs / FS_PER_S for bill in bills],
        "saved_block_seconds": [bill.saved_fs.numerator / (bill.saved_fs.denominator * FS_PER_S) for bill in bills],
        "wasted_block_seconds": [bill.unfilled_slot_fs / (slots_per_block * FS_PER_S) for bill in bills],
        "waste_share": [
            bill.unfilled_slot_fs / (bill.held_fs * slots_per_block) if bill.held_fs else 0.0 for bill in bills
        ],
        "peak_blocks": [request.peak_blocks for request in requests],
        "peak_gib": [request.peak_blocks * gib for request in requests],
        "kv_block_fs": [str(owed) for owed in owed_fs],
    }
