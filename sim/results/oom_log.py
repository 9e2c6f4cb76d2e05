"""What a simulated engine that ran out of memory leaves behind: a log and a memory snapshot, as a real one would.

The log has the start-up account in vLLM's words, and for each failed step its batch, the call that failed, and the allocator's message
with the figures of that moment. The snapshot is what `torch.cuda.memory._dump_snapshot` would have written. Both say what could be
seen on the device; neither says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.catalog.size_text import size_text
from sim.core.clock import to_s
from sim.memory.device import Device
from sim.memory.rounding import MIB, SEGMENT_GRAIN_BYTES

from .memory_curve import tightest
from .memory_record import OomEvent
from .recorder import Recorder, RunRecord

MOST_MESSAGES = 20
"""Failed steps that are written out; the rest are counted."""
OTHER_PROCESS = 4242
"""Process number under which the message lists what other processes hold."""
_PIECE_BYTES, _PIN_BYTES = 16 * MIB, 2 * MIB
"""What lies stuck in the allocator: segments of so much, each behind a tensor of so much."""
_CALLS = {
    "prefill": ("execute_model", "prefill_forward"),
    "decode": ("execute_model", "forward_decode"),
    "logits": ("execute_model", "compute_logits"),
    "sampler": ("sample_tokens", "topk_topp_sampler"),
    "verification": ("sample_tokens", "rejection_sampler"),
    "prompt_logprobs": ("execute_model", "_get_prompt_logprobs_dict"),
}
"""The calls on the stack in each phase of a step, outermost first."""
_ANY_CALL = ("execute_model",)
"""What is on it where a real device says no more than that a step failed."""


def oom_log(record: RunRecord, settings: Mapping[str, Any]) -> str:
    """The log of the tightest replica, empty when no step failed; `settings` are shown as the engine's arguments."""
    recorder = tightest(record)
    if recorder is None or recorder.memory is None or not recorder.memory.ooms:
        return ""
    device, ooms = recorder.memory.device, recorder.memory.ooms
    lines = start_lines(device, settings)
    for event in ooms[:MOST_MESSAGES]:
        lines += _failure(recorder, device, event)
    if len(ooms) > MOST_MESSAGES:
        lines.append(f"{len(ooms) - MOST_MESSAGES} more steps failed alike")
    return "\n".join(lines) + "\n"


def oom_snapshot(record: RunRecord) -> dict[str, Any] | None:
    """The memory snapshot of the first failed step of the tightest replica; None when no step failed."""
    recorder = tightest(record)
    if recorder is None or recorder.memory is None or not recorder.memory.ooms:
        return None
    event, device = recorder.memory.ooms[0], recorder.memory.device
    held = device.at(event.start_fs)
    alive = held.left_bytes - event.report.free_bytes
    pieces, pins = _pieces(held.stuck_bytes)
    segments = [
        _segment(held.tensors_bytes - pins, "active_allocated"),
        _segment(held.kv_pool_bytes, "active_allocated"),
        _segment(max(0, alive), "active_allocated"),
        _segment(held.private_bytes, "inactive", pool=(0, 1)),
        _segment(held.pending_bytes, "active_pending_free"),
        *pieces,
    ]
    address, placed = 1 << 32, []
    for segment in (segment for segment in segments if segment["total_size"]):
        placed.append({**segment, "address": address, "blocks": _placed(segment["blocks"], address)})
        address += segment["total_size"]
    history = {
        "action": "oom",
        "addr": event.report.free_bytes,
        "device_free": event.report.free_bytes,
        "size": event.report.requested_bytes,
        "stream": 0,
        "time_us": event.start_fs // 10**9,
        "frames": [],
    }
    return {"segments": placed, "device_traces": [[history]]}


def start_lines(device: Device, settings: Mapping[str, Any]) -> list[str]:
    """What an engine prints of its memory while it starts, in vLLM's words; its arguments first."""
    ledger = device.ledger
    shown = ", ".join(f"{key}={value}" for key, value in settings.items() if value is not None)
    graphs = [line for line in ledger.lines if line.name == "cuda_graphs" and line.bytes]
    return [
        f"kvtwin, a simulated {ledger.engine} {ledger.engine_version}: {shown}",
        f"Model loading took {ledger.line('weights').gib:.2f} GiB",
        f"Available KV cache memory: {ledger.line('kv_pool').gib:.2f} GiB",
        f"GPU KV cache size: {ledger.kv_tokens:,} tokens",
        *(f"Graph capturing finished in 1 secs, took {line.gib:.2f} GiB" for line in graphs),
        "Application startup complete.",
    ]


