"""From the record of a run to `summary.json` and the columns of the tables beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.core.blocks import IntegrityError
from sim.core.clock import FS_PER_S, to_s
from sim.core.request import Outcome, Request

from . import metrics
from .recorder import RunRecord

SCHEMA_VERSION = 1


def summarize(
    record: RunRecord,
    *,
    scenario: Mapping[str, Any],
    seed: int,
    version: str,
    limits_s: Mapping[str, float] | None = None,
    warnings: Sequence[str] = (),
    notes: Sequence[str] = (),
    wall_time_s: float = 0.0,
) -> dict[str, Any]:
    """The summary of a run; keys and units are those of `summary.json`.

    `limits_s` are the service-level limits of a single request by metric (`ttft`, `tpot`, `itl`, `e2el`); without them there is no
    goodput. `warnings` are sentences a reader must heed, `notes` say where the requests came from. Latencies are over
    finished requests. Raises IntegrityError if requests were lost (I12).
    """
    import numpy as np

    requests, recorders, config = record.requests, record.recorders, record.config
    finished = [request for request in requests if request.outcome is Outcome.FINISHED]
    duration_s = to_s(max((request.ended_fs or 0 for request in requests), default=0))
    by_outcome = {outcome: sum(request.outcome is outcome for request in requests) for outcome in Outcome}
    if sum(by_outcome.values()) != len(requests):
        raise IntegrityError(f"{len(requests)} requests, but outcomes {by_outcome}")
    output_tokens = sum(request.num_output_tokens for request in requests)
    good = None if limits_s is None else sum(_is_good(request, limits_s) for request in finished)
    gaps = [metrics.inter_token_gaps(recorder) for recorder in recorders]
    pools = [recorder.core.pool for recorder in recorders]
    queried = sum(recorder.core.prefix_queried_tokens for recorder in recorders)
    hit = sum(recorder.core.prefix_hit_tokens for recorder in recorders)
    summary: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kvtwin_version": version,
        "scenario": dict(scenario),
        "seed": seed,
        "wall_time_s": wall_time_s,
        "core_time_s": record.core_time_s,
        "simulated_time_s": duration_s,
        "engine_steps": sum(recorder.core.steps for recorder in recorders),
        "events": sum(recorder.num_events for recorder in recorders),
        "num_requests": len(requests),
        **{outcome.value: count for outcome, count in by_outcome.items()},
        "rejected_by_reason": _count(
            request.finish_reason for request in requests if request.outcome is Outcome.REJECTED
        ),
        "finish_reason": _count(request.finish_reason for request in finished),
        "degraded_by_rung": _count(rung for request in requests for rung in request.degraded),
        "input_tokens": sum(request.spec.input_tokens for request in requests),
        "output_tokens": output_tokens,
        "request_throughput_per_s": _per(len(finished), duration_s),
        "output_throughput_tokens_per_s": _per(sum(request.num_output_tokens for request in finished), duration_s),
        "ttft_s": metrics.statistics([value for request in finished if (value := metrics.ttft_s(request)) is not None]),
        "tpot_s": metrics.statistics([value for request in finished if (value := metrics.tpot_s(request)) is not None]),
        "itl_s": metrics.statistics(
            np.concatenate([values for values, _ in gaps]), np.concatenate([weights for _, weights in gaps])
        ),
        "e2el_s": metrics.statistics([value for request in finished if (value := metrics.e2el_s(request)) is not None]),
        "queue_s": metrics.statistics(
            [value for request in finished if (value := metrics.queued_s(request)) is not None]
        ),
    }
    if good is not None:
        summary["goodput_per_s"] = _per(good, duration_s)
        summary["slo_attainment"] = good / len(requests) if requests else None
    summary |= {
        "num_gpu_blocks": config.num_gpu_blocks,
        "block_size": config.block_size,
        "kv_usage": _kv_usage(record, duration_s),
        "kv_blocks_at_end": {
            "free": sum(pool.num_free - pool.num_cached for pool in pools),
            "cached": sum(pool.num_cached for pool in pools),
            "owned": sum(pool.num_owned for pool in pools),
            "quarantined": sum(pool.num_quarantined for pool in pools),
        },
        "internal_fragmentation": {
            "mean": _per(
                sum(recorder.integrals.unfilled_slots for recorder in recorders),
                sum(recorder.integrals.table_slots for recorder in recorders),
            ),
            "max": max(recorder.integrals.worst_unfilled for recorder in recorders),
        },
        "num_preemptions": sum(request.num_preemptions for request in requests),
        "max_preemptions_per_request": max((request.num_preemptions for request in requests), default=0),
        "recomputed_tokens": sum(request.recomputed_tokens for request in requests),
        "discarded_tokens": sum(recorder.core.discarded_tokens for recorder in recorders),
        "swapped_out_blocks": sum(recorder.core.swapped_out_blocks for recorder in recorders),
        "swapped_in_blocks": sum(recorder.core.swapped_in_blocks for recorder in recorders),
        "prefix_hit_rate": hit / queried if queried else 0.0,
        **_tier(record, queried),
        **_cpu(record),
        "oom_events": sum(recorder.core.oom_events for recorder in recorders),
        "kv_block_seconds": sum(recorder.integrals.block_fs for recorder in recorders) / FS_PER_S,
        **_memory(record),
        "warnings": list(warnings),
        "notes": list(notes),
    }
    return summary


def _tier(record: RunRecord, queried: int) -> dict[str, Any]:
    """What a CPU prefix tier did; empty without one."""
    tiers = [recorder.core.offload for recorder in record.recorders if recorder.core.offload is not None]
    if not tiers:
        return {}
    return {
        "cpu_prefix_hit_rate": sum(tier.loads.hit_tokens for tier in tiers) / queried if queried else 0.0,
        "saved_blocks": sum(tier.saves.num_blocks for tier in tiers),
        "loaded_blocks": sum(tier.loads.num_blocks for tier in tiers),
        "failed_copies": sum(tier.failed_copies for tier in tiers),
        "num_cpu_prefix_blocks": sum(tier.tier.num_blocks for tier in tiers),
        "cpu_prefix_blocks_at_end": sum(len(tier.tier) for tier in tiers),
    }


def _cpu(record: RunRecord) -> dict[str, Any]:
    """What a CPU executor did; empty without one."""
    tokens = [recorder.core.cpu_tokens for recorder in record.recorders if recorder.core.cpu_tokens is not None]
    return {"cpu_tokens": sum(tokens)} if tokens else {}


def _memory(record: RunRecord) -> dict[str, Any]:
    """The tightest moments of the fullest replica's device, and what did not fit; empty where no device is known."""
    records = [recorder.memory for recorder in record.recorders if recorder.memory is not None]
    if not records:
        return {}
    return {
        "peak_workspace_bytes": max(memory.peak_workspace_bytes for memory in records),
        "min_headroom_bytes": min(memory.min_headroom_bytes for memory in records),
        "oom_by_line": _count(event.report.op for memory in records for event in memory.ooms),
    }


