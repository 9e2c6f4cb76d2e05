"""The measured memory curve of a real run, in the columns of a simulated one (`sim.results.memory_curve`).

The meaning of the columns is the same, so that whatever reads one reads the other: the KV pool counts with its blocks in use.
What a simulation has no use for follows behind: the step, what served it, and the host's process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sim.core.clock import FS_PER_S
from sim.results.memory_curve import MEMORY_COLUMNS

if TYPE_CHECKING:
    from gpu.readings import StepReading

FURTHER = ("step", "used_blocks", "served_by", "process_bytes", "buffers_bytes", "staging_bytes")
"""Columns behind those of a simulated curve; `step` and `served_by` are empty in idle rows."""


def real_memory_columns(
    curves: Sequence[Sequence[StepReading]], pools: Sequence[int], workspaces: Sequence[int], block_bytes: int
) -> dict[str, list[Any]]:
    """The curves of all executors, by time and executor; no columns when no step was run.

    A row is a step, or the beginning or end of an idle time. `pools` are blocks and `workspaces` bytes, by executor.
    """
    sized = zip(curves, pools, workspaces, strict=True)
    rows = [
        row
        for index, (curve, pool, workspace) in enumerate(sized)
        if curve
        for row in _rows(curve, pool, workspace, block_bytes, index)
    ]
    rows.sort(key=lambda row: (row["time_s"], row["replica"]))  # stable: rows of one moment keep their order
    return {name: [row[name] for row in rows] for name in (*MEMORY_COLUMNS, *FURTHER)} if rows else {}


def _rows(
    curve: Sequence[StepReading], pool: int, workspace: int, block_bytes: int, replica: int
) -> Iterator[dict[str, Any]]:
    def row(time_fs: int, reading: StepReading, *, idle: bool) -> dict[str, Any]:
        memory = reading.memory
        assert memory is not None  # a recorder gets memory readings
        blocks = 0 if idle else reading.allocated_blocks
        used = blocks * block_bytes
        kept = memory.workspace_bytes + memory.cached_bytes
        reserved = memory.tensors_bytes + used + kept
        return {
            "time_s": time_fs / FS_PER_S,
            "allocated_bytes": memory.tensors_bytes + used,
            "reserved_bytes": reserved,
            "in_use_bytes": reserved + memory.non_torch_bytes,
            "total_bytes": memory.total_bytes,
            "active_sequences": 0 if idle else reading.num_seqs,
            "tokens": 0 if idle else reading.kv_tokens,
            "batch_tokens": 0 if idle else reading.num_tokens,
            "prefill_tokens": 0 if idle else reading.num_tokens - reading.decode_seqs,
            "decode_sequences": 0 if idle else reading.decode_seqs,
            "phase": "idle" if idle else "decode" if reading.phase == "decode" else "prefill",
            "workspace_bytes": 0 if idle else reading.workspace_bytes,
            "workspace_phase": "" if idle else reading.phase,
            "headroom_bytes": workspace - (0 if idle else reading.workspace_bytes),
            "kv_used_bytes": used,
            "kv_free_bytes": pool * block_bytes - used,
            "tensors_bytes": memory.tensors_bytes,
            "weights_bytes": memory.weights_bytes,
            "cuda_graphs_bytes": memory.graphs_bytes,
            "non_torch_bytes": memory.non_torch_bytes,
            "other_processes_bytes": memory.others_bytes,
            "replica": replica,
            "step": None if idle else reading.step,
            "used_blocks": blocks,
            "served_by": "" if idle else reading.served_by,
            "process_bytes": memory.process_bytes,
            "buffers_bytes": memory.buffers_bytes,
            "staging_bytes": memory.staging_bytes,
        }

    end_fs = 0
    yield row(0, curve[0], idle=True)
    for reading in curve:
        if reading.start_fs > end_fs:
            if end_fs:
                yield row(end_fs, reading, idle=True)
            yield row(reading.start_fs, reading, idle=True)
        end_fs = reading.start_fs + reading.duration_fs
        yield row(end_fs, reading, idle=False)
    yield row(end_fs, curve[-1], idle=True)
