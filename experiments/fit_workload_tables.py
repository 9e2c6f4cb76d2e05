"""Fit the built-in workloads to the public traces, and print (or write) `sim/workload/tables.py`.

    python experiments/fit_workload_tables.py ../shared/data sim/workload/tables.py

Only figures leave this script (quantiles, rates, shares); no row of a trace does.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from sim.workload.arrivals import Gamma, Poisson
from sim.workload.lengths import LengthTable
from sim.workload.on_off import OnOff
from sim.workload.prefixes import PrefixTable
from sim.workload.readers import read_trace
from sim.workload.trace import Trace

Floats = npt.NDArray[np.float64]

INPUT_GRID = (0, 0.005, 0.01, 0.02, 0.035, *(k / 40 for k in range(2, 39)), 0.965, 0.98, 0.99, 0.995, 0.998, 0.999, 1)
OUTPUT_GRID = (0, 0.01, 0.05, *(k / 10 for k in range(1, 10)), 0.95, 0.975, 0.985, 0.9925, 0.996, 0.999, 1)
HIT_GRID = (0, 0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 1)
AGE_GRID = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
DISPERSION_WINDOWS_S = (1.0, 10.0, 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one workload is fitted."""

    constant: str
    """Name in tables.py."""
    path: str
    """Trace, below the data folder."""
    source: str
    """Who recorded it, and its licence."""
    length_classes: int
    """Classes of prompts with an output distribution of their own."""
    prefix_classes: int = 0
    """Classes of prompts with sharing statistics of their own; 0: no sharing."""
    arrivals: str = "gamma"
    """Arrivals that a run has by default: `gamma`, `on-off` or `poisson`."""
    bursts: bool = True
    """Whether the trace is long enough to fit on/off arrivals to its bursts and drifts."""


RECIPES = (
    Recipe(
        constant="AZURE_CONV",
        path="traces/azure2023/AzureLLMInferenceTrace_conv.csv",
        source="Azure LLM inference trace 2023, conversation (Splitwise, ISCA'24), Microsoft, CC-BY-4.0",
        length_classes=12,
    ),
    Recipe(
        constant="AZURE_CODE",
        path="traces/azure2023/AzureLLMInferenceTrace_code.csv",
        source="Azure LLM inference trace 2023, code (Splitwise, ISCA'24), Microsoft, CC-BY-4.0",
        length_classes=4,
        arrivals="on-off",
    ),
    Recipe(
        constant="MOONCAKE_CHAT",
        path="traces/mooncake/conversation_trace.jsonl",
        source="Mooncake conversation trace (FAST'25), Moonshot AI, Apache-2.0",
        length_classes=8,
        prefix_classes=10,
    ),
    Recipe(
        constant="SHAREGPT",
        path="runs/llmservingsim/workloads/sharegpt-llama-3.1-8b-300-sps10.lengths.csv",
        source="ShareGPT as sampled by LLMServingSim 2 (KAIST CASYS), 300 requests of 512 output tokens or more, MIT",
        length_classes=2,
        prefix_classes=3,
        arrivals="poisson",
        bursts=False,
    ),
)


def fit_lengths(trace: Trace, num_classes: int) -> LengthTable:
    """Quantiles of prompts, and of outputs for each class of prompts."""
    inputs = np.array([spec.input_tokens for spec in trace.requests])
    outputs = np.array([spec.output_tokens for spec in trace.requests])
    order = np.argsort(inputs, kind="stable")
    rows = [np.quantile(outputs[part], OUTPUT_GRID) for part in np.array_split(order, num_classes)]
    return LengthTable(
        input_probabilities=INPUT_GRID,
        input_quantiles=tuple(int(value) for value in np.rint(np.quantile(inputs, INPUT_GRID))),
        output_probabilities=OUTPUT_GRID,
        output_quantiles=tuple(tuple(int(value) for value in np.rint(row)) for row in rows),
    )


def dispersion(times_s: Floats, window_s: float) -> float:
    """Variance over mean of the counts in whole windows."""
    counts = np.bincount((times_s / window_s).astype(np.int64))[:-1]
    return float(counts.var() / counts.mean())


def fit_bursts(trace: Trace) -> OnOff:
    """On/off arrivals with the trace's rate and gap CV, and (least squares) its dispersion of counts over 1, 10 and 60 s."""
    times_s = np.array([spec.arrival_s for spec in trace.requests])
    gaps_s = np.diff(times_s)
    gap_cv = float(gaps_s.std() / gaps_s.mean())
    dispersions = [dispersion(times_s, window_s) for window_s in DISPERSION_WINDOWS_S]

    def process(x: Floats) -> OnOff:
        off_share_of_rate = 1 / (1 + np.exp(-x[0]))
        shape = OnOff(
            rate_on_per_s=1.0,
            rate_off_per_s=float(off_share_of_rate),
            mean_on_s=float(np.exp(x[1])),
            mean_off_s=float(np.exp(x[2])),
        )
        faster = trace.rate_per_s / shape.rate_per_s
        return OnOff(
            rate_on_per_s=faster,
            rate_off_per_s=shape.rate_off_per_s * faster,
            mean_on_s=shape.mean_on_s,
            mean_off_s=shape.mean_off_s,
        )

    def misses(x: Floats) -> list[float]:
        fitted = process(x)
        # The gap CV is what the project promises to keep; the dispersions decide among the processes that keep it.
        return [
            100 * float(np.log(fitted.gap_cv / gap_cv)),
            *(float(np.log(fitted.dispersion(w) / d)) for w, d in zip(DISPERSION_WINDOWS_S, dispersions, strict=True)),
        ]

    starts = [np.array([odds, on, off]) for odds in (-6.0, 0.0) for on in (1.0, 4.0) for off in (2.0, 4.0)]
    bounds = (np.array([-12.0, -3.0, -3.0]), np.array([6.0, 6.5, 6.5]))
    best = min((least_squares(misses, start, bounds=bounds) for start in starts), key=lambda fit: fit.cost)
    return process(best.x)


