"""Memory failures of what lies below an engine: kernels' workspaces, libraries, CUDA itself, and the host.

**Source:** the texts printed by FlashInfer, Triton, cuBLAS, NCCL, CUDA, HIP, Ray and the Linux kernel.
"""

from __future__ import annotations

from .diagnosis import Cause, Phase
from .failure_kinds import Kind, kind

DEVICE: tuple[Kind, ...] = (
    # Outside PyTorch.
    kind(
        "workspace overflow",
        r"Buffer overflow when allocating memory for (?P<_buffer>\w+) with size (?P<needed>\d+).{0,80}?only "
        r"(?P<available>\d+) bytes available",
        Phase.UNKNOWN,
        Cause.TRANSIENT_PEAK,
        "the attention kernels' fixed workspace is smaller than this batch needs; the GPU's memory is not full",
        "attention workspace",
        0.92,
    ),
    kind(
        "shared memory",
        r"out of resource: shared memory, Required: (?P<needed>\d+), Hardware limit: (?P<limit>\d+)",
        Phase.UNKNOWN,
        Cause.KERNEL_LIMIT,
        "a kernel needs more on-chip shared memory than a multiprocessor has; no GPU memory ran out",
        "shared memory",
        0.95,
    ),
    kind(
        "cuBLAS",
        r"CUBLAS_STATUS_ALLOC_FAILED",
        Phase.UNKNOWN,
        Cause.NON_TORCH,
        "cuBLAS asks CUDA directly for its handle and workspace and got nothing",
        "cuBLAS workspace",
        0.6,
    ),
    kind(
        "NCCL",
        r"NCCL[^\n]{0,160}(?:unhandled cuda error|out of memory|OOM)|Cuda failure (?:2 )?'out of memory'",
        Phase.COMMUNICATION,
        Cause.NON_TORCH,
        "NCCL allocates its buffers outside PyTorch, the first time a pair of ranks talks",
        "communication buffers",
        0.75,
    ),
    kind(
        "NVML assertion",
        r"NVML_SUCCESS == \w+ INTERNAL ASSERT",
        Phase.UNKNOWN,
        Cause.UNKNOWN,
        "PyTorch wanted to print an out-of-memory message and the driver has no NVML, as on Tegra: its numbers are "
        "lost",
        "",
        0.0,
    ),
    kind(
        "waking up",
        r"CUDA Error: out of memory at [^\n]{0,80}cumem_allocator|in create_and_map\b[^\0]{0,200}out of memory",
        Phase.AFTER_RELEASE,
        Cause.OTHER_PROCESS,
        "memory that was given back while the engine slept is not there when it wakes up: somebody else holds it",
        "",
        0.6,
    ),
    kind(
        "CUDA error",
        r"(?:CUDA|HIP) (?:driver )?error:? (?:2 )?\(?out of memory|cudaErrorMemoryAllocation|hipErrorOutOfMemory|"
        r"CUDA_ERROR_OUT_OF_MEMORY|CUDA runtime error[^\n]{0,200}out of memory|cudaMalloc failed: out of memory",
        Phase.UNKNOWN,
        Cause.NON_TORCH,
        "CUDA itself refused: the request did not come from PyTorch's allocator",
        "",
        0.45,
    ),
    # The host.
    kind(
        "host memory",
        r"DefaultCPUAllocator: (?:can't|not enough) .{0,20}memory|oom-kill|Out of memory: Killed process|Cannot "
        r"allocate memory|node running low on memory",
        Phase.UNKNOWN,
        Cause.HOST_MEMORY,
        "the machine's own memory ran out, not the GPU's",
        "",
        0.85,
    ),
)
"""Looked for after the engines' own texts, which say more."""
