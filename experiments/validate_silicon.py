"""L5: end-to-end TPOT and TTFT rows that others published, against the embedded profile of their GPU and the roofline.

The rows have two origins. InferenceX rows say how they were run, and are simulated so. The others do not: most are taken for a
closed loop in its steady state, where every client's prompt interrupts all others once a request; SGLang's, whose TTFT is that of
one burst, are simulated as one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from calibration.readers.aiconfigurator import GPU_NAMES
from sim.catalog.gpus import gpu
from sim.catalog.models import model_shape
from sim.core.batch_shape import BatchShape
from sim.core.clock import to_s
from sim.core.config import ConfigError
from sim.costs import Roofline
from sim.costs.fitted import fitted_cost
from sim.costs.profile import FittedProfile
from sim.costs.protocol import CostModel
from sim.scenario import Scenario

from .silicon_reasons import explained

SYSTEMS = {**GPU_NAMES, "b200_sxm": "b200-sxm-180gb", "rtx_pro_6000": "rtx-pro-6000-96gb", "rtx_4090": "rtx-4090-24gb"}
"""The rows' names of systems and the catalogue's names of their GPUs."""
BATCHED_TOKENS = 8192


@functools.cache
def cost_of(kind: str, system: str, model: str, ranks: int, quantization: str | None) -> CostModel:
    """`profile` or `roofline` for one configuration. Raises: ConfigError for a system or a model that has no price."""
    if system not in SYSTEMS:
        raise ConfigError(f"system {system!r} is in no table of GPUs; known are {', '.join(SYSTEMS)}")
    shape, device = model_shape(model), gpu(SYSTEMS[system])
    if kind == "roofline":
        return Roofline(shape, device, tensor_parallel_size=ranks, quantization=quantization)
    return fitted_cost("auto", shape, device, tensor_parallel_size=ranks, quantization=quantization)


def steady_tpot_s(cost: CostModel, clients: int, prompt: int, output: int) -> float:
    """Mean TPOT of a closed loop: a decode step, and once in a request's life the prefill of every other client."""
    context = round(clients * (prompt + output / 2))
    alone = to_s(cost.step_fs(BatchShape(decode_seqs=clients, decode_context_tokens=context, sampled_seqs=clients)))
    mixed = BatchShape(
        prefill=((prompt, 0),), decode_seqs=clients, decode_context_tokens=context, sampled_seqs=clients + 1
    )
    return alone + clients * (to_s(cost.step_fs(mixed)) - alone) / output


def simulated(row: Any, cost: CostModel, *, burst: bool, clients: int | None = None) -> tuple[float, float]:
    """Mean TPOT and TTFT of a row's clients, in seconds: one burst, or InferenceX's closed loop of ten requests a client."""
    import sim

    clients, prompt, output = clients or int(row.batch_size), int(row.isl), int(row.osl)
    scenario = Scenario.from_flags(
        {
            "model": row.model_path,
            "gpu": SYSTEMS[str(row.system)],
            "tensor_parallel_size": int(row.tp_size),
            "quantization": row.gemm_quant_mode or "none",
            "max_num_batched_tokens": BATCHED_TOKENS,
            "max_model_len": 10240,
            "gpu_memory_utilization": 0.9,
            "max_num_seqs": clients,
            "enable_prefix_caching": False,
            "workload": "uniform",
            "max_concurrency": clients,
            "num_requests": clients if burst else 10 * clients,
        }
    ).with_(
        input_tokens=prompt if burst else [int(0.8 * prompt), prompt],
        output_tokens=output if burst else [int(0.8 * output), output],
    )
    summary = sim.simulate(scenario, cost=cost).summary
    return summary["tpot_s"]["mean"], summary["ttft_s"]["mean"]


