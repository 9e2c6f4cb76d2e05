"""Memory outside PyTorch's allocator: the CUDA context, loaded kernels and their stacks, communication buffers.

None of it is a tensor, so none of it can be counted from a shape. The parts that follow from the hardware are formulas; what is left
are figures read off public start-up logs, named below, and they are the least certain part of the account.
"""

from __future__ import annotations

from sim.catalog.gpus import GIB, Gpu

from .ops import Op
from .releases import EngineRelease
from .rounding import MIB

CONTEXT_BYTES = round(0.13 * GIB)
"""A CUDA context's fixed part, and its part for each multiprocessor (scheduler state, default stacks). Two logs: 0.35 GiB in use outside
PyTorch on an RTX 3090 (82 multiprocessors, vLLM 0.6.4, 0.07 of it kernels), 0.38 GiB before loading on an H100 (132, SGLang 0.4.1)."""
CONTEXT_BYTES_PER_SM = round(1.8 * MIB)
KERNELS_BYTES = round(0.07 * GIB)
"""Loaded kernels and library handles: 0.01, 0.05, 0.07, 0.08 and 0.16 GiB in logs of 0.7 to 0.10; 0.07 on a pipeline stage of 0.19."""
SAMPLER_MODULES_BYTES = round(0.03 * GIB)
"""What the sampler's and the captured graphs' kernels add in 0.19: the H100 table without the stack below."""
STACK_THREADS_PER_SM = 1536
"""Threads for which the driver keeps a stack, a multiprocessor. Two H100 rows differ only in their kernel's stack (Llama and Granite:
0.25 and 0.46 GiB with 768 and 1,888 bytes a thread) and give this number."""

# Bytes of stack a thread of vLLM's top-k / top-p kernel: compiled from the source of 0.19 with Triton 3.6 for each target.
# A vocabulary that is no multiple of 16 cannot be read in vectors, and spills more.
_SAMPLER_STACK = {(7, 5): 920, (8, 0): 1008, (8, 6): 840, (8, 9): 840, (9, 0): 768, (10, 0): 760, (12, 0): 1080}
_SAMPLER_STACK_UNALIGNED = {(8, 0): 2824, (8, 6): 1864, (8, 9): 1864, (9, 0): 1888, (10, 0): 1840, (12, 0): 2080}


def context_bytes(gpu: Gpu) -> int:
    """What one process holds on the device before it has allocated anything."""
    return CONTEXT_BYTES + gpu.sm_count * CONTEXT_BYTES_PER_SM


def context_op(gpu: Gpu) -> Op:
    """The engine's own CUDA context."""
    return Op(
        name="CUDA context",
        requested_bytes=context_bytes(gpu),
        formula=f"{CONTEXT_BYTES} B + {gpu.sm_count} multiprocessors x {CONTEXT_BYTES_PER_SM} B",
        is_tensor=False,
    )


def library_ops(gpu: Gpu, release: EngineRelease, *, vocab_size: int, samples: bool) -> tuple[Op, ...]:
    """Loaded kernels and their stacks on one rank; `samples` is False on pipeline stages without the sampler."""
    found = [_given("kernels and handles", KERNELS_BYTES, "read off public logs")]
    if release.sampler_kernel and samples:
        found.append(_given("sampler kernels", SAMPLER_MODULES_BYTES, "read off public logs"))
        table = _SAMPLER_STACK_UNALIGNED if vocab_size % 16 else _SAMPLER_STACK
        stack = table.get(gpu.compute_capability, max(table.values()))
        threads = gpu.sm_count * STACK_THREADS_PER_SM
        found.append(_given("stack of the sampling kernel", stack * threads, f"{stack} B x {threads} threads"))
    if release.sampler_kernel and gpu.workstation:
        # Two logs of recent releases on 24 GB cards exceed the above by 0.27 and 0.35 GiB: what a second process's context takes
        # on 82 and 128 multiprocessors. Data-centre logs show nothing of the kind.
        found.append(_given("context of a front-end process", context_bytes(gpu), "as the engine's own"))
    return tuple(found)


def communication_ops(gpu: Gpu, release: EngineRelease, tensor_parallel_size: int) -> tuple[Op, ...]:
    """Communication buffers that appear between the base line and the end of profiling."""
    if tensor_parallel_size == 1:
        return ()
    if gpu.link == "pcie":
        if release.sampler_kernel:
            # No log of a recent release; NCCL's own buffers are 0.33 to 0.38 GiB by a vendor's planning tool.
            return (_given("NCCL buffers over PCIe", round(0.38 * GIB), "a vendor's planning tool"),)
        return (_given("NCCL buffers over PCIe", round(0.13 * GIB), "logs of 0.8: 0.20 GiB with kernels, TP4 and TP8"),)
    if not release.communication_counted:
        return (
            _given("NCCL buffers over NVLink", round(0.13 * GIB), "set up before the base line; the rest as over PCIe"),
        )
    # TP2 less TP1 is 1.79 GiB in a log of 0.6.5 and 1.82 in those of 0.19; TP4 less TP1 is 1.88 (all H100): a fixed part, and
    # one for each peer.
    size = round((1.79 + 0.03 * (min(tensor_parallel_size, 8) - 1)) * GIB)
    return (
        _given("NCCL, all-reduce and symmetric buffers over NVLink", size, "1.79 GiB + 0.03 GiB a peer, read off logs"),
    )


def _given(name: str, size: int, text: str) -> Op:
    return Op(name=name, requested_bytes=size, formula=f"{size} B ({text})", is_tensor=False)
