"""The log that an engine leaves behind when it runs out of memory while it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.memory.device import Device
from sim.memory.start_up import StartUpFailure

from .oom_log import start_lines, torch_message

_CALLS = {
    "loading": ("_init_executor", "load_model", "create_weights"),
    "profiling": ("determine_available_memory", "profile_run", "get_multimodal_embeddings"),
    "graph capture": ("compile_or_warm_up_model", "capture_model", "_dummy_run"),
    "sampler warm-up": ("compile_or_warm_up_model", "_dummy_sampler_run", "topk_topp_sampler"),
}
"""The calls on the stack in each phase, outermost first."""
_DONE = {"loading": 0, "profiling": 1, "graph capture": 3, "sampler warm-up": 4}
"""How many of the lines about the start were printed before."""


def start_up_log(device: Device, settings: Mapping[str, Any], failure: StartUpFailure) -> str:
    """The log: the engine's arguments, what was done, the failing call, the allocator's message."""
    head, *lines = start_lines(device, settings)
    printed = [head, *lines[: _DONE[failure.phase]]]
    if failure.phase == "loading":
        printed.append("Starting to load model")
    if failure.phase == "graph capture":
        printed.append("Capturing CUDA graph shapes")
    message = torch_message(
        tried_bytes=failure.tried_bytes,
        total_bytes=device.total_bytes,
        free_bytes=failure.free_bytes,
        allocated_bytes=failure.allocated_bytes,
        unallocated_bytes=0,
        non_torch_bytes=failure.non_torch_bytes,
        others_bytes=failure.others_bytes,
        private_bytes=0,
    )
    if failure.phase == "sampler warm-up":
        rows = settings.get("max_num_seqs")
        message += f"\nRuntimeError: CUDA out of memory occurred when warming up sampler with {rows} dummy requests."
    stack = [
        f'  File "simulated_engine.py", line {line}, in {name}'
        for line, name in enumerate(_CALLS[failure.phase], start=1)
    ]
    return "\n".join([*printed, "Traceback (most recent call last):", *stack, message]) + "\n"
