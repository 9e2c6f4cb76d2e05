"""Kernels timed on a GPU: microseconds, bytes a second, and the share of the copy bandwidth measured in the same run.

Every figure is a median over many launches, with the L2 cache flushed between them. A kernel is launched by a captured graph, as a
decode step launches it: what the host does before a launch would else count for the kernels that take less. Needs a CUDA
device; nothing here is ever estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from .decode_account import HEAD_DIM, KV_HEADS, Q_HEADS, SHAPES
from .decode_error import relative_error
from .decode_graphs import CudaCapture
from .kernels.attention import DecodeCall
from .kernels.block_rows import BlockRows
from .kernels.launch import KVView, Launch
from .kernels.sampling import SampleCall
from .kernels.splits import choose_splits, resident_programs
from .layout import KVLayout
from .ops import Ops
from .require import require

BLOCK_SIZE = 16
SWEEP = ((32, 5, 4), (32, 3, 4), (32, 7, 4), (64, 5, 4), (64, 3, 4), (64, 2, 4), (64, 5, 8), (128, 3, 8))
"""(positions of a tile, stages, warps) that decode attention is tried with."""


class NoDeviceError(RuntimeError):
    """There is no CUDA device to measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One kernel at one shape."""

    name: str
    microseconds: float
    """Median."""
    num_bytes: int
    """Bytes that the operation must read and write."""
    copy_bytes_per_s: float
    """Copy bandwidth measured in the same run, bytes read and bytes written together."""
    batch_size: int = 0
    """Sequences, of a decode."""
    context_tokens: int = 0
    """KV tokens a sequence, of a decode."""
    relative_error: float | None = None
    """Of what the timed launches wrote, against float64; None where it was not looked at."""

    @property
    def bytes_per_s(self) -> float:
        """Achieved bandwidth."""
        return self.num_bytes / self.microseconds * 1e6

    @property
    def copy_share(self) -> float:
        """Achieved bandwidth over that of a copy."""
        return self.bytes_per_s / self.copy_bytes_per_s


def provenance() -> dict[str, str]:
    """Where and with what the figures were measured.

    Raises:
        NoDeviceError: torch sees no CUDA device.
    """
    if not torch.cuda.is_available():
        raise NoDeviceError(f"torch {torch.__version__} sees no CUDA device")
    triton = require("triton", "timing kernels")
    properties = torch.cuda.get_device_properties()
    return {
        "device": torch.cuda.get_device_name(),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "cuda": str(torch.version.cuda),
    }


def run() -> Iterator[Timing]:
    """Time every kernel, one after the other; the copy first.

    Raises:
        NoDeviceError: torch sees no CUDA device.
    """
    provenance()
    device = torch.device("cuda")
    ops = Ops(device, implementation="triton")
    copied = time_copy(device)
    speed = copied.copy_bytes_per_s
    yield copied
    for batch_size, context_tokens in SHAPES:
        yield time_decode(ops, batch_size, context_tokens, speed)
    yield from time_others(ops, speed)


def time_others(ops: Ops, speed: float) -> Iterator[Timing]:
    """The row-wise kernels, the block moves and the sampler, beside a copy of `speed` bytes a second."""
    for name, num_bytes, call in _others(ops, ops.device):
        microseconds = _replayed_median(call, ops.device)
        yield Timing(name=name, microseconds=microseconds, num_bytes=num_bytes, copy_bytes_per_s=speed)


def time_copy(device: Any) -> Timing:
    """The yardstick: torch's copy of a gibibyte, whose bandwidth is what the others are compared with."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    microseconds = _median(lambda: target.copy_(source))
    moved = 2 * source.numel()
    return Timing(
        name="copy (torch)", microseconds=microseconds, num_bytes=moved, copy_bytes_per_s=moved / microseconds * 1e6
    )


def _replayed_median(call: Callable[[], Any], device: Any) -> float:
    """Microseconds of what a call launches."""
    return _median(CudaCapture(device)(call))


def _median(call: Callable[[], Any]) -> float:
    """Microseconds of a call."""
    testing = require("triton.testing", "timing kernels")
    return 1000 * float(testing.do_bench(call, warmup=50, rep=200, return_mode="median"))


def time_decode(ops: Ops, batch_size: int, context_tokens: int, speed: float) -> Timing:
    """Decode attention of one layer, blocks in random order."""
    properties = torch.cuda.get_device_properties(ops.device)
    splits = choose_splits(
        num_seqs=batch_size,
        num_kv_heads=KV_HEADS,
        max_tokens=context_tokens,
        num_sms=properties.multi_processor_count,
        programs_per_sm=resident_programs((properties.major, properties.minor)),
    )
    call = _decode_call(ops.device, batch_size, context_tokens, splits)
    replay = CudaCapture(ops.device)(lambda: ops.decode_attention(call))
    timing = _decode_timing("", call, _median(replay), speed)
    call.out.fill_(float("nan"))
    replay()
    return replace(timing, relative_error=relative_error(call))


