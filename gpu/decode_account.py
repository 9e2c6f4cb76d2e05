"""The bandwidth account of decode attention at the shapes that it is timed at: how it is split, what that costs. Computed, not measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sim.catalog.gpus import Gpu

from .bandwidth import LATENCY_NS, BandwidthAccount
from .kernels.splits import RESIDENT, choose_splits, split_bytes, wave_share

SHAPES = ((64, 8192), (128, 4096), (1, 8192), (16, 8192), (256, 2048))
"""(sequences, KV tokens of each); the first two are those with a bar."""
Q_HEADS, KV_HEADS, HEAD_DIM, ELEMENT_BYTES = 32, 8, 128, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAccount:
    """One shape on one card: 32 query heads, 8 KV heads of 128, 16 bits."""

    gpu: Gpu
    batch_size: int
    context_tokens: int
    num_splits: int
    slots: int
    """Programs that the card runs at once."""
    enough: int
    """Programs that keep its memory busy at the assumed latency."""

    @property
    def programs(self) -> int:
        """Of the launch."""
        return self.batch_size * KV_HEADS * self.num_splits

    @property
    def num_bytes(self) -> int:
        """What must be read and written: K and V, queries and outputs."""
        kv = 2 * self.context_tokens * KV_HEADS * HEAD_DIM
        return self.batch_size * (kv + 2 * Q_HEADS * HEAD_DIM) * ELEMENT_BYTES

    @property
    def merge_bytes(self) -> int:
        """What a merge adds: partial results are written once and read once."""
        return 2 * split_bytes(
            num_seqs=self.batch_size, num_q_heads=Q_HEADS, head_dim=HEAD_DIM, num_splits=self.num_splits
        )

    @property
    def busy_share(self) -> float:
        """Share of the card's bandwidth that the launch can use: waves that do not fill the memory, and the merge's bytes, taken off."""
        busy = wave_share(programs=self.programs, slots=self.slots, enough=self.enough)
        return busy * self.num_bytes / (self.num_bytes + self.merge_bytes)

    def as_json(self) -> dict[str, Any]:
        """The account as JSON values."""
        return {
            "gpu": self.gpu.name,
            "batch_size": self.batch_size,
            "context_tokens": self.context_tokens,
            "num_splits": self.num_splits,
            "programs": self.programs,
            "waves": round(self.programs / self.slots, 2),
            "num_bytes": self.num_bytes,
            "merge_bytes": self.merge_bytes,
            "busy_share": round(self.busy_share, 3),
        }


def decode_accounts(kernel: BandwidthAccount) -> list[DecodeAccount]:
    """Every shape, with the splits that are chosen on the card of a compiled decode kernel."""
    gpu, held = kernel.gpu, kernel.fits.programs
    flight = kernel.program_in_flight_bytes
    if not held or not flight:
        return []
    enough = -(-gpu.memory_bandwidth_bytes_per_s * LATENCY_NS // round(1e9 * flight))
    return [
        DecodeAccount(
            gpu=gpu,
            batch_size=batch_size,
            context_tokens=tokens,
            num_splits=choose_splits(
                num_seqs=batch_size,
                num_kv_heads=KV_HEADS,
                max_tokens=tokens,
                num_sms=gpu.sm_count,
                programs_per_sm=RESIDENT[gpu.compute_capability],
            ),
            slots=held * gpu.sm_count,
            enough=enough,
        )
        for batch_size, tokens in SHAPES
    ]
