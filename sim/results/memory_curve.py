"""The memory curve of a run (`memory.csv`): what was allocated, reserved and left over time, line by line.

A paged engine allocates its KV pool once, and a curve of that would be flat. So the pool counts here with its blocks in use, in
`allocated_bytes` and in all that contains it; `kv_free_bytes` is the rest of it. Samples are taken between steps, when temporary
tensors are gone: what they need at their widest is `workspace_bytes`, and the allocator keeps the most of it in `reserved_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from sim.core.clock import FS_PER_S

from .memory_record import MemoryRecord
from .recorder import Recorder, Row, RunRecord

MEMORY_COLUMNS: dict[str, str] = {
    "time_s": "float",
    "allocated_bytes": "int",
    "reserved_bytes": "int",
    "in_use_bytes": "int",
    "total_bytes": "int",
    "active_sequences": "int",
    "tokens": "int",
    "batch_tokens": "int",
    "prefill_tokens": "int",
    "decode_sequences": "int",
    "phase": "text",
    "workspace_bytes": "int",
    "workspace_phase": "text",
    "headroom_bytes": "int",
    "kv_used_bytes": "int",
    "kv_free_bytes": "int",
    "tensors_bytes": "int",
    "weights_bytes": "int",
    "cuda_graphs_bytes": "int",
    "non_torch_bytes": "int",
    "other_processes_bytes": "int",
    "replica": "int",
}
"""Columns of memory.csv, in order; bytes of one rank. A row is the end of an interval of steps of equal composition (a row of
timeline.csv), or the beginning or end of an idle time (`phase` idle). `allocated_bytes` are tensors that live between steps,
`reserved_bytes` what PyTorch holds, `in_use_bytes` the whole process; `tokens` are those in block tables. `workspace_bytes` is the
most that a step of the interval needed for temporary tensors, in `workspace_phase`; `batch_tokens` are the tokens of that step as it
was planned: its `prefill_tokens` and one for each of its `decode_sequences`. `headroom_bytes` is the least that a step left, negative
when that much was missing. `weights_bytes` and `cuda_graphs_bytes` are parts of `tensors_bytes`. Each replica has rows of its own."""


def tightest(record: RunRecord) -> Recorder | None:
    """The replica that came closest to the end of its memory; None when no device is known."""
    known = [recorder for recorder in record.recorders if recorder.memory is not None]
    return min(known, key=_least_headroom, default=None)


def memory_columns(record: RunRecord) -> dict[str, list[Any]]:
    """The curves of all replicas, by time and replica; no columns when no device is known."""
    known = [(recorder, recorder.memory) for recorder in record.recorders if recorder.memory is not None]
    if not known:
        return {}
    # Stable: rows of one replica at one moment keep their order.
    rows = sorted((row for recorder, memory in known for row in _samples(recorder, memory)), key=_TIME_AND_REPLICA)
    return {name: list(column) for name, column in zip(MEMORY_COLUMNS, zip(*rows, strict=True), strict=True)}


_TIME_AND_REPLICA = itemgetter(0, -1)


def _least_headroom(recorder: Recorder) -> tuple[int, int]:
    assert recorder.memory is not None
    return recorder.memory.min_headroom_bytes, recorder.replica


def _samples(recorder: Recorder, memory: MemoryRecord) -> Iterator[tuple[Any, ...]]:
    device, replica = memory.device, recorder.replica
    block_bytes = device.block_bytes(recorder.core.pool.num_blocks)
    steady = None if device.faults else device.at(0)
    total, kept = device.total_bytes, 0

    def sample(time_fs: int, row: Row | None) -> tuple[Any, ...]:
        nonlocal kept
        held = steady or device.at(time_fs)
        used = running = tokens = workspace = prefill = decode = 0
        widest, phase, headroom = "", "idle", held.left_bytes
        if row is not None and row.memory is not None:
            memory = row.memory
            used, running, tokens, workspace = (
                row.used_blocks_end * block_bytes,
                row.running,
                memory.tokens,
                memory.workspace_bytes,
            )
            prefill, decode = memory.prefill_tokens, memory.decode_sequences
            widest, phase, headroom = memory.phase, "prefill" if prefill else "decode", memory.headroom_bytes
            if workspace > kept:
                kept = max(kept, min(workspace, held.left_bytes))
        tensors = held.tensors_bytes + held.private_bytes
        reserved = tensors + used + kept + held.stuck_bytes + held.pending_bytes + held.cached_bytes
        return (
            time_fs / FS_PER_S,
            tensors + used,
            reserved,
            reserved + held.non_torch_bytes,
            total,
            running,
            tokens,
            prefill + decode,
            prefill,
            decode,
            phase,
            workspace,
            widest,
            headroom,
            used,
            held.kv_pool_bytes - used,
            tensors,
            held.weights_bytes,
            held.graphs_bytes + held.private_bytes,
            held.non_torch_bytes,
            held.others_bytes,
            replica,
        )

    end_fs = 0
    yield sample(0, None)
    for row in recorder.rows:
        if row.start_fs > end_fs:
            if end_fs:
                yield sample(end_fs, None)
            yield sample(row.start_fs, None)
        yield sample(row.end_fs, row)
        end_fs = row.end_fs
    if end_fs:
        yield sample(end_fs, None)
