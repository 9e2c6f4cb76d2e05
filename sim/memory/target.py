"""What would have to change for a load to fit: every suggestion is the ledger drawn up again with one setting changed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sim.catalog.gpus import GIB, GPUS, Gpu
from sim.catalog.gpus import gpu as gpu_named
from sim.catalog.models import model_shape
from sim.catalog.shape import ModelShape
from sim.core.config import ConfigError

from .build import build_ledger
from .kv_groups import rounding_waste_tokens, sequences_blocks
from .ledger import Ledger

_PATTERN = re.compile(
    r"(?P<requests>[\d_,]+)\s*(?:requests?)?\s*[x×*]\s*(?P<prompt>[\d_,]+)(?:\s*\+\s*(?P<output>[\d_,]+))?\s*(?:tokens?)?"
    r"(?:\s*[,x×*]?\s*(?:n\s*=\s*(?P<sequences>\d+)|(?P<beams>\d+)\s*(?:beams?|samples?)))?",
    re.IGNORECASE,
)
_FEW_TOKENS = 2048
"""Tokens of a step that are suggested where a larger one takes memory."""
_UTILISATION_LIMIT = 0.95
"""Higher shares leave less outside the budget than a CUDA context and the captured graphs take on most cards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A load that is to be held at once."""

    requests: int
    """Requests."""
    prompt_tokens: int
    """Prompt tokens a request; all its tokens where the output is not told apart."""
    output_tokens: int = 0
    """Tokens it generates."""
    sequences: int = 1
    """Continuations of one prompt (n, or the width of a beam)."""

    @property
    def tokens(self) -> int:
        """Longest sequence, in tokens."""
        return self.prompt_tokens + self.output_tokens

    def blocks(self, ledger: Ledger) -> int:
        """Blocks that the load takes of `ledger`'s pool, with what windows give back and prompts share."""
        if self.sequences == 1:
            return self.requests * ledger.request_blocks(self.tokens)
        if ledger.layout.is_hybrid:
            return self.requests * self.sequences * ledger.request_blocks(self.tokens)
        return self.requests * sequences_blocks(
            self.prompt_tokens, self.output_tokens, self.sequences, ledger.block_size
        )

    def unfilled_tokens(self, ledger: Ledger) -> int:
        """Slots at the ends of last blocks, which hold no token: what rounding to blocks wastes. 0 for a hybrid model's unlike groups."""
        if ledger.layout.is_hybrid:
            return 0
        shared = self.prompt_tokens // ledger.block_size * ledger.block_size if self.sequences > 1 else 0
        own = self.tokens - shared
        return self.requests * self.sequences * rounding_waste_tokens(own, ledger.block_size)

    def shortage_bytes(self, ledger: Ledger) -> int:
        """Bytes a rank by which the pool is too small; 0 or less when the load fits."""
        return (self.blocks(ledger) - ledger.num_gpu_blocks) * ledger.block_bytes

    def fits(self, ledger: Ledger) -> bool:
        """True when all of it is held at once, and may run at once."""
        return self.blocks(ledger) <= ledger.num_gpu_blocks and self.requests * self.sequences <= ledger.max_num_seqs

    def __str__(self) -> str:
        length = f"{self.prompt_tokens}+{self.output_tokens}" if self.output_tokens else f"{self.prompt_tokens}"
        return f"{self.requests} requests x {length} tokens" + (f", n={self.sequences}" if self.sequences > 1 else "")


def parse_target(text: str) -> Target:
    """Read `64 requests x 8192 tokens`; also `64 x 8192`, `64 requests x 4096+1024 tokens, n=4` or `… x 4 beams`.

    Raises:
        ConfigError: not of that form.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"--fit {text!r}: expected a number of requests and of tokens, such as '64 requests x 8192 tokens' or "
            "'64 requests x 4096+1024 tokens, n=4'"
        )
    numbers = {name: int(re.sub(r"[_,]", "", value)) for name, value in match.groupdict().items() if value}
    for name, value in numbers.items():
        if value < 1:
            raise ConfigError(f"--fit {text!r}: {name} is {value}; it must be at least 1")
    return Target(
        requests=numbers["requests"],
        prompt_tokens=numbers["prompt"],
        output_tokens=numbers.get("output", 0),
        sequences=numbers.get("sequences", numbers.get("beams", 1)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """One change of the configuration and what it does."""

    change: str
    """The flags to set."""
    settings: dict[str, Any]
    """The same as arguments of `build_ledger`."""
    effect_gib: float
    """KV memory that it adds, in GiB a rank; negative where it costs some."""
    effect_tokens: int
    """Tokens by which the KV cache grows."""
    requests: int
    """Requests of the target's length that fit at once then."""
    fits: bool
    """Whether the target fits then."""


