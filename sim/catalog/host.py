"""The CPU as a device: what a real run on the CPU budgets with when no GPU is named."""

from __future__ import annotations

from .gpus import GIB, Gpu

CPU_KV_CACHE_BYTES = GIB // 4
"""KV cache of a run on the CPU when neither blocks nor bytes are given: enough for a test, and not the machine's memory."""

HOST = Gpu(
    name="cpu",
    architecture="cpu",
    compute_capability=(8, 0),
    nominal_gb=64,
    total_bytes=64 * GIB,
    memory_bandwidth_bytes_per_s=50 * 10**9,
    bf16_flops_per_s=10**12,
    fp8_flops_per_s=None,
    int8_ops_per_s=None,
    sm_count=16,
    l2_cache_bytes=32 << 20,
    link="pcie",
    link_bytes_per_s=32 * 10**9,
    pcie_bytes_per_s=32 * 10**9,
    nominal=True,
    source="nominal figures, the same on every machine so that a scenario resolves alike; a real run measures its own times",
)
"""Not in the catalogue of GPUs: steps on it are priced by a profile that was measured, never by these figures."""
