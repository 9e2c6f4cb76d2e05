"""Where the embedded profiles come from, and the scenarios of the recorded runs: shared by what builds them and what judges them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.scenario import Scenario

RUNS = Path("runs") / "llmservingsim"
KERNELS = Path("kernels") / "aiconfigurator"
PREFIXES = RUNS / "workloads" / "sharegpt-llama-3.1-8b-300-sps10.lengths.csv"
"""The workload of both recorded runs of Llama-3.1-8B, with its prefix hits."""
MODEL_PROFILES = (
    ("rtx4090-llama-3.1-8b", 1),
    ("rtxpro6000-llama-3.1-8b", 1),
    ("rtxpro6000-llama-3.1-8b", 2),
    ("rtxpro6000-qwen3-32b", 1),
    ("rtxpro6000-qwen3-32b", 2),
)
"""LLMServingSim kernel profiles and tensor-parallel sizes."""
CARDS = (MODEL_PROFILES[:1], MODEL_PROFILES[1:])
"""The same by card: from all tables of a card come its kernel terms."""
GPU_TABLES = ("a100_sxm", "h100_sxm", "h200_sxm", "l40s")
"""aiconfigurator tables."""
END_TO_END = {
    "rtx-4090-24gb.llama-3.1-8b.tp1": "on a recorded run under KV saturation, TTFT +0.4 %, TPOT +0.4 %, makespan -0.5 %",
    "rtx-pro-6000-96gb.llama-3.1-8b.tp1": "on a recorded run, TPOT -0.9 %, latency -1.5 %, makespan -1.4 %",
    "a100-sxm-80gb": "on recorded runs of Llama-3.1-70B over two GPUs, median TPOT -3 % at light load, -15 % at the capacity limit",
    "h100-sxm-80gb": "on 579 published rows, median TPOT error 8 %, and 5 % for those of vLLM",
}
"""What came of the profiles that were judged, from `python -m experiments.validate_profiles`; docs/validation.md has all of it."""
NOT_JUDGED = "not judged end to end: no recorded run of this GPU is at hand"
HOST_REQUESTS = 30
"""Requests of the RTX PRO 6000 run to which a host time may be fitted, and nothing else is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A recorded run and the scenario that it ran."""

    run: str
    profile: str
    settings: dict[str, Any]

    def scenario(self, **changes: Any) -> Scenario:
        """The scenario as flags would make it."""
        return Scenario.from_flags({**self.settings, **changes})


RTX_4090 = Case(
    run="rtx4090-llama-3.1-8b",
    profile="rtx-4090-24gb.llama-3.1-8b.tp1",
    settings={
        "model": "llama-3.1-8b",
        "gpu": "rtx-4090-24gb",
        "engine_version": "0.19",
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
        "max_model_len": 32768,
        "gpu_memory_utilization": 0.9,
        "async_scheduling": True,
    },
)
"""Under permanent KV saturation. Settings: the run's own meta.json."""
RTX_PRO_6000 = Case(
    run="rtxpro6000-llama-3.1-8b",
    profile="rtx-pro-6000-96gb.llama-3.1-8b.tp1",
    settings={
        "model": "llama-3.1-8b",
        "gpu": "rtx-pro-6000-96gb",
        "engine_version": "0.19",
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 128,
        "gpu_memory_utilization": 0.9,
        "async_scheduling": True,
    },
)
"""Without memory pressure; 128 sequences at most. Asynchronous scheduling is the engine's default, not recorded."""
A100 = Case(
    run="exp-0_llama-3.1-70b_2xA100",
    profile="a100-sxm-80gb",
    settings={
        "model": "llama-3.1-70b",
        "gpu": "a100-sxm-80gb",
        "tensor_parallel_size": 2,
        "engine_version": "0.8",
        "max_model_len": 20000,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
        "gpu_memory_utilization": 0.95,
    },
)
"""llm-d-benchmark's exp-0. The two budgets are vLLM's defaults on this GPU, not recorded."""
