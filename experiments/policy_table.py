"""Every preset under load: goodput, tails, and who paid for it, on common random numbers.

    python -m experiments.policy_table [--requests 1000] [--replications 5] [--workload azure-conv] [--capacity RATE] [--json FILE]

Capacity is the highest rate at which `vllm-v1` serves 95 % of the requests within the objectives (bisection on the same seeds). At
0.8, 1.0, 1.2 and 1.5 of it every preset gets the same requests: a fifth of them important (priority 0), the rest not (priority 1).
Every figure is a mean over the replications with half the width of its t interval (95 %); `ladder's gain` is the interval of the
paired difference, replication by replication. `lost` counts important requests that `ladder` failed (rejected, failed or timed out)
and this preset finished, request by request, and should be 0; `late` those that `ladder` served late or not and this preset in time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sim
from sim.core.policies import PRESETS
from sim.results.files import write_json
from sim.results.statistics import mean_interval, paired_difference

LOADS = (0.8, 1.0, 1.2, 1.5)
BASELINE = "vllm-v1"
BY_PRIORITY = "vllm-v1-priority"
"""The baseline with its flag `--scheduling-policy priority`: what strict priorities do without a ladder."""
OURS = "ladder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What one run came to."""

    goodput_per_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    degraded: float
    """Share of requests that a rung touched."""
    rejected: float
    preempted: float
    """Share of requests that lost their blocks at least once."""
    important_served: float
    """Share of the important requests that met the objectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, and what became of its important requests."""

    served: Served
    finished: frozenset[str]
    """Important requests that were served to their end, in time or not."""
    in_time: frozenset[str]
    """Those that met the objectives."""
    failed: frozenset[str]
    """Important requests that were rejected, failed or timed out."""


def scenario(workload: str, policy: str, rate: float, requests: int) -> sim.Scenario:
    """An 8B model on an H100 whose pool is small enough that memory, not compute, is what runs out first."""
    return sim.Scenario(
        model="llama-3.1-8b",
        gpu="h100-sxm-80gb",
        workload={
            "workload": workload,
            "rate": rate,
            "num_requests": requests,
            "priorities": {0: 0.2, 1: 0.8},
        },
        engine={"num_gpu_blocks_override": POOLS[workload], "max_num_seqs": 256, "max_model_len": LENGTHS[workload]},
        policy={"policy": BASELINE, "scheduling_policy": "priority"} if policy == BY_PRIORITY else {"policy": policy},
        slo=OBJECTIVES[workload],
    )


POOLS = {"azure-conv": 6000, "mooncake-chat": 20000}
LENGTHS = {"azure-conv": 16384, "mooncake-chat": 131072}
OBJECTIVES = {"azure-conv": "ttft_p99=2,tpot_p99=0.05", "mooncake-chat": "ttft_p99=10,tpot_p99=0.2"}


def run(workload: str, policy: str, rate: float, requests: int, replication: int) -> Run:
    """One run."""
    result = sim.simulate(scenario(workload, policy, rate, requests), seed=0, replication=replication)
    summary, columns = result.summary, result.request_columns
    limits = {name.split("_")[0]: limit for name, limit in summary["scenario"]["slo"].items()}
    rows = list(
        zip(
            columns["priority"],
            columns["outcome"],
            columns["ttft_s"],
            columns["tpot_s"],
            columns["degraded"],
            columns["request_id"],
            strict=True,
        )
    )
    important = [row for row in rows if row[0] == 0]
    failed = frozenset(row[5] for row in important if row[1] in ("rejected", "failed", "timed_out"))

    def good(row: tuple[Any, ...]) -> bool:
        return bool(row[1] == "finished" and row[2] <= limits["ttft"] and (row[3] or 0.0) <= limits["tpot"])

    came_to = Served(
        goodput_per_s=summary["goodput_per_s"],
        ttft_p99_s=summary["ttft_s"].get("p99", float("nan")),
        tpot_p99_s=summary["tpot_s"].get("p99", float("nan")),
        degraded=sum(bool(row[4]) for row in rows) / len(rows),
        rejected=summary["rejected"] / len(rows),
        preempted=sum(count > 0 for count in columns["preemptions"]) / len(rows),
        important_served=sum(map(good, important)) / max(len(important), 1),
    )
    return Run(
        served=came_to,
        finished=frozenset(row[5] for row in important if row[1] == "finished"),
        in_time=frozenset(row[5] for row in important if good(row)),
        failed=failed,
    )


