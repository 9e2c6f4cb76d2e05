"""Times that coincide, requests, and engines with room for all of them unless something else is asked for."""

from __future__ import annotations

from sim.core.clock import to_fs
from sim.core.config import EngineConfig
from sim.core.request import RequestSpec
from sim.results.recorder import RunRecord
from sim.results.summary import summarize

TICK_S = 2.0**-10
"""A whole number of femtoseconds, and so are twice and half of it: what can coincide does coincide, often and exactly."""
TICK = to_fs(TICK_S)


def request(name: object, arrival_s: float, input_tokens: int, output_tokens: int, **fields: object) -> RequestSpec:
    return RequestSpec(
        request_id=str(name), arrival_s=arrival_s, input_tokens=input_tokens, output_tokens=output_tokens, **fields
    )


def engine(**settings: object) -> EngineConfig:
    """A roomy engine, unless something else is asked for."""
    roomy = {"num_gpu_blocks": 100_000, "block_size": 16, "max_model_len": 100_000, "max_num_seqs": 64}
    return EngineConfig(**({**roomy, "max_num_batched_tokens": 4096} | settings))


def summary_of(record: RunRecord) -> dict[str, object]:
    return summarize(record, scenario={}, seed=0, version="")
