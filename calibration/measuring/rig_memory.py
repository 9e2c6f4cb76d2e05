"""What is always there once a rig is made, by ledger line; and what the executor would take under other limits.

On CUDA the driver is asked before and after, so that what is neither tensor nor graph is found as the rest. On the CPU it is what the
process holds beside its tensors: interpreter and libraries.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpu.batch import batch_limits, input_bytes
from gpu.decoder_room import decode_splits, workspace_bytes
from gpu.device import device_facts
from gpu.executor import TorchExecutor
from gpu.nvml import nvml_reading
from gpu.readings import process_bytes, storage_bytes
from sim.core.config import EngineConfig

from .design import Limits

SHARES = (1.0, 0.61, 0.27, 0.11)
"""Of each limit, to see how what is taken once follows from it; not halves, at which what is rounded to blocks and bytes would not show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What was in use before the rig took anything."""

    process_bytes: int | None
    """Resident memory of this process."""
    in_use_bytes: int | None
    """Of the GPU, with this process's context loaded; None on the CPU."""
    context_bytes: int | None
    """The part of it that is this process's own; None where the driver does not tell what others hold."""

    @classmethod
    def now(cls, device: Any) -> Before:
        """Ask, before anything is made."""
        if torch.device(device).type != "cuda":
            return cls(process_bytes=process_bytes(), in_use_bytes=None, context_bytes=None)
        facts = device_facts(device)
        in_use, others = facts.total_bytes - facts.free_bytes, _others_bytes(device)
        context = None if others is None else max(0, in_use - others)
        return cls(process_bytes=process_bytes(), in_use_bytes=in_use, context_bytes=context)


def memory_lines(executor: TorchExecutor, limits: Limits, before: Before) -> dict[str, Any]:
    """Bytes by name, as `run.json` keeps them; None for what this device does not tell."""
    pool, forward = executor.pool, executor.forward
    counters = pool.counters()
    cuda = pool.device.type == "cuda"
    graphs = None if not cuda else 0 if forward.graphs is None else forward.graphs.captured_bytes
    found: dict[str, Any] = {
        "weights_bytes": executor.model.weights.num_bytes,
        "kv_cache_bytes": counters.reserved_bytes,
        "kv_block_bytes": counters.reserved_bytes // (limits.num_gpu_blocks + 1),
        "workspace_bytes": executor.workspace.num_bytes,
        "buffers_bytes": forward.buffers.held_bytes[0] + storage_bytes([executor.model.rope_table]),
        "cuda_graphs_bytes": graphs,
        "context_bytes": before.context_bytes,
        "process_bytes_before_model": before.process_bytes,
        "process_bytes": process_bytes(),
        "device_reserved_bytes": counters.device_reserved_bytes,
    }
    found["non_torch_bytes"] = non_torch_bytes(executor, before, found)
    found["by_limits"] = list(_by_limits(executor, limits))
    return found


def non_torch_bytes(executor: TorchExecutor, before: Before, known: dict[str, Any]) -> int | None:
    """What is in use now and is neither tensor nor graph: on a GPU since the context was loaded, on the CPU of the whole process.

    `known` are the lines found so far. None where the system does not tell.
    """
    device = executor.pool.device
    tensors: int = sum(known[name] for name in ("weights_bytes", "kv_cache_bytes", "buffers_bytes"))
    if device.type != "cuda":
        now = process_bytes()
        return None if now is None else max(0, now - tensors - executor.workspace.high_water_bytes)
    free, total = torch.cuda.mem_get_info(device)
    taken: int = tensors + known["workspace_bytes"] + known["cuda_graphs_bytes"]
    return max(0, int(total) - int(free) - (before.in_use_bytes or 0) - taken)


def _by_limits(executor: TorchExecutor, limits: Limits) -> Iterator[dict[str, int]]:
    """What the executor reserves, and the buffers it makes, under limits up to those that are measured."""
    model, device = executor.model, executor.pool.device
    row_bytes = storage_bytes([model.rope_table]) // model.rope_table.shape[0]
    for tokens in _smaller(limits.max_num_batched_tokens):
        for seqs in _smaller(limits.max_num_seqs):
            for longest in _smaller(limits.max_model_len):
                engine = EngineConfig(
                    num_gpu_blocks=1,
                    block_size=limits.block_size,
                    max_model_len=longest,
                    max_num_seqs=seqs,
                    max_num_batched_tokens=max(tokens, seqs),
                )
                inputs = input_bytes(**batch_limits(engine))
                yield {
                    "max_num_batched_tokens": engine.max_num_batched_tokens,
                    "max_num_seqs": seqs,
                    "max_model_len": longest,
                    "workspace_bytes": workspace_bytes(
                        model.config,
                        engine,
                        element_bytes=model.weights.tensors[0].element_size(),
                        splits=[decode_splits(model.config, engine, device, count) for count in range(1, seqs + 1)],
                        twins=model.ops.meant == "torch",
                    ),
                    "buffers_bytes": inputs + model.ops.staging.on_device.reserved_bytes + row_bytes * longest,
                }


def _smaller(limit: int) -> list[int]:
    return sorted({max(1, round(limit * share)) for share in SHARES}, reverse=True)


def _others_bytes(device: Any) -> int | None:
    """What other processes hold of a GPU; None where the driver does not tell."""
    said = nvml_reading(device)
    sizes = [one["used_bytes"] for one in said.get("processes") or () if one["pid"] != os.getpid()]
    return None if "processes" not in said or None in sizes else sum(sizes)