def errors(path: Path, kind: str) -> Any:
    """The rows of a file with columns `tpot_error`, `ttft_error` (NaN where it cannot be judged) and `how`. A pandas DataFrame.

    Rows that no price exists for are left out, and the attribute `refused` says why.
    """
    import numpy as np
    import pandas as pd

    table = pd.read_csv(path)
    table["gemm_quant_mode"] = table["gemm_quant_mode"].fillna("").astype(str)
    found, kept, refused = [], [], Counter[str]()
    for row in table.itertuples():
        try:
            cost = cost_of(kind, str(row.system), str(row.model_path), int(row.tp_size), row.gemm_quant_mode or None)
        except ConfigError as error:
            refused[str(error)] += 1
            continue
        ttft_s = np.nan
        if "auto-gap" not in str(row.silicon_data_source):
            how = "InferenceX"
            tpot_s, ttft_s = simulated(row, cost, burst=False)
        elif row.backend == "sglang":
            how = "burst"
            tpot_s, _ = simulated(row, cost, burst=True)
        else:
            how = "steady state"
            tpot_s = steady_tpot_s(cost, int(row.batch_size), int(row.isl), int(row.osl))
        found.append((tpot_s * 1e3 / row.silicon_tpot_ms - 1, ttft_s * 1e3 / row.silicon_ttft_ms - 1, how))
        kept.append(row.Index)
    names = ("tpot_error", "ttft_error", "how")
    judged = table.loc[kept].assign(**{name: [row[i] for row in found] for i, name in enumerate(names)})
    judged.attrs["refused"] = refused
    return judged


def print_silicon(data: Path) -> None:
    """Medians by model, engine and tensor-parallel size, and the worst rows, of each file of rows."""
    for path in sorted((data / "runs").glob("silicon_*.csv")):
        _print_file(path)


def _print_file(path: Path) -> None:
    tables = {kind: errors(path, kind) for kind in ("profile", "roofline")}
    systems = ", ".join(sorted(set(tables["profile"]["system"])))
    print(
        f"\nL5 {systems}, {len(tables['profile'])} end-to-end rows (targets: TPOT median 8 % for vLLM, 12 % over all; TTFT 25 % where it "
        "can be judged)"
    )
    for reason, count in tables["profile"].attrs["refused"].items():
        print(f"  {count} rows have no price: {reason}")
    if tables["profile"].empty:
        return
    keys = ["model_path", "backend", "tp_size", "how"]
    median: Callable[[Any], float] = lambda values: float(values.abs().median())  # noqa: E731
    groups = {kind: table.groupby(keys)["tpot_error"] for kind, table in tables.items()}
    print(f"  {'model, engine, TP, how':<64} rows  profile  bias    roofline")
    for key, values in groups["profile"]:
        label = ", ".join(str(part) for part in key)
        print(
            f"  {label:<64} {len(values):4d} {median(values):8.1%} {values.median():+7.1%} "
            f"{median(groups['roofline'].get_group(key)):8.1%}"
        )
    for kind, table in tables.items():
        ttft = table["ttft_error"].dropna()
        by_engine = ", ".join(f"{name} {median(part):.1%}" for name, part in table.groupby("backend")["tpot_error"])
        print(
            f"  {kind}: TPOT {by_engine}, all {median(table['tpot_error']):.1%}; TTFT (InferenceX rows) {median(ttft):.1%}"
        )
    print("  the worst row of each, and what would explain it:")
    for _, part in tables["profile"].groupby(keys):
        row = part.loc[part["tpot_error"].abs().idxmax()]
        print(
            f"  {row.model_path} {row.backend} TP{row.tp_size:.0f} {row.gemm_quant_mode or 'bf16'} "
            f"{row.isl}/{row.osl} x {row.batch_size:.0f}: {row.silicon_tpot_ms:.1f} ms, {row.tpot_error:+.0%}; {_reason(row)}"
        )


def _reason(row: Any) -> str:
    """The reading of a row under which it comes nearest."""
    cost = cost_of("profile", str(row.system), str(row.model_path), int(row.tp_size), row.gemm_quant_mode or None)
    if not isinstance(cost, FittedProfile):
        return "its price has no terms to change"

    def tpot_s(prices: CostModel, clients: int) -> float:
        if row.how == "steady state":
            return steady_tpot_s(prices, clients, int(row.isl), int(row.osl))
        return simulated(row, prices, burst=row.how == "burst", clients=clients)[0]

    return explained(row, cost, tpot_s)
