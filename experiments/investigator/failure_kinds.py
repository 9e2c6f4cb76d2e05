"""The table of memory failures that are not PyTorch's own message: each known text, and what it stands for.

**Source:** texts printed by vLLM, SGLang, TensorRT-LLM, llama.cpp, FlashInfer, Triton, NCCL, cuBLAS and the Linux kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .diagnosis import Cause, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One known text."""

    name: str
    """Short name, used in rules and tests."""
    pattern: re.Pattern[str]
    """With named groups for its numbers."""
    phase: Phase
    """What it says about the phase; UNKNOWN when nothing."""
    cause: Cause
    """The cause it stands for when nothing else is known."""
    detail: str = ""
    """Which operation, where the text says."""
    score: float = 0.6
    """How sure the text alone is."""
    meaning: str
    """In words."""


def _kind(
    name: str, pattern: str, phase: Phase, cause: Cause, meaning: str, detail: str = "", score: float = 0.6
) -> Kind:
    return Kind(
        name=name,
        pattern=re.compile(pattern, re.IGNORECASE | re.DOTALL),
        phase=phase,
        cause=cause,
        detail=detail,
        score=score,
        meaning=meaning,
    )


_G = r"(?:GiB|GB)"
KINDS = (
    # vLLM, start-up.
    _kind(
        "sampler warm-up",
        r"CUDA out of memory occurred when warming up (?:the )?sampler with (?P<rows>\d+) dummy requests",
        Phase.SAMPLER_WARM_UP,
        Cause.TRANSIENT_PEAK,
        "the sampler ran once with as many rows as it may ever get, and they did not fit",
        "sampler",
        0.85,
    ),
    _kind(
        "no cache blocks",
        r"No available memory for the cache blocks|no memory is left for KV blocks",
        Phase.START_UP,
        Cause.KV_CAPACITY,
        "after weights and the profiled peak nothing of the budget is left for KV blocks",
        "no KV pool fits the budget",
        0.6,
    ),
    _kind(
        "one request does not fit",
        r"To serve at least one request with the models?['’]?s? max(?:imum)? (?:seq|model) len(?:gth)? "
        r"\(?(?P<length>[\d,]+)\)?,?\s*\(?(?P<needed>[\d.]+) GiB KV cache is needed.{0,80}?available KV cache "
        r"memory\s*\((?P<available>-?[\d.]+) GiB\)(?:.{0,400}?estimated max(?:imum)? model length is "
        r"(?P<fits>[\d,]*\d))?",
        Phase.START_UP,
        Cause.KV_CAPACITY,
        "one request of max_model_len needs more KV than the pool has",
        "one request does not fit the pool",
        0.95,
    ),
    _kind(
        "one request does not fit",
        r"model['’]s max seq(?:uence)? len(?:gth)? \((?P<length>\d+)\) is larger than the max(?:imum)? number of "
        r"tokens that can be stored in (?:the )?KV cache \((?P<tokens>\d+)\)",
        Phase.START_UP,
        Cause.KV_CAPACITY,
        "one request of max_model_len needs more KV than the pool has",
        "one request does not fit the pool",
        0.95,
    ),
    _kind(
        "free memory on start-up",
        r"Free memory on device(?:\s+\S+?)?\s*\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\)? on startup is less than desired "
        r"GPU memory utilization \((?P<util>[\d.]+),? (?P<wanted>[\d.]+) GiB\)",
        Phase.START_UP,
        Cause.OTHER_PROCESS,
        "the memory was taken before this engine did anything",
        "",
        0.85,
    ),
    _kind(
        "profiling found less memory in use",
        r"Error in memory profiling.{0,200}?Initial free memory (?P<initial>[\d.]+) GiB, current free memory "
        r"(?P<current>[\d.]+)",
        Phase.PROFILING,
        Cause.OTHER_PROCESS,
        "free memory grew while this engine only took some: another process gave some back meanwhile",
        "",
        0.85,
    ),
    # SGLang.
    _kind(
        "pool books",
        r"(?:memory leak detected|pool_memory_leak).{0,400}?(?:max_total_num_tokens|total|expected)\D{0,12}(?P<total>\d+)",
        Phase.AFTER_RELEASE,
        Cause.LEAK,
        "the pool's books do not add up while the server is idle",
        "",
        0.8,
    ),
    _kind(
        "SGLang prefill",
        r"Prefill out of memory",
        Phase.PREFILL,
        Cause.KV_CAPACITY,
        "no pool slots for a new prompt",
        "",
        0.75,
    ),
    _kind(
        "SGLang decode",
        r"Decode out of memory",
        Phase.DECODE,
        Cause.KV_CAPACITY,
        "no pool slots for the next tokens",
        "",
        0.75,
    ),
    _kind(
        "not enough memory for the pool",
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        Phase.START_UP,
        Cause.KV_CAPACITY,
        "the static share leaves nothing for the KV pool after the weights",
        "no KV pool fits the budget",
        0.7,
    ),
    _kind(
        "graph capture",
        r"Capture (?:cuda|hip) ?graph failed|CUDA graph capture failed|capture_end[^\n]{0,120}out of memory",
        Phase.GRAPH_CAPTURE,
        Cause.CUDA_GRAPHS,
        "the engine failed while it captured graphs",
        "",
        0.8,
    ),
    # kvtwin's own pool.
    _kind(
        "double release",
        r"block (?P<block>\d+) is released twice: first by",
        Phase.AFTER_RELEASE,
        Cause.DOUBLE_RELEASE,
        "somebody gave back a block that nobody held any more",
        "",
        0.95,
    ),
    _kind(
        "missing block",
        r"block (?P<block>\d+) is missing: its reference count is",
        Phase.AFTER_RELEASE,
        Cause.LEAK,
        "a block is counted as held, and no table has it",
        "",
        0.95,
    ),
    # Pools of other engines.
    _kind(
        "no free blocks",
        r"Cannot get (?P<blocks>\d+) free blocks from (?:the )?pool",
        Phase.SERVING,
        Cause.KV_CAPACITY,
        "the block pool is empty, and admission had promised more",
        "",
        0.8,
    ),
    _kind(
        "no free blocks", r"No free blocks left", Phase.SERVING, Cause.KV_CAPACITY, "the block pool is empty", "", 0.75
    ),
    _kind(
        "swap space",
        r"(?:Aborted due to|because of) the lack of CPU swap space",
        Phase.DECODE,
        Cause.KV_CAPACITY,
        "GPU blocks and swap space are both full",
        "swap space is full",
        0.8,
    ),
    _kind(
        "KV slots",
        r"failed to (?:decode the batch|find (?:a )?(?:KV|memory) slot)[^\n]{0,120}(?:n_batch = (?P<n_batch>\d+))?",
        Phase.DECODE,
        Cause.KV_CAPACITY,
        "no free KV slot for the batch",
        "",
        0.7,
    ),
    # llama.cpp, which allocates each of its parts in one piece while it starts.
    _kind(
        "buffer for the KV cache",
        r"failed to allocate buffer for (?:the )?kv[ _]cache",
        Phase.START_UP,
        Cause.KV_CAPACITY,
        "the KV cache of the whole context is one buffer, and it does not fit beside the weights",
        "no KV pool fits the budget",
        0.85,
    ),
    _kind(
        "buffer for weights",
        r"error loading model: unable to allocate|alloc_tensor_range: failed to allocate",
        Phase.LOADING,
        Cause.WEIGHTS,
        "the buffer for the weights does not fit",
        "",
        0.8,
    ),
    _kind(
        "compute buffers",
        r"failed to allocate compute (?:pp )?buffers|graph_reserve: failed to allocate",
        Phase.PROFILING,
        Cause.TRANSIENT_PEAK,
        "the buffers of one step are made at start-up, for the largest batch there may be",
        "compute buffers",
        0.8,
    ),
    # Outside PyTorch.
    _kind(
        "workspace overflow",
        r"Buffer overflow when allocating memory for (?P<_buffer>\w+) with size (?P<needed>\d+).{0,80}?only "
        r"(?P<available>\d+) bytes available",
        Phase.UNKNOWN,
        Cause.TRANSIENT_PEAK,
        "the attention kernels' fixed workspace is smaller than this batch needs; the GPU's memory is not full",
        "attention workspace",
        0.92,
    ),
    _kind(
        "shared memory",
        r"out of resource: shared memory, Required: (?P<needed>\d+), Hardware limit: (?P<limit>\d+)",
        Phase.UNKNOWN,
        Cause.KERNEL_LIMIT,
        "a kernel needs more on-chip shared memory than a multiprocessor has; no GPU memory ran out",
        "shared memory",
        0.95,
    ),
    _kind(
        "cuBLAS",
        r"CUBLAS_STATUS_ALLOC_FAILED",
        Phase.UNKNOWN,
        Cause.NON_TORCH,
        "cuBLAS asks CUDA directly for its handle and workspace and got nothing",
        "cuBLAS workspace",
        0.6,
    ),
    _kind(
        "NCCL",
        r"NCCL[^\n]{0,160}(?:unhandled cuda error|out of memory|OOM)|Cuda failure (?:2 )?'out of memory'",
        Phase.COMMUNICATION,
        Cause.NON_TORCH,
        "NCCL allocates its buffers outside PyTorch, the first time a pair of ranks talks",
        "communication buffers",
        0.75,
    ),
    _kind(
        "NVML assertion",
        r"NVML_SUCCESS == \w+ INTERNAL ASSERT",
        Phase.UNKNOWN,
        Cause.UNKNOWN,
        "PyTorch wanted to print an out-of-memory message and the driver has no NVML, as on Tegra: its numbers are "
        "lost",
        "",
        0.0,
    ),
    _kind(
        "waking up",
        r"CUDA Error: out of memory at [^\n]{0,80}cumem_allocator|in create_and_map\b[^\0]{0,200}out of memory",
        Phase.AFTER_RELEASE,
        Cause.OTHER_PROCESS,
        "memory that was given back while the engine slept is not there when it wakes up: somebody else holds it",
        "",
        0.6,
    ),
    _kind(
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
    _kind(
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
