"""What this machine's device is: found by torch, recognised in the catalogue, and how much of it is free.

The ledger budgets with a catalogue entry; on a real device the entry is the one whose name the driver gives, its total is what
the driver reports, and what other processes hold is measured before this one takes anything.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from sim.catalog.gpus import GIB, GPUS, Gpu
from sim.core.config import ConfigError
from sim.memory.non_torch import context_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What torch and the driver say of a CUDA device."""

    name: str
    """As the driver spells it, e.g. `NVIDIA H100 80GB HBM3`."""
    compute_capability: tuple[int, int]
    sm_count: int
    total_bytes: int
    free_bytes: int
    """With this process's CUDA context loaded and nothing else of it."""


def find_device(name: str) -> Any:
    """The torch device called `name`, a CUDA device with its number. Raises ConfigError when this machine has none."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ConfigError(f"device is {name!r}; it must be cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        build = " (it was built without CUDA)" if torch.version.cuda is None else ""
        raise ConfigError(
            f"device is {name!r}, but torch sees no CUDA device on this machine{build}; cpu is always there"
        )
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, but this machine has {torch.cuda.device_count()} CUDA devices")
    if kind == "cuda":
        return torch.device("cuda", int(index) if index else torch.cuda.current_device())
    return torch.device(kind)


def make_current(device: Any) -> None:
    """From here on this process works on `device`, in float32 where float32 is asked for.

    Streams, events and kernels are those of the current device, whatever tensors they are given. Matrix products of float32 may be
    rounded to TensorFloat-32 where the environment says so (NVIDIA's containers do): then a GPU's answers are not those of the CPU.
    Releases of torch after 2.13 take cuBLAS's workspace from the allocator for every product unless they are told to keep it.
    """
    if device.type == "cuda":
        os.environ.setdefault("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.fp32_precision = "ieee"


def device_facts(device: Any) -> DeviceFacts:
    """Ask a CUDA device. Loads this process's context."""
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceFacts(
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        sm_count=properties.multi_processor_count,
        total_bytes=int(total),
        free_bytes=int(free),
    )


def recognise(facts: DeviceFacts) -> Gpu:
    """The catalogue's entry for a device, with the total that the driver reports.

    The words of an entry's name must all be in the driver's name, the memory apart; among several entries the one whose
    multiprocessors agree and whose memory is nearest is taken.

    Raises:
        ConfigError: none fits; the message says what was found and what can be done.
    """
    words = set(_words(facts.name))
    found = [
        gpu
        for gpu in GPUS.values()
        if gpu.compute_capability == facts.compute_capability
        and set(_words(gpu.name)[:-1]) - {"sxm", "pcie"} <= words
        and abs(gpu.total_bytes - facts.total_bytes) < gpu.total_bytes // 8
    ]
    if not found:
        major, minor = facts.compute_capability
        raise ConfigError(
            f"this machine's GPU is {facts.name!r} (compute capability {major}.{minor}, {facts.total_bytes / GIB:.1f} GiB), which the "
            "catalogue does not have; name the entry to budget with by --gpu"
        )
    best = min(
        found,
        key=lambda gpu: (gpu.sm_count != facts.sm_count, _away(gpu, words), abs(gpu.total_bytes - facts.total_bytes)),
    )
    return replace(best, total_bytes=facts.total_bytes)


def others_bytes(facts: DeviceFacts, gpu: Gpu) -> int:
    """What other processes hold: what is not free, less this process's own context as the ledger counts it."""
    return max(facts.total_bytes - facts.free_bytes - context_bytes(gpu), 0)


def _words(name: str) -> list[str]:
    """`NVIDIA GeForce RTX 4090` -> nvidia, geforce, rtx, 4090; `NVIDIA H100 80GB HBM3` -> nvidia, h100, 80gb, hbm3."""
    return name.lower().replace("-", " ").replace("_", " ").replace("sxm4", "sxm").replace("sxm5", "sxm").split()


def _away(gpu: Gpu, words: set[str]) -> int:
    """How many of the words that tell variants apart an entry has, or lacks, against the device's name."""
    variants = {"sxm", "pcie", "nvl"}
    return len((set(_words(gpu.name)) & variants) ^ (words & variants))
