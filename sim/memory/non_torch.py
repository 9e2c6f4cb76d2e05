"""Memory outside PyTorch's allocator that appears between an engine's base line and the end of its profiling.

The one line of the ledger that has no formula: loaded kernels, library handles and communication buffers. These are
figures read off public start-up logs, few of them, and the least certain part of the account (0.05 to 0.47 GiB on one GPU).
"""

from __future__ import annotations

from sim.catalog.gpus import GIB, Gpu

from .releases import EngineRelease


def non_torch_bytes(
    gpu: Gpu, release: EngineRelease, *, tensor_parallel_size: int, pipeline_parallel_size: int
) -> tuple[int, str]:
    """The figure, and in words what it is and where it was read."""
    gib, why = _figure(gpu, release, tensor_parallel_size, pipeline_parallel_size)
    return round(gib * GIB), f"{gib:g} GiB, measured by others: {why}"


def _figure(gpu: Gpu, release: EngineRelease, tp: int, pp: int) -> tuple[float, str]:
    """GiB, and the reason."""
    recent = release.since >= (0, 17)
    if tp > 1:
        if not recent:
            return 0.30, "libraries and NCCL buffers (0.20 and 0.39 in logs of 0.6 and 0.8)"
        if gpu.link == "pcie":
            # No log of a recent release; NCCL's own buffers are 0.33 to 0.38 GiB by a vendor's planning tool.
            return 0.63, "libraries 0.25 and NCCL buffers 0.38 over PCIe"
        return 2.10, "libraries and communication buffers over NVLink (2.06 to 2.13, vLLM 0.19 on H100)"
    if pp > 1:
        return 0.07, "one GPU a stage; the base line is taken after communication is set up (vLLM 0.19 on H100)"
    if gpu.workstation:
        return (0.47, "vLLM 0.2x on a 24 GB card") if recent else (0.20, "0.08 and 0.35 in logs of 0.6 to 0.9")
    return (0.25, "0.24 to 0.27, vLLM 0.19 on H100") if recent else (0.10, "0.01 to 0.16 in logs of 0.7 to 0.10")
