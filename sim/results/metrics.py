"""Latency metrics, exactly as `vllm bench serve` defines them, and statistics of weighted samples.

TTFT runs from sending to the first token; E2EL to the last; TPOT is (E2EL - TTFT) / (output tokens - 1), undefined for a
single token; ITL is every gap between consecutive tokens. Only finished requests count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.core.clock import FS_PER_S, to_s
from sim.core.request import Outcome, Request

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .recorder import Recorder

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}


def ttft_s(request: Request) -> float | None:
    """Time to first token, for a request that got one."""
    return None if request.first_token_fs is None else to_s(request.first_token_fs - request.arrival_fs)


def e2el_s(request: Request) -> float | None:
    """End-to-end latency of a finished request."""
    if request.outcome is not Outcome.FINISHED or request.ended_fs is None:
        return None
    return to_s(request.ended_fs - request.arrival_fs)


def tpot_s(request: Request) -> float | None:
    """Time per output token after the first, of a finished request with at least two."""
    if request.outcome is not Outcome.FINISHED or request.num_output_tokens < 2:
        return None
    assert request.ended_fs is not None
    assert request.first_token_fs is not None
    return (request.ended_fs - request.first_token_fs) / (request.num_output_tokens - 1) / FS_PER_S


def queued_s(request: Request) -> float | None:
    """Time from sending to the first step that computed something for the request."""
    return None if request.scheduled_fs is None else to_s(request.scheduled_fs - request.arrival_fs)


def statistics(
    values: Sequence[float] | NDArray[np.float64], weights: NDArray[np.int64] | None = None
) -> dict[str, float]:
    """Mean, percentiles (linear interpolation, as numpy) and maximum; `weights` say how often each value occurs.

    Empty when there is nothing to describe.
    """
    import numpy as np

    sample = np.asarray(values, dtype=np.float64)
    if weights is None:
        weights = np.ones(len(sample), dtype=np.int64)
    sample, weights = sample[weights > 0], weights[weights > 0]
    if not len(sample):
        return {}
    order = np.argsort(sample, kind="stable")
    sample, weights = sample[order], weights[order]
    upto = np.cumsum(weights)
    count = int(upto[-1])
    result = {"mean": float(np.dot(sample, weights) / count)}
    for name, percent in PERCENTILES.items():
        position = (count - 1) * percent / 100.0
        below = int(position)
        low = sample[np.searchsorted(upto, below, side="right")]
        high = sample[np.searchsorted(upto, min(below + 1, count - 1), side="right")]
        result[name] = float(low + (high - low) * (position - below))
    result["max"] = float(sample[-1])
    return result


def inter_token_gaps(recorder: Recorder) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Every gap between consecutive tokens of finished requests, as values in seconds and how often each occurred.

    The time between two steps of the decode set is the gap of everyone in it; who that was follows from when they joined and left.
    """
    import numpy as np

    durations = _step_gaps_fs(recorder)
    finished = _finished(recorder)
    spans = np.array([span for request in finished for span in request.decode_spans], dtype=np.int64).reshape(-1, 2)
    change = np.zeros(len(durations) + 1, dtype=np.int64)
    np.add.at(change, spans[:, 0], 1)
    np.add.at(change, spans[:, 1], -1)
    others = np.array([gap for request in finished for gap in request.other_gaps_fs], dtype=np.float64)
    values = np.concatenate([durations.astype(np.float64), others]) / FS_PER_S
    weights = np.concatenate([np.cumsum(change)[:-1], np.ones(len(others), dtype=np.int64)])
    return values, weights


def request_gaps(recorder: Recorder) -> dict[str, NDArray[np.float64]]:
    """The same request by request: all gaps of each finished one, in seconds; those within the decode set come first."""
    import numpy as np

    durations = _step_gaps_fs(recorder)
    found = {}
    for request in _finished(recorder):
        parts = [durations[begin:end] for begin, end in request.decode_spans]
        others = np.asarray(request.other_gaps_fs, dtype=np.int64)
        found[request.request_id] = np.concatenate([*parts, others]).astype(np.float64) / FS_PER_S
    return found


def _finished(recorder: Recorder) -> list[Request]:
    return [request for request in recorder.ended_requests if request.outcome is Outcome.FINISHED]


def _step_gaps_fs(recorder: Recorder) -> NDArray[np.int64]:
    """For each step of the decode set the time since its step before, in femtoseconds."""
    import numpy as np

    segments = recorder.gap_segments
    counts = np.array([segment.steps for segment in segments], dtype=np.int64)
    first = np.array([segment.first_fs for segment in segments], dtype=np.int64)
    growth = np.array([segment.growth_fs for segment in segments], dtype=np.int64)
    starts = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts, counts)
    return np.asarray(np.repeat(first, counts) + np.repeat(growth, counts) * within)
