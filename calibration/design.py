"""Which steps to time: corners, a space-filling set between them, block moves, and one reference step to come back to.

A step is a batch: decodes (how many, how long their contexts, how unequal) and prompt chunks (how many, how long, over what
is cached). Factors are spread evenly in logarithms, because a step of 2 and one of 4 sequences differ as 64 and 128 do.

Source: Sobol 1967 (low-discrepancy sequences); Box, Hunter and Hunter 2005, chapters on randomised order and replication.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from sim.core.batch_shape import BatchShape
from sim.core.need import blocks_for

from .errors import CalibrationError

SPACE_POINTS = {"decode": 48, "prefill": 48, "mixed": 64}
"""Space-filling steps of each kind."""
MOVED_BLOCKS = (1, 4, 16, 64)
UNEQUAL = (0.0, 0.0, 0.5, 1.0)
"""How unequal a batch's contexts are: 0 all alike, 1 one long and the others as short as can be."""
LEAST = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The range of steps that are timed; a profile extrapolates beyond it."""

    max_num_batched_tokens: int
    """Most tokens in a step."""
    max_num_seqs: int
    """Most sequences in a step."""
    max_model_len: int
    """Longest sequence, in tokens."""
    block_size: int
    """Tokens a KV block."""
    num_gpu_blocks: int
    """Blocks of the pool: what all sequences of a step hold together must fit."""
    num_cpu_blocks: int = 0
    """Blocks of the pool on the host, for timing swaps; 0 leaves swaps out."""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise CalibrationError(
                    f"{name} is {getattr(self, name)}; to tell terms apart it must be at least {least}"
                )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise CalibrationError(
                f"max_num_seqs ({self.max_num_seqs}) is above max_num_batched_tokens ({self.max_num_batched_tokens}): "
                "every decode needs one token of the step"
            )

    def as_dict(self) -> dict[str, int]:
        """By name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Share:
    """What one sequence does in a step."""

    num_tokens: int
    """Tokens computed now: 1 for a decode."""
    context_tokens: int
    """Tokens whose KV exists before."""
    samples: bool
    """Whether a token is sampled: a decode, and the last chunk of a prompt."""
    decode: bool = False
    """Whether it counts as a decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignPoint:
    """A step to time."""

    point: int
    """Its number; repeats of a step have the same."""
    group: str
    """`reference`, `corner`, `space`, `moves`, or `eager` for a corner that a graph serves, without it."""
    shares: tuple[Share, ...]
    """Its sequences, decodes first."""
    copied_blocks: int = 0
    """Block copies on the device before it."""
    swapped_blocks: int = 0
    """Blocks moved between device and host before it, half of them each way."""
    eager: bool = False
    """Launched kernel by kernel although a captured graph could serve it."""

    @property
    def kind(self) -> str:
        """`decode`, `prefill` or `mixed`."""
        decodes = sum(share.decode for share in self.shares)
        return "decode" if decodes == len(self.shares) else "mixed" if decodes else "prefill"

    @property
    def shape(self) -> BatchShape:
        """What a cost model sees of it."""
        contexts = [share.context_tokens + 1 for share in self.shares if share.decode]
        return BatchShape(
            prefill=tuple((share.num_tokens, share.context_tokens) for share in self.shares if not share.decode),
            decode_seqs=len(contexts),
            decode_context_tokens=sum(contexts),
            decode_max_context_tokens=max(contexts, default=0),
            sampled_seqs=sum(share.samples for share in self.shares),
            copied_blocks=self.copied_blocks,
            swapped_blocks=self.swapped_blocks,
        )

    def blocks(self, block_size: int) -> int:
        """KV blocks that its sequences hold, and those that are moved."""
        held = sum(blocks_for(share.context_tokens + share.num_tokens, block_size) for share in self.shares)
        return held + 2 * self.copied_blocks + 2 * self.swapped_blocks


def design(limits: Limits, seed: int, *, graphs: bool = False) -> tuple[DesignPoint, ...]:
    """All steps, most needed first: reference, corners, space filling, moves. The same for the same limits and seed.

    With `graphs`, decode steps are served by captured graphs, and the corners among them are timed without as well.

    Steps that the pool has no room for, and steps that occur twice, are left out. The first is the reference step.
    """
    found: list[DesignPoint] = []
    seen: set[tuple[Any, ...]] = set()
    for group, shares, copied, swapped in _candidates(limits, seed):
        key = (shares, copied, swapped)
        point = DesignPoint(
            point=len(found), group=group, shares=shares, copied_blocks=copied, swapped_blocks=swapped
        )  # fmt: skip
        if key in seen or point.blocks(limits.block_size) > limits.num_gpu_blocks:
            continue
        seen.add(key)
        found.append(point)
    if not found or found[0].group != "reference":
        raise CalibrationError(
            f"a pool of {limits.num_gpu_blocks} blocks of {limits.block_size} tokens has no room for the reference step; "
            "lower --max-num-seqs or --max-model-len"
        )
    if graphs:
        decodes = [point for point in found if point.group == "corner" and point.kind == "decode"]
        found += [
            replace(point, point=number, group="eager", eager=True)
            for number, point in enumerate(decodes, start=len(found))
        ]
    return tuple(found)


def pass_order(points: tuple[DesignPoint, ...], seed: int, number: int) -> list[DesignPoint]:
    """The points of one pass: groups in order, shuffled within a group, differently in each pass."""
    rng = np.random.default_rng([seed, number])
    ordered: list[DesignPoint] = []
    for group in ("corner", "space", "moves", "eager"):
        mine = [point for point in points if point.group == group]
        ordered += [mine[i] for i in rng.permutation(len(mine)).tolist()]
    return ordered


_Candidate = tuple[str, tuple[Share, ...], int, int]


def _candidates(limits: Limits, seed: int) -> Iterator[_Candidate]:
    middle = limits.max_model_len // 8
    yield "reference", _decodes([middle] * max(1, limits.max_num_seqs // 8)), 0, 0
    yield from (("corner", shares, 0, 0) for shares in _corners(limits))
    yield from (("space", shares, 0, 0) for shares in _space(limits, seed))
    for blocks in MOVED_BLOCKS:
        yield "moves", _decodes([middle]), blocks, 0
        if 2 * blocks <= limits.num_cpu_blocks:
            yield "moves", _decodes([middle]), 0, 2 * blocks


def _corners(limits: Limits) -> Iterator[tuple[Share, ...]]:
    """The ends of every factor, alone and together."""
    longest, tokens, seqs = limits.max_model_len - 1, limits.max_num_batched_tokens, limits.max_num_seqs
    lengths = (1, longest // 8, longest)
    sizes = sorted({1, 2, max(1, seqs // 4), seqs})
    for n in sizes:
        yield from (_decodes([length] * n) for length in lengths)
    chunks = sorted({2, min(16, longest), min(longest, max(2, tokens // 8)), min(tokens, longest)})
    for chunk in chunks:
        for context in sorted({0, (longest - chunk) // 4, longest - chunk}):
            yield _chunks([(chunk, context)], samples=False)
            yield _chunks([(chunk, context)], samples=True)
    whole = min(tokens, longest)
    yield _chunks([(whole, 0)] * min(seqs, tokens // whole), samples=True)
    for n in (seqs // 4, seqs - 1):  # a chunk is a sequence too
        for length in (longest // 8, longest):
            for chunk in (min(16, tokens - n), min(tokens - n, longest)):
                if chunk > 1:
                    yield _decodes([length] * n) + _chunks([(chunk, 0)], samples=True)
                    yield _decodes([length] * n) + _chunks([(chunk, longest - chunk)], samples=False)


def _space(limits: Limits, seed: int) -> Iterator[tuple[Share, ...]]:
    """Steps between the corners: Sobol points in logarithms of every factor."""
    from scipy.stats import qmc

    longest, tokens, seqs = limits.max_model_len - 1, limits.max_num_batched_tokens, limits.max_num_seqs
    for place, (kind, count) in enumerate(SPACE_POINTS.items()):
        draws = qmc.Sobol(7, rng=np.random.default_rng([seed, place])).random(1 << (count - 1).bit_length())[:count]
        for u in draws.tolist():
            n = {"prefill": 0, "decode": _between(1, seqs, u[0]), "mixed": _between(1, seqs - 1, u[0])}[kind]
            shares = _decodes(_contexts(n, _between(1, longest, u[1]), UNEQUAL[int(u[2] * len(UNEQUAL))], longest))
            if kind != "decode":
                shares += _drawn_chunks(limits, u, tokens - n, seqs - n)
            if shares:
                yield shares


def _drawn_chunks(limits: Limits, u: list[float], tokens: int, seqs: int) -> tuple[Share, ...]:
    """One to four chunks that share a step's rest of tokens, over contexts of one length; every second of them samples."""
    if tokens < 2 or seqs < 1:
        return ()
    count = min(1 + int(u[3] ** 2 * 4), seqs, tokens // 2)
    chunk = _between(2, min(tokens // count, limits.max_model_len - 1), u[4])
    context = _between(1, limits.max_model_len - chunk, u[5]) - 1 if u[5] > 0.3 else 0
    return _chunks([(chunk, context)] * count, samples=u[6] > 0.5)


def _contexts(count: int, mean: int, unequal: float, longest: int) -> list[int]:
    """`count` contexts of about `mean`: one is longer and the others are shorter, the more the more `unequal`."""
    if count < 2 or unequal == 0.0:
        return [mean] * count
    top = min(longest, round(mean * (1 + unequal * (count - 1))))
    rest = max(1, (mean * count - top) // (count - 1))
    return [top] + [rest] * (count - 1)


def _decodes(contexts: list[int]) -> tuple[Share, ...]:
    return tuple(Share(1, context, True, True) for context in contexts)


def _chunks(chunks: list[tuple[int, int]], *, samples: bool) -> tuple[Share, ...]:
    return tuple(Share(tokens, context, samples) for tokens, context in chunks)


def _between(low: int, high: int, u: float) -> int:
    """A whole number from [low, high], evenly spread in logarithms."""
    ratio: float = max(high, low) / low
    return round(low * math.pow(ratio, u))
