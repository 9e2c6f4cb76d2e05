"""Memory failures as engines put them: vLLM, SGLang, kvtwin's own pool, TensorRT-LLM, llama.cpp.

**Source:** the texts those programs print.
"""

from __future__ import annotations

from .diagnosis import Cause, Phase
from .failure_kinds import Kind, kind

ENGINES: tuple[Kind, ...] = (
    # vLLM, start-up.
    kind(
        "sampler warm-up",
        r"CUDA out of memory occurred when warming up (?:the )?sampler with (?P<rows>\d+) dummy requests",
        Phase.SAMPLER_WARM_UP,
        Cause.TRANSIENT_PEAK,
        "the sampler ran once with as many rows as it may ever get, and they did not fit",
        "sampler",
        0.85,
    ),
    kind(
        "no cache blocks",
        r"No available memory for the cache blocks|no memory is left for KV blocks",
        Phase.START_UP,
        Cause.KV_CAPACITY,
        "after weights and the profiled peak nothing of the budget is left for KV blocks",
        "no KV pool fits the budget",
        0.6,
    ),
    kind(
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
    kind(
        "one request does not fit",
        r"model['’]s max seq(?:uence)? len(?:gth)? \((?P<length>\d+)\) is larger than the max(?:imum)? number of "
        r"tokens that can be stored in (?:the )?KV cache \((?P<tokens>\d+)\)",
        Phase.START_UP,
        Cause.KV_CAPACITY,
        "one request of max_model_len needs more KV than the pool has",
        "one request does not fit the pool",
        0.95,
    ),
    kind(
        "free memory on start-up",
        r"Free memory on device(?:\s+\S+?)?\s*\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\)? on startup is less than desired "
        r"GPU memory utilization \((?P<util>[\d.]+),? (?P<wanted>[\d.]+) GiB\)",
        Phase.START_UP,
        Cause.OTHER_PROCESS,
        "the memory was taken before this engine did anything",
        "",
        0.85,
    ),
    kind(
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
    kind(
        "pool books",
        r"(?:memory leak detected|pool_memory_leak).{0,400}?(?:max_total_num_tokens|total|expected)\D{0,12}(?P<total>\d+)",
        Phase.AFTER_RELEASE,
        Cause.LEAK,
        "the pool's books do not add up while the server is idle",
        "",
        0.8,
    ),
    kind(
        "SGLang prefill",
        r"Prefill out of memory",
        Phase.PREFILL,
        Cause.KV_CAPACITY,
        "no pool slots for a new prompt",
        "",
        0.75,
    ),
    kind(
        "SGLang decode",
        r"Decode out of memory",
        Phase.DECODE,
        Cause.KV_CAPACITY,
        "no pool slots for the next tokens",
        "",
        0.75,
    ),
    kind(
        "not enough memory for the pool",
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        Phase.START_UP,
        Cause.KV_CAPACITY,
        "the static share leaves nothing for the KV pool after the weights",
        "no KV pool fits the budget",
        0.7,
    ),
    kind(
        "graph capture",
        r"Capture (?:cuda|hip) ?graph failed|CUDA graph capture failed|capture_end[^\n]{0,120}out of memory",
        Phase.GRAPH_CAPTURE,
        Cause.CUDA_GRAPHS,
        "the engine failed while it captured graphs",
        "",
        0.8,
    ),
    # kvtwin's own pool.
    kind(
        "double release",
        r"block (?P<block>\d+) is released twice: first by",
        Phase.AFTER_RELEASE,
        Cause.DOUBLE_RELEASE,
        "somebody gave back a block that nobody held any more",
        "",
        0.95,
    ),
    kind(
        "missing block",
        r"block (?P<block>\d+) is missing: its reference count is",
        Phase.AFTER_RELEASE,
        Cause.LEAK,
        "a block is counted as held, and no table has it",
        "",
        0.95,
    ),
    # Pools of other engines.
    kind(
        "no free blocks",
        r"Cannot get (?P<blocks>\d+) free blocks from (?:the )?pool",
        Phase.SERVING,
        Cause.KV_CAPACITY,
        "the block pool is empty, and admission had promised more",
        "",
        0.8,
    ),
    kind(
        "no free blocks", r"No free blocks left", Phase.SERVING, Cause.KV_CAPACITY, "the block pool is empty", "", 0.75
    ),
    kind(
        "swap space",
        r"(?:Aborted due to|because of) the lack of CPU swap space",
        Phase.DECODE,
        Cause.KV_CAPACITY,
        "GPU blocks and swap space are both full",
        "swap space is full",
        0.8,
    ),
    kind(
        "KV slots",
        r"failed to (?:decode the batch|find (?:a )?(?:KV|memory) slot)[^\n]{0,120}(?:n_batch = (?P<n_batch>\d+))?",
        Phase.DECODE,
        Cause.KV_CAPACITY,
        "no free KV slot for the batch",
        "",
        0.7,
    ),
    # llama.cpp, which allocates each of its parts in one piece while it starts.
    kind(
        "buffer for the KV cache",
        r"failed to allocate buffer for (?:the )?kv[ _]cache",
        Phase.START_UP,
        Cause.KV_CAPACITY,
        "the KV cache of the whole context is one buffer, and it does not fit beside the weights",
        "no KV pool fits the budget",
        0.85,
    ),
    kind(
        "buffer for weights",
        r"error loading model: unable to allocate|alloc_tensor_range: failed to allocate",
        Phase.LOADING,
        Cause.WEIGHTS,
        "the buffer for the weights does not fit",
        "",
        0.8,
    ),
    kind(
        "compute buffers",
        r"failed to allocate compute (?:pp )?buffers|graph_reserve: failed to allocate",
        Phase.PROFILING,
        Cause.TRANSIENT_PEAK,
        "the buffers of one step are made at start-up, for the largest batch there may be",
        "compute buffers",
        0.8,
    ),
)
"""In the order in which they are looked for; of texts of one name the first wins."""