def _failure(recorder: Recorder, device: Device, event: OomEvent) -> list[str]:
    shape = event.shape
    phase = event.report.op.partition(":")[0]
    prompts = f"{len(shape.prefill)} prompt chunks" + (
        f", the longest up to a prompt length of {max(cached + new for new, cached in shape.prefill)} tokens"
        if shape.prefill
        else ""
    )
    used = event.used_blocks / recorder.core.pool.num_blocks
    return [
        f"{to_s(event.start_fs):.6f} s, step {event.step}: {shape.num_tokens} tokens in {prompts}; {shape.decode_seqs} sequences "
        f"decode; {used:.1%} of the KV blocks are in use",
        "Traceback (most recent call last):",
        *(
            f'  File "simulated_engine.py", line {line}, in {name}'
            for line, name in enumerate(_CALLS.get(phase, _ANY_CALL), start=1)
        ),
        _message(device, event),
    ]


def _message(device: Device, event: OomEvent) -> str:
    held, report = device.at(event.start_fs), event.report
    alive = max(0, held.left_bytes - report.free_bytes)
    allocated = held.tensors_bytes + held.kv_pool_bytes + held.private_bytes + alive
    unallocated = held.stuck_bytes + held.pending_bytes
    return torch_message(
        tried_bytes=report.requested_bytes,
        total_bytes=device.total_bytes,
        free_bytes=report.free_bytes,
        allocated_bytes=allocated,
        unallocated_bytes=unallocated,
        non_torch_bytes=held.non_torch_bytes,
        others_bytes=held.others_bytes,
        private_bytes=held.private_bytes,
    )


def torch_message(
    *,
    tried_bytes: int,
    total_bytes: int,
    free_bytes: int,
    allocated_bytes: int,
    unallocated_bytes: int,
    non_torch_bytes: int,
    others_bytes: int,
    private_bytes: int,
) -> str:
    """The message of PyTorch's allocator with these figures. **Source:** c10/cuda/CUDACachingAllocator.cpp, 2.2 and later."""
    others = f"Process {OTHER_PROCESS} has {size_text(others_bytes)} memory in use. " if others_bytes else ""
    pools = f"with {size_text(private_bytes)} allocated in private pools (e.g., CUDA Graphs), " if private_bytes else ""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size_text(tried_bytes)}. GPU 0 has a total "
        f"capacity of {size_text(total_bytes)} of which {size_text(free_bytes)} is free. {others}Including "
        f"non-PyTorch memory, this process has {size_text(allocated_bytes + unallocated_bytes + non_torch_bytes)} memory in use. Of "
        f"the allocated memory {size_text(allocated_bytes)} is allocated by PyTorch, {pools}and {size_text(unallocated_bytes)} is "
        "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def _segment(size: int, state: str, pool: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """A segment of one block; whole segments of 2 MiB, as the allocator asks for them."""
    size = size // SEGMENT_GRAIN_BYTES * SEGMENT_GRAIN_BYTES
    used = size if state != "inactive" else 0
    block = {"size": size, "requested_size": used, "state": state, "frames": []}
    return _segment_of([block], allocated=used if state == "active_allocated" else 0, active=used, pool=pool)


def _segment_of(
    blocks: list[dict[str, Any]], *, allocated: int, active: int, pool: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    return {
        "device": 0,
        "total_size": sum(block["size"] for block in blocks),
        "allocated_size": allocated,
        "active_size": active,
        "requested_size": active,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": pool,
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _pieces(stuck_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """Segments of 16 MiB, each with a tensor of 2 MiB that keeps the other 14 from going back; and the bytes of those tensors."""
    pieces, free = [], _PIECE_BYTES - _PIN_BYTES
    for _ in range(stuck_bytes // free):
        pin = {"size": _PIN_BYTES, "requested_size": _PIN_BYTES, "state": "active_allocated", "frames": []}
        rest = {"size": free, "requested_size": 0, "state": "inactive", "frames": []}
        pieces.append(_segment_of([pin, rest], allocated=_PIN_BYTES, active=_PIN_BYTES))
    return pieces, len(pieces) * _PIN_BYTES


def _placed(blocks: list[dict[str, Any]], address: int) -> list[dict[str, Any]]:
    placed = []
    for block in blocks:
        placed.append({"address": address, **block})
        address += block["size"]
    return placed