def suggestions(
    settings: Mapping[str, Any], target: Target, *, least_tokens: int = 1
) -> tuple[Ledger | None, list[Suggestion]]:
    """The ledger as configured (None where it cannot be drawn up), and changes: first what fits, the mildest first.

    `settings` are arguments of `build_ledger`; no step is limited to fewer than `least_tokens`. Nothing is suggested when the target fits
    already. Mild is what changes no number of the model and no machine: utilisation and step limits come before formats, formats before
    more or other GPUs. Where no single change on the same GPUs is enough, as many of them as are needed are tried together.
    """
    base = _drawn(settings)
    if base is not None and target.fits(base):
        return base, []
    found = [
        made
        for changed in _changes(settings, target, max(_FEW_TOKENS, least_tokens))
        if (made := _tried(settings, changed, base, target)) is not None
    ]
    same_gpus = [
        one for one in found if one.effect_tokens > 0 and not {"tensor_parallel_size", "gpu"} & one.settings.keys()
    ]
    if not any(one.fits for one in same_gpus):
        combined = _together(settings, same_gpus, base, target)
        found += [combined] if combined else []
    return base, sorted(
        found, key=lambda one: (not one.fits, "tensor_parallel_size" in one.settings or "gpu" in one.settings)
    )


def _together(
    settings: Mapping[str, Any], changes: list[Suggestion], base: Ledger | None, target: Target
) -> Suggestion | None:
    """Changes one after the other, the mildest first, until the target fits or there are no more; None where there is but one."""
    taken: dict[str, Any] = {}
    combined = None
    for number, one in enumerate(changes):
        taken = {**taken, **one.settings}
        if number:
            combined = _tried(settings, taken, base, target)
            if combined is not None and combined.fits:
                break
    return combined


def _drawn(settings: Mapping[str, Any]) -> Ledger | None:
    """The ledger for whatever length fits; None where the engine would not start."""
    try:
        return build_ledger(**{**settings, "max_model_len": None})
    except ConfigError:
        return None


def _tried(
    settings: Mapping[str, Any], changed: dict[str, Any], base: Ledger | None, target: Target
) -> Suggestion | None:
    """A change as a suggestion; None when it is impossible, or does nothing for the target."""
    account = _drawn({**settings, **changed})
    if account is None:
        return None
    pool = account.line("kv_pool").gib - (base.line("kv_pool").gib if base else 0.0)
    tokens = account.kv_tokens - (base.kv_tokens if base else 0)
    if tokens <= 0 and not target.fits(account):
        return None
    each = target.blocks(account) / target.requests
    return Suggestion(
        change=" ".join(f"--{name.replace('_', '-')} {value}" for name, value in changed.items()),
        settings=changed,
        effect_gib=pool,
        effect_tokens=tokens,
        requests=min(int(account.num_gpu_blocks / each), account.max_num_seqs // target.sequences),
        fits=target.fits(account),
    )


def _changes(settings: Mapping[str, Any], target: Target, few_tokens: int) -> Iterator[dict[str, Any]]:
    """Candidate changes, the mildest first."""
    model, gpu = settings["model"], settings["gpu"]
    shape = model_shape(model) if isinstance(model, str) else model
    device = gpu_named(gpu) if isinstance(gpu, str) else gpu
    seqs = target.requests * target.sequences
    base = _drawn(settings)
    if base is not None:
        if base.gpu_memory_utilization < _UTILISATION_LIMIT:
            yield {"gpu_memory_utilization": _UTILISATION_LIMIT}
        if seqs != base.max_num_seqs:
            yield {"max_num_seqs": seqs}
        if base.max_num_batched_tokens > few_tokens and seqs <= few_tokens:
            yield {"max_num_batched_tokens": few_tokens}
        if base.max_num_batched_tokens > few_tokens and seqs <= min(few_tokens, base.max_num_seqs):
            yield {"max_num_seqs": seqs, "max_num_batched_tokens": few_tokens}
    if settings.get("kv_cache_dtype", "auto") in ("auto", "bfloat16", "float16", "float32"):
        yield {"kv_cache_dtype": "fp8"}
    yield from _formats(settings, shape, device)
    yield from _machines(settings, shape, device, target)


def _formats(settings: Mapping[str, Any], shape: ModelShape, device: Gpu) -> Iterator[dict[str, Any]]:
    stored = shape.quantization if settings.get("quantization", "auto") == "auto" else settings["quantization"]
    if stored is None:
        if device.fp8_flops_per_s is not None:
            yield {"quantization": "fp8"}
        yield {"quantization": "awq"}


def _machines(settings: Mapping[str, Any], shape: ModelShape, device: Gpu, target: Target) -> Iterator[dict[str, Any]]:
    """More GPUs until the target fits, and the smallest other GPU on which it does."""
    size = settings.get("tensor_parallel_size", 1)
    seqs = target.requests * target.sequences
    for _ in range(3):
        size *= 2
        if size > 8 or math.gcd(size, shape.num_attention_heads) != size:
            break
        changed = {"tensor_parallel_size": size}
        yield changed
        account = _drawn({**settings, **changed})
        if account is not None and (target.fits(account) or seqs > account.max_num_seqs):
            break
    larger = sorted(
        (
            gpu
            for gpu in GPUS.values()
            if gpu.total_bytes > device.total_bytes + GIB and gpu.workstation == device.workstation
        ),
        key=lambda gpu: gpu.total_bytes,
    )
    tried = None
    for gpu in larger:
        tried = {"gpu": gpu.name}
        account = _drawn({**settings, **tried})
        if account is not None and target.fits(account):
            break
    if tried is not None:
        yield tried
