"""`kvtwin compare`: the same requests served by two or more engines, and what differs.

Replication k of every scenario sees the same requests, so differences are paired and a few replications show what hundreds of
independent ones would not. Source: Law, Simulation Modeling and Analysis, sections 10.2 and 11.2 (common random numbers).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sim.scenario import Scenario, ScenarioError

from .compare_table import as_text
from .replicate import Measured, Task, runner
from .terminal import Progress, print_json, say

METRICS: Mapping[str, bool] = {
    "ttft_s.mean": True,
    "ttft_s.p50": True,
    "ttft_s.p99": True,
    "tpot_s.mean": True,
    "tpot_s.p99": True,
    "itl_s.p99": True,
    "e2el_s.mean": True,
    "e2el_s.p99": True,
    "queue_s.mean": True,
    "request_throughput_per_s": False,
    "output_throughput_tokens_per_s": False,
    "goodput_per_s": False,
    "slo_attainment": False,
    "finished": False,
    "rejected": True,
    "timed_out": True,
    "num_preemptions": True,
    "recomputed_tokens": True,
    "prefix_hit_rate": False,
    "kv_block_seconds": True,
}
"""What is compared, by its path in summary.json, and whether smaller is better."""
CONFIDENCE = 0.95
HEADLINE = "e2el_s.mean"
"""The metric whose correlation between two scenarios is reported as theirs."""


def compare(
    files: Sequence[Path],
    *,
    replications: int = 10,
    seed: int | None = None,
    workers: int | None = None,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Compare scenario files, the first being the baseline, and print the differences. Returns the exit code."""
    from sim.results.files import write_json

    if len(files) < 2:
        raise ScenarioError("compare needs at least two scenario files, the baseline first")
    scenarios = {name: Scenario.load(path) for name, path in zip(_names(files), files, strict=True)}
    with Progress("kvtwin compare") as progress:
        document = comparison(scenarios, replications=replications, seed=seed, workers=workers, progress=progress)
    if out is not None:
        write_json(out / "compare.json", document)
    if json:
        print_json(document)
        return 0
    say(as_text(document))
    if out is not None:
        say(f"wrote {out / 'compare.json'}")
    return 0