def itl_columns(record: RunRecord) -> dict[str, list[Any]]:
    """The columns of `itl.csv`: each finished request of all replicas, and its gaps."""
    gaps: dict[str, Any] = {}
    for recorder in record.recorders:
        gaps |= metrics.request_gaps(recorder)
    names = [request.request_id for request in record.requests if request.request_id in gaps]
    return {"request_id": names, "itl_s": [" ".join(map(repr, gaps[name].tolist())) for name in names]}


def request_columns(record: RunRecord) -> dict[str, list[Any]]:
    """The columns of `requests.csv`, one value a request in the order of the workload."""
    requests = record.requests
    return {
        "request_id": [request.request_id for request in requests],
        "arrival_s": [to_s(request.arrival_fs) for request in requests],
        "input_tokens": [request.spec.input_tokens for request in requests],
        "output_tokens_requested": [request.spec.target_tokens for request in requests],
        "output_tokens": [request.num_output_tokens for request in requests],
        "priority": [request.spec.priority for request in requests],
        "outcome": [request.outcome.value if request.outcome else "" for request in requests],
        "finish_reason": [request.finish_reason for request in requests],
        "reason": [request.reason for request in requests],
        "retry_after_s": [request.retry_after_s for request in requests],
        "degraded": ["+".join(request.degraded) for request in requests],
        "queued_s": [metrics.queued_s(request) for request in requests],
        "scheduled_s": [_time_s(request.scheduled_fs) for request in requests],
        "first_token_s": [_time_s(request.first_token_fs) for request in requests],
        "finished_s": [_time_s(request.ended_fs) for request in requests],
        "ttft_s": [metrics.ttft_s(request) for request in requests],
        "tpot_s": [metrics.tpot_s(request) for request in requests],
        "e2el_s": [metrics.e2el_s(request) for request in requests],
        "prefix_hit_tokens": [request.prefix_hit_tokens for request in requests],
        "preemptions": [request.num_preemptions for request in requests],
        "recomputed_tokens": [request.recomputed_tokens for request in requests],
        "peak_blocks": [request.peak_blocks for request in requests],
        "kv_block_seconds": [to_s(request.kv_block_fs) for request in requests],
    }


