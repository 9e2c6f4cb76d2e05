"""How exact the ledger is: blind predictions against what real engines printed at start-up.

`python -m experiments.ledger_table [DATA]` prints one line for each public start-up log and configuration: KV blocks as the engine
reported them, as the ledger predicts them from the configuration alone, and as the naive formula does, `utilisation * total - weights`.
No memory figure of a log goes in. Logs whose configuration is not stated in full are listed with what is missing.
"""

from __future__ import annotations

import csv
import os
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sim.catalog.gpus import GIB
from sim.catalog.gpus import gpu as gpu_named
from sim.catalog.models import model_shape
from sim.core.config import ConfigError
from sim.memory import Ledger, build_ledger

# Names that logs give to models and cards, where the catalogue has another one.
_MODELS = {
    "Llama-3.1-8B (14.9888 GB)": "llama-3.1-8b",
    "Qwen3-0.6B class (1.12 GiB)": "qwen3-0.6b",
    "Qwen2 32B (QwQ-32B) TP4": "qwen2.5-32b",
    "Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "llava-hf/llava-v1.6-mistral-7b-hf": "llava-v1.6-mistral-7b",
}
_CARDS = {
    "RTX 4090": "rtx-4090-24gb",
    "RTX 3090": "rtx-3090-24gb",
    "H100 80GB": "h100-sxm-80gb",
    "T4 16GB": "t4-16gb",
    "A10G/L4 24GB": "l4-24gb",
    "A100-40GB": "a100-sxm-40gb",
    "RTX 2080 Ti 22GB": "rtx-2080-ti-22gb",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One log with its configuration."""

    label: str
    """Model, card and release."""
    settings: dict[str, Any]
    """Arguments of `build_ledger`."""
    blocks: int | None = None
    """KV blocks that the engine reported."""
    kv_gib: float | None = None
    """KV memory that it reported, where it reported no blocks."""
    printed: dict[str, float] = field(default_factory=dict)
    """Lines that it reported, in GiB, by the ledger's names."""
    missing: str = ""
    """What the log does not state; such a log is not predicted."""


def data_folder(argument: str | None = None) -> Path:
    """Where public logs lie: the argument, the variable KVTWIN_DATA, or `../shared/data` beside this repository."""
    named = argument or os.environ.get("KVTWIN_DATA")
    return Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"


def cases(folder: Path) -> list[Case]:
    """Every log of vLLM 0.6 and later, and of SGLang, in the two public tables under `folder`."""
    with (folder / "memory" / "kv_capacity_logs.csv").open(encoding="utf-8") as file:
        found = [case for row in csv.DictReader(file) if (case := _log(row)) is not None]
    with (folder / "memory" / "vllm_0.19_h100_ledger.csv").open(encoding="utf-8") as file:
        return found + [_h100(row) for row in csv.DictReader(file)]


def predicted(case: Case) -> Ledger:
    """The ledger of a case, from its configuration."""
    return build_ledger(**case.settings)


def naive_blocks(case: Case, account: Ledger) -> float:
    """Blocks by `utilisation * total - weights`: what one gets without an account."""
    weights = account.line("weights").ops[0].requested_bytes
    total = gpu_named(case.settings["gpu"]).nominal_gb * GIB
    return (account.gpu_memory_utilization * total - weights) / account.block_bytes


def block_error(case: Case, account: Ledger) -> float | None:
    """Relative error of the predicted pool; None where the log states neither blocks nor bytes."""
    if case.blocks is not None:
        return account.num_gpu_blocks / case.blocks - 1
    if case.kv_gib is not None:
        return account.line("kv_pool").gib / case.kv_gib - 1
    return None


def main(arguments: Sequence[str]) -> int:
    """Print the table. Returns 0, or 2 when the data are not there."""
    folder = data_folder(arguments[0] if arguments else None)
    if not (folder / "memory").is_dir():
        print(f"no public logs at {folder}; give the folder that has memory/kv_capacity_logs.csv", file=sys.stderr)
        return 2
    for line in table(cases(folder)):
        print(line)
    return 0


def table(found: Sequence[Case]) -> Iterator[str]:
    """The lines of the printed table."""
    yield f"{'log':<58}{'blocks':>9}{'ledger':>9}{'error':>8}{'naive':>9}{'error':>8}   activation (printed)"
    errors = []
    for case in found:
        if case.missing:
            continue
        account = predicted(case)
        error = block_error(case, account)
        # The first stage prints the line; the account is that of the poorest, which samples.
        peak, printed = account.stages[0].peak_activation_bytes / GIB, case.printed.get("peak_activation")
        activation = f"{peak:.2f} ({printed:.2f}, {peak / printed - 1:+.1%})" if printed else f"{peak:.2f}"
        if error is None:
            yield f"{case.label:<58}{'':>43}   {activation}"
            continue
        if account.engine == "vllm":
            errors.append(abs(error))
        real = account.num_gpu_blocks / (1 + error)
        naive = naive_blocks(case, account)
        yield (
            f"{case.label:<58}{real:>9.0f}{account.num_gpu_blocks:>9}{error:>+8.1%}{naive:>9.0f}{naive / real - 1:>+8.0%}   {activation}"
        )
    if errors:
        yield f"vLLM: {len(errors)} pools, median error {statistics.median(errors):.2%}, worst {max(errors):.2%}"
    for case in found:
        if case.missing:
            yield f"not predicted: {case.label}: {case.missing}"


def _log(row: dict[str, str]) -> Case | None:
    """A case of the table of start-up logs; None for releases before vLLM 0.6."""
    row = {name: text.strip() for name, text in row.items()}
    version = _version(row["engine"], row["version"])
    if version is None:
        return None
    label = (
        f"{row['model'].split('/')[-1][:26]}, {row['gpu']} x{row['tp']}, {row['engine']} {row['version'].split()[0]}"
    )
    settings: dict[str, Any] = {"engine_version": version, "tensor_parallel_size": int(row["tp"])}
    gaps = []
    try:
        settings["model"] = model_shape(_MODELS.get(row["model"], row["model"]))
    except ConfigError:
        gaps.append("the model")
    if row["gpu"] in _CARDS:
        settings["gpu"] = _CARDS[row["gpu"]]
    else:
        gaps.append("the card")
    if not row["gpu_memory_utilization"] and row["engine"] == "vllm":
        gaps.append("the utilisation")
    if row["source"].startswith("inference-sim"):
        # The pool that the rows leave is too large for the sampler of either default.
        gaps.append("max_num_seqs")
    blocks = _integer(row["num_gpu_blocks"])
    if blocks is None and _integer(row["kv_tokens"]):
        blocks = int(row["kv_tokens"]) // int(row["block_size"] or 16)
    if not blocks:
        gaps.append("the pool")
    settings |= {
        "gpu_memory_utilization": float(row["gpu_memory_utilization"]) if row["gpu_memory_utilization"] else None,
        "block_size": int(row["block_size"] or 16),
        "max_num_batched_tokens": _integer(row["max_num_batched_tokens"]),
        "enforce_eager": "enforce_eager" in row["notes"],
    }
    if row["dtype"] in ("float16", "bfloat16"):
        settings["dtype"] = row["dtype"]
    if row["dtype"] == "fp8":
        settings["quantization"] = "fp8_block"  # as the Qwen3 models with FP8 in their name are published
    length = _integer(row["max_model_len"])
    if length and "refused" not in row["notes"] and row["engine"] == "vllm":
        settings["max_model_len"] = length
    if "llava" in row["model"].lower():
        settings["encoder_tokens"] = _integer(row["max_num_batched_tokens"]) or 0
    if "V1 full breakdown" in row["notes"]:
        settings["max_num_seqs"] = 1024
    return Case(
        label=label,
        settings=settings,
        blocks=blocks,
        printed=_printed(row),
        missing=", ".join(gaps) + " not stated" if gaps else "",
    )


def _h100(row: dict[str, str]) -> Case:
    """A case of the table of vLLM 0.19 on H100."""
    tp, pp = int(row["tp"]), int(row["pp"])
    note = row["note"]
    settings: dict[str, Any] = {
        "model": model_shape(row["model"]),
        "gpu": "h100-sxm-80gb",
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "max_model_len": int(row["max_model_len"]),
        "gpu_memory_utilization": float(row["gpu_memory_utilization"]),
        "kv_cache_dtype": row["kv_cache_dtype"],
        "dtype": "float32" if "float32" in note else "auto",
        "quantization": "fp8" if "runtime quantization fp8" in note else "auto",
        "engine_version": "0.19",
    }
    label = f"{row['model'].split('/')[-1][:26]}, H100 x{tp * pp}{' pp' if pp > 1 else ''}, vllm 0.19"
    for form in ("fp8", "float32"):
        label += f", {form}" if form in (row["kv_cache_dtype"], settings["dtype"], settings["quantization"]) else ""
    return Case(
        label=label,
        settings=settings,
        blocks=int(row["kv_tokens"]) // 16 if row["kv_tokens"] else None,
        kv_gib=float(row["kv_gib"]) if row["kv_gib"] else None,
        printed=_printed(row),
    )


def _printed(row: dict[str, str]) -> dict[str, float]:
    columns = {"weights_gib": "weights", "non_torch_gib": "non_torch", "peak_activation_gib": "peak_activation"}
    return {name: float(row[column]) for column, name in columns.items() if row[column]}


def _version(engine: str, text: str) -> str | None:
    """A release as the ledger spells it; None before vLLM 0.6."""
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        # "0.2x" is no release.
        return None
    number = ".".join(part for part in match.groups() if part)
    if engine == "sglang":
        return f"sglang-{number}"
    if (int(match[1]), int(match[2])) < (0, 6):
        return None
    return f"{number}-v0" if "V0" in text else number


def _integer(text: str) -> int | None:
    return int(text) if text else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
