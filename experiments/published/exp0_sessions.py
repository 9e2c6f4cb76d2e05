"""Which requests of llm-d-benchmark's exp-0 go on with an earlier one: contents were not recorded, so it is inferred.

Its users hold conversations: a prompt is the prompt before, the answer to it, and a short question. A request whose TTFT at a
calibration rate is far below what its length takes found the prompt before in the prefix cache; the latest request whose length
fits is taken for it. What is found is given to every rate as content: whether a prefix is still cached there is the simulation's to find.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from calibration.recorded.runs import RecordedRun
from sim.core.request import RequestSpec

UNCACHED = slice(25, 195)
"""Requests of which all had to be computed: from these comes what a length takes."""
CACHED_BELOW = 0.6
"""Share of that time below which a prompt was cached."""
QUESTION_TOKENS = (-3, 60)
"""How much longer a prompt may be than the prompt before and its answer; tokens of an answer may merge when they are read again."""
BLOCK_TOKENS = 16


def with_sessions(runs: dict[str, RecordedRun], calibrated_on: Iterable[str]) -> dict[str, tuple[RequestSpec, ...]]:
    """The requests of each rate, with the content that `calibrated_on` show them to share. A run that sends other prompts, or lost some,
    gets its requests as they are.
    """
    known = [runs[rate] for rate in calibrated_on]
    prompts = [spec.input_tokens for spec in known[0].requests]
    cached = np.any([_cached(run) for run in known], axis=0)
    before = [_continued(known, i) if cached[i] else None for i in range(cached.size)]
    return {
        rate: _named(run.requests, before) if [spec.input_tokens for spec in run.requests] == prompts else run.requests
        for rate, run in runs.items()
    }


def _cached(run: RecordedRun) -> npt.NDArray[np.bool_]:
    """Which requests found their prefix cached, `[requests]`: by a line of TTFT over length, robust against those that waited."""
    length = np.asarray([spec.input_tokens for spec in run.requests], dtype=np.float64)
    x, y = length[UNCACHED], run.ttft_s[UNCACHED]
    first, second = np.triu_indices(x.size, 1)
    apart = np.abs(x[first] - x[second]) > 100
    slope = float(np.median(((y[first] - y[second]) / np.where(apart, x[first] - x[second], 1.0))[apart]))
    start = float(np.median(y - slope * x))
    found: npt.NDArray[np.bool_] = run.ttft_s < CACHED_BELOW * (start + slope * length)
    return found


def _continued(known: Sequence[RecordedRun], place: int) -> int | None:
    """The latest request that this one can go on with, answered in all `known` runs before this one was sent; None without one."""
    low, high = QUESTION_TOKENS
    specs = known[0].requests
    for earlier in range(place - 1, -1, -1):
        longer = specs[place].input_tokens - specs[earlier].input_tokens - specs[earlier].output_tokens
        answered = all(run.finished_s[earlier] < run.requests[place].arrival_s for run in known)
        if low <= longer <= high and answered:
            return earlier
    return None


def _named(specs: Sequence[RequestSpec], before: Sequence[int | None]) -> tuple[RequestSpec, ...]:
    """The requests with content: that of the request before as far as the prompt goes, and blocks of their own."""
    ids: list[tuple[tuple[int, int], ...]] = []
    for i, (spec, earlier) in enumerate(zip(specs, before, strict=True)):
        blocks = (spec.input_tokens + spec.output_tokens) // BLOCK_TOKENS
        shared = () if earlier is None else ids[earlier][: spec.input_tokens // BLOCK_TOKENS]
        ids.append((*shared, *((i, block) for block in range(len(shared), blocks))))
    return tuple(
        replace(spec, content_ids=content, content_block_tokens=BLOCK_TOKENS)
        for spec, content in zip(specs, ids, strict=True)
    )
