"""The kinds of small scenarios: blocks, chunks, shared prefixes, conversations, the CPU pool, clients that leave, priorities, samples and
beams, a sliding window, windows beside full attention.

They are small enough for a CPU and a random model of a few layers; arrivals are milliseconds apart, as such a model's steps are.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from sim.assembly import core_groups
from sim.catalog.models import model_shape
from sim.core.config import EngineConfig
from sim.core.forking import Forking
from sim.core.request import RequestSpec, samples
from sim.memory import build_ledger

if TYPE_CHECKING:
    from sim.catalog.shape import ModelShape

MODEL = "tiny-llama-test"
"""The model of most scenarios: Llama's shape, two layers, random weights."""
HYBRID = "tiny-hybrid-test"
"""The model of scenarios with several attention groups: five layers, three of them with a window."""
MAX_MODEL_LEN = 48
"""Tokens of the longest sequence: few enough that a whole one fits every pool, as contiguous reservation needs."""
BLOCK_SIZE = 4
ANY_GPU = "h100-sxm-80gb"
"""How a pool is laid out over layers does not depend on it."""


def windowed(shape: ModelShape, window: int) -> ModelShape:
    """`shape` with that window in every layer, or, where some layers have one and some have not, in those."""
    has_one = shape.has_window
    return replace(
        shape,
        architecture=shape.architecture if has_one else "mistral",
        attention=tuple(
            kind if has_one and kind.window is None else replace(kind, window=window) for kind in shape.attention
        ),
    )


def _requests(
    draw: random.Random, count: int, inputs: tuple[int, int], outputs: tuple[int, int], **fields: object
) -> list[RequestSpec]:
    """`count` requests with uniform lengths, some milliseconds apart."""
    made, arrival_s = [], 0.0
    for index in range(count):
        arrival_s += draw.expovariate(1 / 0.004)
        spec = RequestSpec(
            request_id=f"r{index}",
            arrival_s=arrival_s,
            input_tokens=draw.randint(*inputs),
            output_tokens=draw.randint(*outputs),
        )
        made.append(replace(spec, **fields))  # type: ignore[arg-type]
    return made


def _engine(**changes: object) -> EngineConfig:
    settings: dict[str, object] = {
        "num_gpu_blocks": 16,
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 32,
    }
    return EngineConfig(**{**settings, **changes})  # type: ignore[arg-type]


_Made = tuple[list[RequestSpec], EngineConfig]


def _pressure(draw: random.Random) -> _Made:
    return _requests(draw, 8, (3, 24), (4, 20)), _engine(num_gpu_blocks=draw.randint(14, 18))


def _chunks(draw: random.Random) -> _Made:
    return _requests(draw, 6, (10, 40), (1, 6)), _engine(max_num_batched_tokens=draw.choice((5, 7, 11)), max_num_seqs=5)


