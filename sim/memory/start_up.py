"""The start of an engine on its device, as far as faults can make it fail: weights, profile, graph capture, the sampler's warm-up.

The account says what each of these needs, and a faultless start fits by its making. Here the same order of allocations is gone
through with what the faults add, up to the first that does not fit.

**Source:** vLLM V1 `EngineCore._initialize_kv_caches` and `GPUWorker.compile_or_warm_up_model`: load, profile, allocate the pool, capture,
run the sampler.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.catalog.dtypes import DTYPE_BYTES
from sim.catalog.shape import ModelShape
from sim.catalog.weights import rank_weight_tensors

from .rounding import MIB, allocated_bytes, reserved_bytes

if TYPE_CHECKING:
    from .device import Device

_GRAPH_CHUNK_BYTES = 64 * MIB
"""What a graph's pool asks for at a time when the tensors of a batch size do not fit what it has."""
_ENCODER_TENSORS = 4
"""Hidden states, query-key-value, and the two halves of an encoder layer's MLP: alive together at its widest point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUpFailure:
    """The allocation that did not fit while the engine started. Bytes of one rank."""

    phase: str
    """`loading`, `profiling`, `graph capture` or `sampler warm-up`."""
    what: str
    """What the memory was for."""
    tried_bytes: int
    """What was asked of the device."""
    free_bytes: int
    """What it had."""
    allocated_bytes: int
    """In tensors of PyTorch at that moment."""
    private_bytes: int
    """The part of it in the pools of graphs that were captured already."""
    non_torch_bytes: int
    """Context and libraries."""
    others_bytes: int
    """Other processes."""


class StartUpError(Exception):
    """The engine ran out of memory before it served anything. `log` is what it would have left behind."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


def start_up_failure(device: Device, model: ModelShape) -> StartUpFailure | None:
    """The first allocation of the start that does not fit because of the device's faults; None when it starts."""
    if not device.faults:
        return None
    return _loading(device, model) or _profiling(device) or _capture(device) or _warm_up(device)


def _loading(device: Device, model: ModelShape) -> StartUpFailure | None:
    copies = device.faults.starting_bytes("loading")
    if copies is None:
        return None
    settings, ledger = device.ledger.settings, device.ledger
    element = DTYPE_BYTES[settings.dtype]
    tensors = rank_weight_tensors(
        model, ledger.tensor_parallel_size, ledger.pipeline_parallel_size, ledger.pipeline_rank
    )
    sizes = ((tensor.name, tensor.stored_bytes(element, settings.weight_format)) for tensor in tensors)
    return _first_that_does_not_fit(device, "loading", sizes, held_bytes=copies)


def _profiling(device: Device) -> StartUpFailure | None:
    encoder = device.faults.starting_bytes("encoder")
    if encoder is None:
        return None
    parts = (("multimodal encoder", encoder // _ENCODER_TENSORS) for _ in range(_ENCODER_TENSORS))
    return _first_that_does_not_fit(device, "profiling", parts, held_bytes=_line(device, "weights"))


def _capture(device: Device) -> StartUpFailure | None:
    more = device.faults.starting_bytes("graph_capture")
    if more is None:
        return None
    estimated = _line(device, "cuda_graphs")
    chunks = (("CUDA graphs", _GRAPH_CHUNK_BYTES) for _ in range(-(-(estimated + more) // _GRAPH_CHUNK_BYTES)))
    held = device.at(0)
    before = held.tensors_bytes - estimated + held.kv_pool_bytes
    return _first_that_does_not_fit(device, "graph capture", chunks, held_bytes=before, private=True)


def _warm_up(device: Device) -> StartUpFailure | None:
    if device.faults.starting_bytes("sampler_warm_up") is None:
        return None
    sampler = next((peak for peak in device.ledger.phases if peak.phase == "sampler"), None)
    if sampler is None:  # a stage without the sampler
        return None
    held = device.at(0)
    ops = ((op.name, op.requested_bytes) for op in sampler.ops)
    return _first_that_does_not_fit(device, "sampler warm-up", ops, held_bytes=held.tensors_bytes + held.kv_pool_bytes)


def _first_that_does_not_fit(
    device: Device, phase: str, asked: Iterable[tuple[str, int]], *, held_bytes: int, private: bool = False
) -> StartUpFailure | None:
    """The first of the allocations `asked` for, in order, that what others and `held_bytes` leave is too small for."""
    held = device.at(0)
    # The context is there first; kernels and communication come with the first forward pass.
    outside = held.non_torch_bytes if phase != "loading" else _line(device, "context")
    room = device.total_bytes - held.others_bytes - outside - held_bytes
    alive = 0
    for what, size in asked:
        if alive + allocated_bytes(size) > room:
            return StartUpFailure(
                phase=phase,
                what=what,
                tried_bytes=reserved_bytes(size),
                free_bytes=max(0, room - alive),
                allocated_bytes=held_bytes + alive,
                private_bytes=alive if private else 0,
                non_torch_bytes=outside,
                others_bytes=held.others_bytes,
            )
        alive += allocated_bytes(size)
    return None


def _line(device: Device, name: str) -> int:
    return sum(line.bytes for line in device.ledger.lines if line.name == name)