def fit_prefixes(trace: Trace, num_classes: int) -> PrefixTable:
    """Sharing statistics: how often a prompt continues an earlier one, how much of it, and how old that one is.

    Only whole blocks of an earlier prompt count, and an id is matched in its place in the chain.
    """
    requests = trace.requests
    block_tokens = requests[0].content_block_tokens
    prompts = [spec.content_ids[: -(-spec.input_tokens // block_tokens)] for spec in requests]
    last_seen: dict[object, int] = {}
    hits, ages = np.zeros(len(prompts), dtype=np.int64), np.zeros(len(prompts), dtype=np.int64)
    for i, ids in enumerate(prompts):
        while hits[i] < len(ids) and ids[hits[i]] in last_seen:
            ages[i] = i - last_seen[ids[hits[i]]]
            hits[i] += 1
        last_seen.update(dict.fromkeys(ids, i))
    shared = 0
    while all(len(ids) > shared and ids[shared] == prompts[0][shared] for ids in prompts):
        shared += 1
    blocks = np.array([-(-spec.input_tokens // block_tokens) for spec in requests])
    continues = hits > shared
    order = np.argsort([spec.input_tokens for spec in requests], kind="stable")
    classes = np.array_split(order, num_classes)
    shares = [np.quantile((hits / blocks)[part[continues[part]]], HIT_GRID) for part in classes]
    return PrefixTable(
        block_tokens=block_tokens,
        shared_blocks=shared,
        follow_share=tuple(round(float(continues[part].mean()), 4) for part in classes),
        hit_probabilities=HIT_GRID,
        hit_quantiles=tuple(tuple(round(float(value), 4) for value in row) for row in shares),
        age_probabilities=AGE_GRID,
        age_quantiles=tuple(int(value) for value in np.rint(np.quantile(ages[continues], AGE_GRID))),
    )


def fit_gamma(trace: Trace) -> Gamma:
    """Gamma gaps with the trace's rate and gap CV."""
    gaps_s = np.diff([spec.arrival_s for spec in trace.requests])
    return Gamma(rate_per_s=trace.rate_per_s, burstiness=float((gaps_s.mean() / gaps_s.std()) ** 2))


def literal(value: object, indent: int) -> str:
    """A value as formatted Python, lines of at most 120 characters; fitted rates and times with four digits."""
    if isinstance(value, float) and value not in (*INPUT_GRID, *OUTPUT_GRID, *HIT_GRID, *AGE_GRID):
        return f"{value:.4g}"
    pad = " " * indent
    if isinstance(value, LengthTable | PrefixTable | OnOff | Gamma | Poisson):
        shown = [
            f"{pad}    {f.name}={literal(getattr(value, f.name), indent + 4)},\n"
            for f in fields(value)
            if f.name != "normalize"
        ]
        return f"{type(value).__name__}(\n{''.join(shown)}{pad})"
    if isinstance(value, tuple):
        items = [literal(item, indent + 4) for item in value]
        one_line = f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        if len(one_line) + indent + 24 <= 120 and not isinstance(value[0], tuple):
            return one_line
        lines, line = [], f"{pad}   "
        for item in items:
            if line.strip() and (isinstance(value[0], tuple) or len(line) + len(item) + 2 > 120):
                lines.append(line)
                line = f"{pad}   "
            line += f" {item},"
        return "(\n" + "\n".join([*lines, line]) + f"\n{pad})"
    return repr(value)


HEADER = '''"""Figures of the built-in workloads, fitted to public traces. Written by `experiments/fit_workload_tables.py`; do not edit.

Quantiles, rates and shares only: no row of a trace is here. Each table names its source and the licence of that source.
"""
# fmt: off

from __future__ import annotations

from sim.workload.arrivals import Gamma, Poisson
from sim.workload.lengths import LengthTable
from sim.workload.on_off import OnOff
from sim.workload.prefixes import PrefixTable
from sim.workload.workload_table import WorkloadTable'''


def render(data_dir: Path) -> str:
    """The text of `sim/workload/tables.py`, fitted to the traces below `data_dir`."""
    parts = [HEADER]
    for recipe in RECIPES:
        trace = read_trace(data_dir / recipe.path)
        bursts = fit_bursts(trace) if recipe.bursts else None
        arrivals = {"on-off": bursts, "gamma": fit_gamma(trace), "poisson": Poisson(rate_per_s=trace.rate_per_s)}[
            recipe.arrivals
        ]
        prefixes = fit_prefixes(trace, recipe.prefix_classes) if recipe.prefix_classes else None
        parts.append(
            f"\n\n{recipe.constant} = WorkloadTable(\n"
            f'    source="{recipe.source}",\n'
            f"    arrivals={literal(arrivals, 4)},\n"
            f"    bursts={literal(bursts, 4)},\n"
            f"    lengths={literal(fit_lengths(trace, recipe.length_classes), 4)},\n"
            f"    prefixes={literal(prefixes, 4)},\n)"
        )
    return "".join(parts) + "\n"


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python experiments/fit_workload_tables.py DATA_DIR [FILE]")
    text = render(Path(sys.argv[1]))
    # A file is written only when everything is fitted: the script itself imports the tables of before.
    if len(sys.argv) == 3:
        Path(sys.argv[2]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