def _prefixes(draw: random.Random) -> _Made:
    """Prompts that begin alike, in a pool that forgets some of them in time and some not."""
    requests = _requests(draw, 9, (9, 36), (1, 8))
    shared = [
        replace(
            spec,
            content_ids=tuple(draw.choice("ab") for _ in range(draw.randint(1, spec.input_tokens // 4))),
            content_block_tokens=4,
        )
        for spec in requests
    ]
    return shared, _engine(num_gpu_blocks=draw.randint(16, 22), reserve_full_prompt=draw.random() < 0.5)


def _conversations(draw: random.Random) -> _Made:
    """Second turns that repeat the first and its answer: the trace's ids name output too."""
    requests: list[RequestSpec] = []
    for index, spec in enumerate(_requests(draw, 4, (6, 12), (5, 9))):
        ids = tuple(f"{index}.{place}" for place in range(-(-(spec.input_tokens + spec.output_tokens) // 3)))
        follow_up = replace(
            spec,
            request_id=f"{spec.request_id}-again",
            arrival_s=spec.arrival_s + draw.random() * 0.1,
            input_tokens=len(ids) * 3 + draw.randint(1, 8),
        )
        requests += [replace(s, content_ids=ids, content_block_tokens=3) for s in (spec, follow_up)]
    return sorted(requests, key=lambda spec: spec.arrival_s), _engine(num_gpu_blocks=draw.randint(18, 24))


def _swaps(draw: random.Random) -> _Made:
    return _requests(draw, 8, (3, 20), (6, 22)), _engine(num_gpu_blocks=14, num_cpu_blocks=draw.choice((5, 10, 30)))


def _leavers(draw: random.Random) -> _Made:
    requests = [
        replace(
            spec,
            cancel_after_s=draw.random() * 0.08 if draw.random() < 0.5 else None,
            timeout_s=draw.random() * 0.2 if draw.random() < 0.3 else None,
        )
        for spec in _requests(draw, 9, (3, 30), (4, 16))
    ]
    return requests, _engine(num_gpu_blocks=15, num_cpu_blocks=draw.choice((0, 8)))


def _priorities(draw: random.Random) -> _Made:
    requests = [replace(spec, priority=draw.randint(0, 2)) for spec in _requests(draw, 8, (4, 26), (4, 16))]
    return requests, _engine(scheduling_policy="priority", num_gpu_blocks=15, watermark=draw.choice((0.0, 0.1)))


def _samples(draw: random.Random) -> _Made:
    """Several samples of one prompt: they share its blocks, also while one of them still computes it."""
    requests = [replace(spec, n=draw.choice((1, 2, 3))) for spec in _requests(draw, 5, (6, 24), (3, 14))]
    return [sample for spec in requests for sample in samples(spec)], _engine(num_gpu_blocks=draw.randint(14, 20))


def _beams(draw: random.Random) -> _Made:
    """Samples and beams that fork: copies of shared blocks, and sequences that go on as copies of others."""
    made: list[RequestSpec] = []
    for spec in _requests(draw, 5, (4, 22), (3, 16)):
        forking = Forking(width=draw.randint(2, 4), change=draw.choice((0.0, 0.2, 0.5)), seed=draw.randint(0, 9))
        made += samples(replace(spec, n=forking.width, forking=forking))
    return made, _engine(num_gpu_blocks=draw.randint(14, 24), max_num_seqs=draw.choice((4, 6, 12)))


def _window(draw: random.Random) -> _Made:
    return _requests(draw, 10, (4, 32), (6, 16)), _engine(
        num_gpu_blocks=12, sliding_window=draw.choice((6, 9, 13)), max_num_batched_tokens=16, max_num_seqs=8
    )


def _hybrid_engine(draw: random.Random, **changes: object) -> EngineConfig:
    """An engine for windows beside full attention, with the ledger's groups and room for little more than one longest request."""
    shape = windowed(model_shape(HYBRID), draw.choice((6, 7, 11)))
    ledger = build_ledger(shape, ANY_GPU, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN)
    settings = {"num_gpu_blocks": draw.randint(36, 40), "max_num_batched_tokens": 16, **changes}
    return _engine(kv_groups=core_groups(ledger), **settings)


def _hybrid(draw: random.Random) -> _Made:
    """Prompts in chunks, some of which begin alike."""
    requests = [
        replace(
            spec,
            content_ids=tuple(draw.choice("ab") for _ in range(draw.randint(0, spec.input_tokens // 4))),
            content_block_tokens=4,
        )
        for spec in _requests(draw, 9, (8, 30), (6, 18))
    ]
    return requests, _hybrid_engine(draw, reserve_full_prompt=draw.random() < 0.5)


def _hybrid_swaps(draw: random.Random) -> _Made:
    """Requests that go to the CPU pool, and clients that leave."""
    requests = [
        replace(spec, cancel_after_s=draw.random() * 0.08 if draw.random() < 0.3 else None)
        for spec in _requests(draw, 9, (4, 26), (8, 22))
    ]
    return requests, _hybrid_engine(draw, num_cpu_blocks=draw.choice((12, 24, 60)))


def _hybrid_beams(draw: random.Random) -> _Made:
    """Beams that fork: copies of shared blocks in every group."""
    requests, engine = _beams(draw)
    return requests, _hybrid_engine(draw, max_num_seqs=engine.max_num_seqs)


def _cpu(draw: random.Random) -> _Made:
    """Requests that the ladder moves to the CPU (`POLICIES`); their clients allow for more than the model says."""
    requests = [
        replace(spec, priority=draw.randint(0, 2), max_tokens=spec.output_tokens + draw.randint(0, 3))
        for spec in _requests(draw, 6, (3, 20), (8, 20))
    ]
    return requests, _engine(num_gpu_blocks=draw.randint(14, 18), num_cpu_blocks=draw.choice((24, 120)))


def _cpu_window(draw: random.Random) -> _Made:
    """The same with a window in every layer."""
    requests, engine = _cpu(draw)
    return requests, replace(engine, num_gpu_blocks=12, sliding_window=draw.choice((6, 9, 13)))


def _cpu_hybrid(draw: random.Random) -> _Made:
    """The same with windows beside full attention, planned ahead."""
    requests, engine = _cpu(draw)
    ahead = draw.random() < 0.5
    return requests, _hybrid_engine(draw, num_cpu_blocks=3 * engine.num_cpu_blocks, async_scheduling=ahead)


KINDS: dict[str, Callable[[random.Random], _Made]] = {
    "pressure": _pressure,
    "chunks": _chunks,
    "prefixes": _prefixes,
    "conversations": _conversations,
    "swaps": _swaps,
    "leavers": _leavers,
    "priorities": _priorities,
    "samples": _samples,
    "beams": _beams,
    "window": _window,
    "hybrid": _hybrid,
    "hybrid-swaps": _hybrid_swaps,
    "hybrid-beams": _hybrid_beams,
    "cpu": _cpu,
    "cpu-window": _cpu_window,
    "cpu-hybrid": _cpu_hybrid,
}
"""How each kind is made, by name."""
_RUNG = {"action": "run_on_cpu", "signal": "kv_usage", "on": 0.6, "off": 0.4, "hold_s": 0.0, "value": 0.4}
POLICIES: dict[str, dict[str, object]] = {
    kind: {"cpu_token_s": 0.004, "ladder": [_RUNG]} for kind in ("cpu", "cpu-window", "cpu-hybrid")
}
"""What a kind's scenarios set in `[policy]` beside the preset."""