def timeline_columns(record: RunRecord) -> dict[str, list[Any]]:
    """The state of every replica over time, an interval a row."""
    rows = [(recorder.replica, row) for recorder in record.recorders for row in recorder.rows]
    rows.sort(key=lambda pair: (pair[1].start_fs, pair[0]))
    whole = (
        "steps",
        "running",
        "waiting",
        "used_blocks",
        "used_blocks_end",
        "cached_blocks",
        "free_blocks",
        "quarantined_blocks",
    )
    return {
        "time_s": [to_s(row.start_fs) for _, row in rows],
        "duration_s": [to_s(row.end_fs - row.start_fs) for _, row in rows],
        **{name: [getattr(row, name) for _, row in rows] for name in (*whole, "prefill_tokens", "decode_tokens")},
        "replica": [replica for replica, _ in rows],
    }


def mark_columns(record: RunRecord) -> dict[str, list[Any]]:
    """Preemptions, rejections, aborts, time-outs and failures, in order of time."""
    marks = [
        (time_fs, recorder.replica, kind, request_id)
        for recorder in record.recorders
        for time_fs, kind, request_id in recorder.marks
    ]
    marks.sort(key=lambda mark: mark[:2])
    return {
        "time_s": [to_s(mark[0]) for mark in marks],
        "kind": [mark[2] for mark in marks],
        "request_id": [mark[3] for mark in marks],
        "replica": [mark[1] for mark in marks],
    }


def _is_good(request: Request, limits_s: Mapping[str, float]) -> bool:
    """Whether a finished request met every limit; a single-token request has TPOT 0, as in `vllm bench serve`."""
    values = {
        "ttft": metrics.ttft_s(request) or 0.0,
        "tpot": metrics.tpot_s(request) or 0.0,
        "e2el": metrics.e2el_s(request) or 0.0,
        "itl": metrics.tpot_s(request) or 0.0,  # of one request, the mean inter-token latency is its TPOT
    }
    return all(values[metric] <= limit_s for metric, limit_s in limits_s.items())


def _kv_usage(record: RunRecord, duration_s: float) -> dict[str, float]:
    """Share of the pool that is owned, over the time from the start to the last ending; idle time counts as unused."""
    times: dict[int, int] = {}
    for recorder in record.recorders:
        for used, time_fs in recorder.integrals.time_by_used_blocks.items():
            times[used] = times.get(used, 0) + time_fs
    blocks = record.config.num_gpu_blocks
    total_fs = round(duration_s * FS_PER_S) * len(record.recorders)
    busy_fs = sum(times.values())
    times[0] = times.get(0, 0) + max(total_fs - busy_fs, 0)
    whole_fs = sum(times.values())
    if not whole_fs:
        return {"mean": 0.0, "max": 0.0, "p99": 0.0}
    below_fs, p99 = 0, 0
    for used in sorted(times):
        below_fs += times[used]
        if below_fs * 100 >= whole_fs * 99:
            p99 = used
            break
    mean = sum(used * time_fs for used, time_fs in times.items()) / (whole_fs * blocks)
    return {"mean": mean, "max": max(times) / blocks, "p99": p99 / blocks}


def _count(values: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return dict(sorted(counts.items()))


def _per(amount: int, per: float) -> float:
    return amount / per if per else 0.0


def _time_s(time_fs: int | None) -> float | None:
    return None if time_fs is None else to_s(time_fs)