def capacity_per_s(workload: str, requests: int) -> float:
    """The highest rate at which the baseline serves 95 % of the requests within the objectives."""

    def holds(rate: float) -> bool:
        summary = sim.simulate(scenario(workload, BASELINE, rate, requests), seed=0).summary
        return bool(summary["slo_attainment"] >= 0.95)

    low, high = 0.05, 0.1
    while holds(high):
        low, high = high, 2 * high
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def table(
    workload: str, requests: int, replications: int, presets: list[str], capacity: float, loads: list[float]
) -> Iterator[dict[str, Any]]:
    """One row a load and preset; every figure as `[mean, half width of its interval]`."""
    for load in loads:
        runs = {
            preset: [run(workload, preset, load * capacity, requests, k) for k in range(replications)]
            for preset in presets
        }
        ours = runs[OURS]
        for preset, results in runs.items():
            row: dict[str, Any] = {"workload": workload, "load": load, "rate_per_s": load * capacity, "preset": preset}
            for name in asdict(results[0].served):
                interval = mean_interval([getattr(one.served, name) for one in results])
                row[name] = [interval.mean, interval.half_width]
            if preset != OURS:
                theirs, own = ([one.served.goodput_per_s for one in several] for several in (results, ours))
                gain = paired_difference(theirs, own, smaller_is_better=False)
                row["ladder_gains_per_s"] = [gain.difference, gain.low, gain.high]
                row["lost"] = sum(len(a.failed & b.finished) for a, b in zip(ours, results, strict=True))
                row["late"] = sum(len(b.in_time - a.in_time) for a, b in zip(ours, results, strict=True))
            yield row


def shown(row: dict[str, Any]) -> str:
    """A row of the table as it is printed."""

    def figure(name: str, form: str, factor: float = 1.0) -> str:
        mean, half = (factor * value for value in row[name])
        return f"{mean:{form}} ± {half:{form}}"

    gain = row.get("ladder_gains_per_s")
    return (
        f"| {row['load']:.1f} ({row['rate_per_s']:.2f}/s) | {row['preset']} | {figure('goodput_per_s', '.2f')} "
        f"| {figure('ttft_p99_s', '.2f')} | {figure('tpot_p99_s', '.1f', 1000)} | {figure('degraded', '.1f', 100)} "
        f"| {figure('rejected', '.1f', 100)} | {figure('preempted', '.1f', 100)} | {figure('important_served', '.1f', 100)} "
        f"| {row.get('lost', '')} | {row.get('late', '')} | {'' if gain is None else f'{gain[0]:+.2f} [{gain[1]:+.2f}, {gain[2]:+.2f}]'} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(POOLS), default="azure-conv")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--replications", type=int, default=5)
    parser.add_argument(
        "--presets", nargs="+", default=[BASELINE, BY_PRIORITY, *(name for name in PRESETS if name != BASELINE)]
    )
    parser.add_argument("--loads", nargs="+", type=float, default=list(LOADS))
    parser.add_argument("--capacity", type=float, help="requests a second, instead of searching for it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if OURS not in options.presets:
        parser.error(f"--presets must have {OURS}: the others are compared with it")
    if options.replications < 2:
        parser.error(f"--replications is {options.replications}; an interval needs at least 2")
    capacity = options.capacity or capacity_per_s(options.workload, options.requests)
    rows = []
    print(
        "| load | preset | good/s | TTFT p99 s | TPOT p99 ms | degraded % | rejected % | preempted % | important in time % | lost | late "
        "| ladder's gain/s |"
    )
    print("|---" * 12 + "|")
    for row in table(
        options.workload, options.requests, options.replications, options.presets, capacity, options.loads
    ):
        rows.append(row)
        print(shown(row), flush=True)
    if options.json is not None:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
