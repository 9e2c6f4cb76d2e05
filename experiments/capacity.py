"""`kvtwin capacity`: the highest rate at which the objectives hold, what limits it, and how many GPUs a target needs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .capacity_search import HIGHEST_RATE_PER_S, LOWEST_RATE_PER_S, Found, Point, Search
from .replicate import runner
from .terminal import Progress, number, print_json, say

if TYPE_CHECKING:
    from sim.resolve import Resolved
    from sim.scenario import Scenario
    from sim.slo import Slo

REPLICATIONS = 5
NUM_REQUESTS = 1000
NO_LIMIT = f"none up to the highest rate tried ({HIGHEST_RATE_PER_S:g} requests/s)"
ENGINE_FLAGS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "kv_cache_dtype",
    "block_size",
    "gpu_memory_utilization",
    "num_gpu_blocks_override",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
)
"""Engine settings that the answer depends on, as vLLM's flags."""


def capacity(
    scenario: Scenario,
    *,
    target_rate: float | None = None,
    replications: int = REPLICATIONS,
    workers: int | None = None,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Search and print. Returns the exit code: 1 when the objectives are missed even without load."""
    from sim.results.files import write_json

    with Progress("kvtwin capacity") as progress:
        document = capacity_of(
            scenario, target_rate=target_rate, replications=replications, workers=workers, progress=progress
        )
    if out is not None:
        write_json(out / "capacity.json", document)
    if json:
        print_json(document)
    else:
        say(as_text(document))
        if out is not None:
            say(f"wrote {out / 'capacity.json'}")
    return 0 if document["max_rate_per_s"]["value"] is not None else 1


def capacity_of(
    scenario: Scenario,
    *,
    target_rate: float | None = None,
    replications: int = REPLICATIONS,
    workers: int | None = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The answer as JSON values. The scenario's own rate is not used; without a number of requests there are 1000.

    Raises ScenarioError when the question makes no sense: no objectives, a closed loop, fewer than 2 replications.
    """
    from sim.resolve import resolve
    from sim.scenario import ScenarioError

    slo = scenario.slo
    if slo is None:
        raise ScenarioError("no objectives are given; for example --slo ttft_p99=2.0,tpot_p99=0.05, or keys in [slo]")
    if scenario.workload.max_concurrency is not None:
        raise ScenarioError(
            f"max_concurrency is {scenario.workload.max_concurrency}: closed-loop clients wait outside the engine, so no rate is too "
            "high for it; leave max_concurrency out"
        )
    if replications < 2:
        raise ScenarioError(f"--replications is {replications}; an interval needs at least 2")
    if target_rate is not None and not 0 < target_rate < math.inf:
        raise ScenarioError(f"--target-rate is {target_rate:g}; it must be a number of requests a second above 0")
    if scenario.workload.num_requests is None and scenario.workload.duration is None:
        scenario = scenario.with_(num_requests=_num_requests(scenario))
    resolved = resolve(scenario.with_(rate=LOWEST_RATE_PER_S))
    with runner(min(workers or os.cpu_count() or 1, replications)) as runs:
        search = Search(scenario, slo, replications, runs, progress.say if progress else lambda _: None)
        found = search.find()
    limit, evidence = binding_limit(found, slo)
    return {
        "max_rate_per_s": {"value": found.value, "low": found.low, "high": found.high},
        "binding_limit": limit,
        "evidence": evidence,
        "slo": slo.as_dict(),
        "target_rate_per_s": target_rate,
        "gpus_for_target": gpus_for(target_rate, found.value, resolved),
        "gpus_simulated": _gpus(resolved),
        "recommended_flags": _flags(resolved),
        "replications": replications,
        "rates": [_rate_row(point, slo) for point in search.points()],
        "seed": scenario.run.seed,
        "notes": _notes(scenario, resolved, found),
    }


def binding_limit(found: Found, slo: Slo) -> tuple[str, str]:
    """What keeps the rate from going higher, and why we say so: from the runs at the lowest rate that fails."""
    if found.failed is None:
        return NO_LIMIT, f"the objectives still hold at {found.passed.rate_per_s:g} requests/s"
    point = found.failed
    why = "; ".join(point.shortfalls(slo)) or "the objectives are missed"
    if found.value is None:
        return "latency of a single request", f"at {point.rate_per_s:g} requests/s, where requests do not meet, {why}"
    at = f"at {point.rate_per_s:g} requests/s {why}; "
    waited_s = {name: _mean(run.waited_s[name] for run in point.runs) for name in point.runs[0].waited_s}
    name, longest_s = max(waited_s.items(), key=lambda item: item[1])
    total_s = sum(waited_s.values())
    if longest_s > 0 and _queueing_misses(point, slo):
        return (
            name,
            at
            + f"a request is left in the queue {total_s:.3g} s on average, {longest_s / total_s:.0%} of it for want of {name}",
        )
    preemptions = _mean(run.summary["num_preemptions"] / run.summary["num_requests"] for run in point.runs)
    if preemptions > 0.05:
        return "KV blocks", at + f"there are {preemptions:.2f} preemptions a request"
    return (
        "compute",
        at + f"a request is left in the queue only {total_s:.3g} s on average: the steps themselves take too long",
    )


def _queueing_misses(point: Point, slo: Slo) -> bool:
    """Whether it is the queue that misses the objectives: it grows, requests are lost, or it makes up half of a time that is too long."""
    missed = [target for target in slo.targets if _mean(point.values_s(target)) > target.limit_s]
    if not missed or sum(run.queue_grows for run in point.runs) > len(point.runs) // 2:
        return True
    queue_s = _mean(run.summary["queue_s"].get("p99", 0.0) for run in point.runs)
    return any(
        target.metric in ("ttft", "e2el") and queue_s >= 0.5 * _mean(point.values_s(target)) for target in missed
    )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def gpus_for(target_rate: float | None, max_rate: float | None, resolved: Resolved) -> int | None:
    """GPUs for a target rate, in whole copies of what was simulated; None without a target or a rate."""
    if target_rate is None or max_rate is None:
        return None
    return math.ceil(target_rate / max_rate) * _gpus(resolved)


def _gpus(resolved: Resolved) -> int:
    engine = resolved["engine"]
    return int(resolved["run"]["replicas"] * engine["tensor_parallel_size"] * engine["pipeline_parallel_size"])


def _flags(resolved: Resolved) -> list[str]:
    """The `vllm serve` flags of the engine that was simulated."""
    engine = resolved["engine"]
    flags = [f"--{key.replace('_', '-')}={engine[key]}" for key in ENGINE_FLAGS if engine[key] is not None]
    if resolved["model"]["quantization"] not in (None, "auto", "none"):
        flags.append(f"--quantization={resolved['model']['quantization']}")
    for key in ("enable_prefix_caching", "enable_chunked_prefill"):
        flags.append(f"--{'' if engine[key] else 'no-'}{key.replace('_', '-')}")
    return flags


def _num_requests(scenario: Scenario) -> int:
    """1000, or all that a shorter trace has."""
    if scenario.workload.trace is None:
        return NUM_REQUESTS
    from sim.workload import read_trace

    return min(NUM_REQUESTS, len(read_trace(scenario.workload.trace).requests))


def _rate_row(point: Point, slo: Slo) -> dict[str, Any]:
    means = {target.name: sum(values) / len(values) for target in slo.targets if (values := point.values_s(target))}
    return {
        "rate_per_s": point.rate_per_s,
        **means,
        "finished": point.served(),
        "queue_grows": sum(run.queue_grows for run in point.runs),
        "sustained": point.sustained(slo),
    }


def _notes(scenario: Scenario, resolved: Resolved, found: Found) -> list[str]:
    notes: list[str] = []
    requests = resolved["workload"]["num_requests"]
    percentiles = [target.name for target in scenario.slo.targets if target.statistic == "p99"] if scenario.slo else []
    if percentiles and requests is not None and requests < 1000:
        notes.append(
            f"{', '.join(percentiles)} of {requests} requests a replication rests on fewer than 10 of them; use at least 1000"
        )
    if scenario.workload.rate is not None:
        notes.append(
            f"the scenario's own rate ({scenario.workload.rate:g}/s) is not used: the rate is what is searched for"
        )
    notes += dict.fromkeys(str(warning) for warning in found.passed.runs[0].summary.get("warnings", ()))
    return notes


def as_text(document: dict[str, Any]) -> str:
    """The answer first, then why, then what was tried."""
    rate, slo = (
        document["max_rate_per_s"],
        ", ".join(f"{name} ≤ {limit_s:g} s" for name, limit_s in document["slo"].items()),
    )
    gpus = document["gpus_simulated"]
    if rate["value"] is None:
        lines = [f"No rate meets {slo}: {document['evidence']}."]
    else:
        high = "no limit found" if rate["high"] is None else number(rate["high"])
        lines = [
            f"{number(rate['value'])} requests/s on {gpus} GPU{'s' if gpus > 1 else ''} meet {slo}",
            f"  interval        [{number(rate['low'])}, {high}], 95 % over {document['replications']} replications",
            f"  binding limit   {document['binding_limit']}",
            f"  because         {document['evidence']}",
        ]
    if document["gpus_for_target"] is not None:
        lines.append(
            f"  GPUs needed     {document['gpus_for_target']} for {document['target_rate_per_s']:g} requests/s"
        )
    names = list(document["slo"])
    lines += ["", "  " + "".join(f"{head:>14}" for head in ("rate/s", *names, "finished")) + "   sustained"]
    for row in document["rates"]:
        cells = (row["rate_per_s"], *(row[name] for name in names), row["finished"])
        lines.append(
            "  " + "".join(f"{number(cell):>14}" for cell in cells) + f"   {'yes' if row['sustained'] else 'no'}"
        )
    lines += ["", "  flags           " + " ".join(document["recommended_flags"])]
    return "\n".join([*lines, *(f"  note: {note}" for note in document["notes"])])