def sweep_decode(ops: Ops, batch_size: int, context_tokens: int, speed: float) -> Iterator[Timing]:
    """The same with other splits, tiles and stages than those that are chosen; what does not fit the device is left out."""
    from .kernels.decode_attention import decode_attention_launch
    from .kernels.merge_splits import merge_splits

    too_much = require("triton", "timing kernels").OutOfResources
    for splits in (1, 2, 4, 8):
        call = _decode_call(ops.device, batch_size, context_tokens, splits)
        launch = decode_attention_launch(call)
        assert launch is not None  # there are sequences
        for positions, stages, warps in SWEEP:
            tried = replace(
                launch, constants={**launch.constants, "BLOCK_N": positions, "STAGES": stages}, num_warps=warps
            )

            def run(tried: Launch = tried, call: DecodeCall = call) -> None:
                tried.run()
                if call.num_splits > 1:
                    merge_splits(call.partial_out, call.partial_lse, call.out)

            try:
                microseconds = _replayed_median(run, ops.device)
            except too_much:
                continue  # more shared memory than the device has
            yield _decode_timing(f",tile={positions},stages={stages},warps={warps}", call, microseconds, speed)


def _decode_call(device: Any, batch_size: int, context_tokens: int, splits: int) -> DecodeCall:
    dtype, blocks = torch.bfloat16, -(-context_tokens // BLOCK_SIZE)
    total = batch_size * blocks
    kv = torch.randn((total + 1, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM), dtype=dtype, device=device)
    query = torch.randn((batch_size, Q_HEADS, HEAD_DIM), dtype=dtype, device=device)
    return DecodeCall(
        query=query,
        cache=KVView.of(kv),
        block_table=(torch.randperm(total, device=device) + 1).to(torch.int32).view(batch_size, blocks),
        seq_lens=torch.full((batch_size,), context_tokens, dtype=torch.int32, device=device),
        out=torch.empty_like(query),
        softmax_scale=HEAD_DIM**-0.5,
        num_splits=splits,
        partial_out=torch.empty((batch_size, Q_HEADS, splits, HEAD_DIM), device=device),
        partial_lse=torch.empty((batch_size, Q_HEADS, splits), device=device),
    )


def _decode_timing(more: str, call: DecodeCall, microseconds: float, speed: float) -> Timing:
    batch_size, context_tokens = int(call.query.shape[0]), int(call.block_table.shape[1]) * BLOCK_SIZE
    return Timing(
        name=f"decode_attention[bf16,{batch_size}x{context_tokens},splits={call.num_splits}{more}]",
        microseconds=microseconds,
        num_bytes=batch_size * context_tokens * 2 * KV_HEADS * HEAD_DIM * 2 + 2 * call.query.numel() * 2,
        copy_bytes_per_s=speed,
        batch_size=batch_size,
        context_tokens=context_tokens,
    )


def _others(ops: Ops, device: Any) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """The row-wise kernels, the block moves and the sampler at the sizes of an 8B model: (name, bytes, call)."""
    tokens, hidden, mlp, vocab, rows = 8192, 4096, 14_336, 128_256, 256

    def numbers(*shape: int) -> Any:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    x, weight, residual, out = (
        numbers(tokens, hidden),
        numbers(hidden),
        numbers(tokens, hidden),
        numbers(tokens, hidden),
    )
    yield "rms_norm[bf16,4096,residual]", 8 * x.numel(), lambda: ops.rms_norm(x, weight, 1e-5, out, residual)
    gate, half = numbers(tokens, 2 * mlp), numbers(tokens, mlp)
    yield "silu_mul[bf16,14336]", 6 * half.numel(), lambda: ops.silu_mul(gate, half)
    query, key = numbers(tokens, Q_HEADS, HEAD_DIM), numbers(tokens, KV_HEADS, HEAD_DIM)
    table = torch.randn((tokens, HEAD_DIM), device=device)
    positions = torch.arange(tokens, device=device)
    yield "rope[bf16,128]", 4 * (query.numel() + key.numel()), lambda: ops.rope(query, key, table, positions)
    cache = KVView.of(numbers(tokens // BLOCK_SIZE + 1, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM))
    slots = torch.randperm(tokens, device=device) + BLOCK_SIZE
    yield "store_kv[bf16]", 8 * key.numel(), lambda: ops.store_kv(key, key, cache, slots)
    layout = KVLayout(num_layers=32, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE)
    pool = BlockRows.of(layout, torch.zeros(512 * layout.block_bytes, dtype=torch.uint8, device=device), 512)
    ids = torch.randperm(512, device=device)
    moved = 2 * 256 * layout.block_bytes
    yield "move_blocks[256 x 2 MiB]", moved, lambda: ops.move_blocks(pool, pool, ids[:256], ids[256:])
    sums = torch.zeros(512, dtype=torch.int32, device=device)
    yield "block_checksum[512 x 2 MiB]", 512 * layout.block_bytes, lambda: ops.block_checksum(pool, ids, sums)
    ones = torch.ones(rows, device=device)
    call = SampleCall(
        logits=numbers(rows, vocab),
        temperature=ones,
        top_k=torch.full((rows,), 50, dtype=torch.int32, device=device),
        top_p=ones * 0.9,
        uniform=torch.rand(rows, device=device),
        tokens=torch.zeros(rows, dtype=torch.int64, device=device),
    )
    yield f"sample[bf16,{vocab}]", 2 * rows * vocab, lambda: ops.sample(call)