def comparison(
    scenarios: Mapping[str, Scenario],
    *,
    replications: int = 10,
    seed: int | None = None,
    workers: int | None = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The differences of every scenario from the first, as JSON values.

    All use one seed: `seed`, or the baseline's. `workers` processes (None: one a CPU) share the runs; the answer does not depend on
    it, but a script that asks for more than one needs the usual `if __name__ == "__main__":`.
    Raises ScenarioError when the scenarios do not have the same workload or there are fewer than 2 replications.
    """
    if replications < 2:
        raise ScenarioError(f"--replications is {replications}; an interval needs at least 2")
    names = list(scenarios)
    baseline = scenarios[names[0]]
    root = baseline.run.seed if seed is None else seed
    same = {name: scenario.with_(seed=root) for name, scenario in scenarios.items()}
    _refuse_different_workloads(same)
    fixed = not _requests_vary(same[names[0]])
    count = 1 if fixed else replications
    tasks = [Task(scenario=same[name], replication=k) for k in range(count) for name in names]
    measured: list[Measured] = []
    with runner(min(workers or os.cpu_count() or 1, len(tasks))) as runs:
        for done in runs.run(tasks):
            measured.append(done)
            if progress:
                progress.say(f"run {len(measured)} of {len(tasks)}")
    by_name = {name: measured[index :: len(names)] for index, name in enumerate(names)}
    confidence = 1 - (1 - CONFIDENCE) / (len(names) - 1)  # Bonferroni over the candidates
    rows = [
        row
        for name in names[1:]
        for metric, smaller in METRICS.items()
        if (row := _row(name, metric, smaller, by_name[names[0]], by_name[name], confidence)) is not None
    ]
    return {
        "baseline": names[0],
        "candidates": names[1:],
        "metrics": rows,
        "replications": count,
        "correlation": _headline_correlation(rows),
        "correlation_of": HEADLINE,
        "confidence": CONFIDENCE,
        "seed": root,
        "notes": _notes(scenarios, by_name, root, fixed=fixed),
    }


def value_at(summary: Mapping[str, Any], path: str) -> float | None:
    """The number at `path` ("ttft_s.p99") of a summary, None where there is none."""
    value: Any = summary
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def _row(
    name: str,
    metric: str,
    smaller: bool,
    baseline: Sequence[Measured],
    candidate: Sequence[Measured],
    confidence: float,
) -> dict[str, Any] | None:
    from sim.results.statistics import BETTER, NO_DIFFERENCE, WORSE, paired_difference

    pairs = [
        (value_at(a.summary, metric), value_at(b.summary, metric)) for a, b in zip(baseline, candidate, strict=True)
    ]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(known) < len(pairs):
        return None  # a metric that one side lacks (nothing finished, no objectives) has no difference
    row = {"name": metric, "scenario": name, "smaller_is_better": smaller}
    if len(known) == 1:
        (a, b), difference = known[0], known[0][1] - known[0][0]
        verdict = NO_DIFFERENCE if difference == 0 else BETTER if (difference < 0) == smaller else WORSE
        values = {
            "baseline": a,
            "candidate": b,
            "difference": difference,
            "low": None,
            "high": None,
            "verdict": verdict,
        }
        return {**row, **values, "correlation": None}
    paired = paired_difference([a for a, _ in known], [b for _, b in known], confidence, smaller_is_better=smaller)
    fields = ("baseline", "candidate", "difference", "low", "high", "verdict", "correlation")
    compared = {field: getattr(paired, field) for field in fields}
    if paired.n < 3:
        compared["correlation"] = None  # two points always lie on a line
    return {**row, **compared}


def _headline_correlation(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The lowest over the candidates: common random numbers help every comparison at least that much."""
    known = [row["correlation"] for row in rows if row["name"] == HEADLINE and row["correlation"] is not None]
    return min(known, default=None)


def _refuse_different_workloads(scenarios: Mapping[str, Scenario]) -> None:
    from sim.resolve import resolve

    (first, baseline), *others = scenarios.items()
    expected = resolve(baseline)["workload"]
    for name, scenario in others:
        found = resolve(scenario)["workload"]
        different = [f"{key} ({expected[key]} and {found[key]})" for key in expected if expected[key] != found[key]]
        if different:
            raise ScenarioError(
                f"{first} and {name} do not have the same workload: [workload] {', '.join(different)} differ; a comparison serves "
                "the same requests with different engines, so give both the same [workload]"
            )


def _requests_vary(scenario: Scenario) -> bool:
    """Whether replications differ: a replayed trace without cancellations is the same every time."""
    from sim.assembly import build_workload
    from sim.resolve import resolve

    resolved = resolve(scenario)
    return build_workload(resolved, 0).requests != build_workload(resolved, 1).requests


_AS_MANY = 1.01
"""Sides that finish more than this times as many requests as another do not measure latency on the same requests."""


def _notes(
    scenarios: Mapping[str, Scenario], by_name: Mapping[str, Sequence[Measured]], seed: int, *, fixed: bool
) -> list[str]:
    notes: list[str] = []
    candidates = len(scenarios) - 1
    if fixed:
        notes.append(
            "the workload is a fixed trace, the same in every replication: each difference is exact for this trace, "
            "has no interval, and says nothing about other traffic"
        )
    elif candidates > 1:
        notes.append(
            f"the {candidates} intervals of a metric are widened to hold together with 95 % confidence (Bonferroni); metrics are judged "
            "one by one"
        )
    if any(scenario.run.seed != seed for scenario in scenarios.values()):
        notes.append(f"the scenarios name different seeds; all runs used {seed}")
    finished = min(value_at(run.summary, "finished") or 0.0 for runs in by_name.values() for run in runs)
    served = {name: sum(value_at(run.summary, "finished") or 0.0 for run in runs) for name, runs in by_name.items()}
    if max(served.values()) > _AS_MANY * min(served.values()):
        counts = ", ".join(f"{name} {count / len(by_name[name]):,.0f}" for name, count in served.items())
        notes.append(
            f"latencies are those of finished requests, and not as many finish everywhere ({counts} a run): who is turned away is in no "
            "latency; compare goodput, with objectives in [slo]"
        )
    if finished < 1000:
        notes.append(f"a run finishes as few as {finished:.0f} requests: its p99 rests on fewer than 10 of them")
    warnings = {
        name: [str(warning) for warning in runs[0].summary.get("warnings", ())] for name, runs in by_name.items()
    }
    for warning in dict.fromkeys(warning for found in warnings.values() for warning in found):
        holders = [name for name, found in warnings.items() if warning in found]
        notes.append(warning if len(holders) == len(warnings) else f"{', '.join(holders)}: {warning}")
    return notes


def _names(files: Sequence[Path]) -> list[str]:
    """The files' stems where they tell the files apart, else their paths."""
    stems = [path.stem for path in files]
    names = stems if len(set(stems)) == len(stems) else [str(path) for path in files]
    if len(set(names)) < len(names):
        raise ScenarioError(
            f"{next(name for name in names if names.count(name) > 1)} is given twice; compare needs different files"
        )
    return names
