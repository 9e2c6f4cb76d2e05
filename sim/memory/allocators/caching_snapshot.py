"""PyTorch's caching allocator, picture: its state and history in the format of `torch.cuda.memory._snapshot()`.

A pickle of the result can be opened at pytorch.org/memory_viz and by `torch.cuda._memory_viz`.
**Source:** torch/csrc/cuda/Module.cpp and torch/cuda/memory.py, PyTorch 2.13.
"""

from __future__ import annotations

from typing import Any

from .caching_blocks import Block
from .caching_expandable import mapped_runs
from .caching_settings import CachingSettings
from .caching_state import CachingState, TraceRecord


def snapshot_of(core: CachingState) -> dict[str, Any]:
    """Segments by address, the history of the device, and the settings. Tags become stack frames of one line."""
    segments = [_segment(run, core.memory.index) for head in core.heads.values() for run in mapped_runs(head)]
    traces: list[list[dict[str, Any]]] = [[] for _ in range(core.memory.index + 1)]
    traces[core.memory.index] = [_entry(record) for record in core.trace]
    return {
        "segments": sorted(segments, key=lambda segment: int(segment["address"])),
        "device_traces": traces,
        "allocator_settings": _settings(core.settings),
        "external_annotations": [],
    }


def _segment(run: list[Block], device: int) -> dict[str, Any]:
    head = run[0]
    active = [block for block in run if block.is_active]
    return {
        "device": device,
        "address": head.address,
        "total_size": sum(block.size for block in run),
        "allocated_size": sum(block.size for block in run if block.allocated),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested for block in active),
        "stream": head.stream,
        "segment_type": "small" if head.pool.small else "large",
        "segment_pool_id": head.pool.pool_id,
        "is_expandable": head.virtual is not None,
        "frames": [],
        "blocks": [_block(block) for block in run],
    }


def _block(block: Block) -> dict[str, Any]:
    if block.allocated:
        state = "active_allocated"
    else:
        state = "active_pending_free" if block.is_active else "inactive"
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested,
        "state": state,
        "frames": _frames(block.tag),
    }


def _entry(record: TraceRecord) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "action": record.action,
        "size": record.size_bytes,
        "stream": record.stream,
        "time_us": record.time_us,
        "pool_id": record.pool_id,
        "frames": _frames(record.tag),
    }
    entry["device_free" if record.action == "oom" else "addr"] = record.address
    return entry


def _frames(tag: str) -> list[dict[str, Any]]:
    return [{"filename": tag, "line": 0, "name": tag}] if tag else []


def _settings(settings: CachingSettings) -> dict[str, Any]:
    """The dictionary PyTorch writes, and what it only keeps in the conf string."""
    mib = 1 << 20
    conf = [
        f"max_non_split_rounding_mb:{settings.max_non_split_rounding_bytes // mib}",
        f"large_segment_size_mb:{settings.large_segment_size_bytes // mib}",
    ]
    if settings.per_process_memory_fraction is not None:
        conf.append(f"per_process_memory_fraction:{settings.per_process_memory_fraction!r}")
    limit = settings.max_split_size_bytes
    return {
        "PYTORCH_CUDA_ALLOC_CONF": ",".join(conf),
        "max_split_size": -1 if limit is None else limit,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {
            str(1 << index): divisions for index, divisions in enumerate(settings.roundup_power2_divisions)
        },
    }
