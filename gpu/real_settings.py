"""RealSettings: what to run for real and where, and what a resolved scenario asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sim.catalog.shape import ModelShape
from sim.core.config import ConfigError

from .batch import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class RealSettings:
    """What to run and where."""

    shape: ModelShape
    """The model's sizes."""
    source: str | None = None
    """A `config.json` or its folder: rotary base and epsilon, and weights if the folder has safetensors. None: a catalogue shape."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    dtype: str = "auto"
    """Format of weights and activations; `auto` is the model's own."""
    kv_cache_dtype: str = "auto"
    """Format of the KV cache; `auto` is that of the activations."""
    seed: int = 0
    """Root of prompts, random weights and sampling."""
    sampling: Sampling = field(default_factory=Sampling)
    """How tokens are chosen; greedy by default."""
    checked: bool = False
    """Poison what holds nothing and verify owners: slower, and any early release or wrong slot becomes an error with a name."""
    memory_limit_bytes: int | None = None
    """A hard limit on the CPU device, pool and workspace included."""
    num_threads: int | None = None
    """Cores that torch may use in this process; None leaves its choice."""
    clock: str = "wall"
    """What times a step on the CPU: `wall`, or `thread`, the time that the thread had a processor (see `gpu.timing`)."""
    workspace_bytes: int | None = None
    """Workspace, instead of what the largest step needs; a step that does not fit is taken back and tried smaller."""
    micro_batch_tokens: int | None = None
    """Most tokens that one forward pass computes: a step of more is split, and the workspace is sized for the parts."""
    decode_graphs: bool | None = None
    """Run decode batches by captured buckets; None: on CUDA, where they are CUDA graphs. On the CPU buckets are called again."""
    others_bytes: int = 0
    """What other processes hold on a CUDA device, for the memory curve."""
    peak_step: int | None = None
    """A step whose live bytes are followed operation by operation, by the first executor."""


SMALL = 1 << 24
"""A model of fewer parameters runs faster on one core: waking the others takes longer than their share of the work."""


def threads_of(device: str, shape: ModelShape, clock: str) -> int | None:
    """Cores that torch is to use; None leaves its choice. A thread's own clock says what a step takes only where that thread does all."""
    if device != "cpu":
        return None
    return 1 if clock == "thread" or shape.num_parameters < SMALL else None


def settings_of(tables: Mapping[str, Mapping[str, Any]], shape: ModelShape, clock: str = "wall") -> RealSettings:
    """What a resolved scenario asks for: `tables` as `Resolved.tables`; its steps are timed by `clock`.

    Raises:
        ConfigError: a format that cannot be run.
    """
    run, model, engine = tables["run"], tables["model"], tables["engine"]
    if model["quantization"] not in (None, "auto", "none"):
        raise ConfigError(f"quantization is {model['quantization']!r}; executor torch runs plain weights only")
    return RealSettings(
        shape=shape,
        source=model["model"],
        device=run["device"],
        dtype=model["dtype"],
        kv_cache_dtype=engine["kv_cache_dtype"],
        seed=run["seed"],
        checked=run["check"],
        workspace_bytes=run.get("workspace_bytes"),
        num_threads=threads_of(run["device"], shape, clock),
        clock=clock,
        memory_limit_bytes=run["device_limit_bytes"],
        micro_batch_tokens=run["micro_batch_tokens"],
        decode_graphs=False if engine["enforce_eager"] else None,
    )
