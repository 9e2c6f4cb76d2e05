"""What a run takes of memory, counted before any of it is made: weights, KV pools, workspaces, blocks in host memory.

Weights of a few billion numbers take a minute to draw, and a host that is asked for more than it has ends the process without
a word. So the sum is compared with what is there first, and refused in one message that says what would fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from sim.catalog.dtypes import DTYPE_BYTES, dtype_name
from sim.catalog.models import MODELS
from sim.catalog.shape import ModelShape
from sim.catalog.size_text import size_text
from sim.core.config import ConfigError, EngineConfig

from .batch import batch_limits, input_bytes
from .decoder_config import DecoderConfig
from .decoder_room import decode_splits, workspace_bytes
from .layer_groups import LayerGroups
from .layout import KVLayout
from .machine import available_bytes
from .ops import Ops
from .real_settings import RealSettings

ROTATION_BYTES = 4
"""Of a number in the table of rotations, which is float32 whatever the model is."""
REMEDIES = {
    "KV pool": "lower num_gpu_blocks_override",
    "workspace": "lower max_num_batched_tokens, or set micro_batch_tokens",
    "buffers": "lower max_num_batched_tokens, max_num_seqs or max_model_len",
    "blocks in CPU memory": "lower num_cpu_blocks or num_cpu_prefix_blocks",
}
"""What makes each part of a run smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorRoom:
    """What one executor takes beside the weights."""

    layout: KVLayout
    splits: tuple[int, ...]
    """Programs that share a sequence of a decode, by the number of sequences, as in `Decoder`."""
    pool_bytes: int
    workspace_bytes: int
    buffers_bytes: int
    """A step's input and the rotations of every position."""
    host_bytes: int
    """Blocks in CPU memory, of preempted requests and of the prefix tier."""

    @classmethod
    def of(
        cls, config: DecoderConfig, engine: EngineConfig, settings: RealSettings, device: Any, ops: Ops
    ) -> ExecutorRoom:
        """Of an executor for a core with these settings.

        Raises:
            ConfigError: a cache format without a real pool, or attention groups that are not the model's.
        """
        dtype, most, limits = weights_dtype(settings), settings.micro_batch_tokens, batch_limits(engine)
        splits = tuple(decode_splits(config, engine, device, count + 1) for count in range(limits["max_seqs"]))
        layout = KVLayout(
            num_layers=LayerGroups.of(config.shape, engine.groups).num_places,
            num_kv_heads=config.shape.num_kv_heads,
            head_dim=config.shape.head_dim,
            block_size=engine.block_size,
            dtype=dtype,
            kv_cache_dtype=settings.kv_cache_dtype,
        )
        room = settings.workspace_bytes or workspace_bytes(
            config,
            engine if most is None else _at_most(engine, most),
            element_bytes=DTYPE_BYTES[dtype],
            splits=splits,
            twins=ops.meant == "torch",
        )
        return cls(
            layout=layout,
            splits=splits,
            pool_bytes=layout.arena_bytes(engine.num_gpu_blocks),
            workspace_bytes=room,
            buffers_bytes=input_bytes(**limits) + engine.max_model_len * config.shape.head_dim * ROTATION_BYTES,
            host_bytes=(engine.num_cpu_blocks + engine.num_cpu_prefix_blocks) * layout.block_bytes,
        )


def weights_dtype(settings: RealSettings) -> str:
    """Format of weights and activations, by its canonical name. Raises ConfigError for an unknown one."""
    return dtype_name(settings.shape.dtype if settings.dtype == "auto" else settings.dtype)


def weights_bytes(settings: RealSettings) -> int:
    """Bytes of the weights in the format that they are run in."""
    return settings.shape.weight_bytes(weights_dtype(settings))


def check_run(settings: RealSettings, engine: EngineConfig, device: Any, *, executors: int = 1) -> None:
    """Raise ConfigError unless weights and so many executors, of which nothing is made yet, fit into what is free now."""
    config = DecoderConfig.of(settings.shape, settings.source)
    room = ExecutorRoom.of(config, engine, settings, device, Ops(device))
    weights, rooms = weights_bytes(settings), (room,) * executors
    if settings.memory_limit_bytes is not None:
        _check_limit(settings, settings.memory_limit_bytes, weights, rooms)
    check_parts(settings, device, weights=weights, rooms=rooms)


def _check_limit(settings: RealSettings, limit: int, weights: int, rooms: tuple[ExecutorRoom, ...]) -> None:
    """Raise ConfigError where nothing of a limited device is left for a step. Its workspace takes what there is, unless it was given."""
    parts = _parts(weights, rooms)
    workspace = parts.pop("workspace")
    if settings.workspace_bytes is not None:
        parts["workspace"] = workspace
    kept = sum(parts.values())
    if kept >= limit:
        said = ", ".join(f"{part} {size:,}" for part, size in parts.items())
        raise ConfigError(
            f"device_limit_bytes is {limit:,}, but before its first step {settings.shape.name} takes {kept:,} ({said}); raise the "
            f"limit above that, or lower num_gpu_blocks_override{' or workspace_bytes' if 'workspace' in parts else ''}"
        )


def check_parts(settings: RealSettings, device: Any, *, weights: int = 0, rooms: tuple[ExecutorRoom, ...] = ()) -> None:
    """Raise ConfigError unless weights and executors that are yet to be made fit, with what would be right."""
    device = torch.device(device)
    host = {"blocks in CPU memory": sum(room.host_bytes for room in rooms)}
    parts = _parts(weights, rooms)
    if device.type == "cpu":
        _check(settings, parts | host, available_bytes(), "this machine", len(rooms))
        return
    torch.cuda.empty_cache()
    _check(settings, parts, int(torch.cuda.mem_get_info(device)[0]), f"{device}", len(rooms))
    _check(settings, host, available_bytes(), "this machine", len(rooms))


def _parts(weights: int, rooms: tuple[ExecutorRoom, ...]) -> dict[str, int]:
    """What is taken of the device, by name."""
    return {
        "weights": weights,
        "KV pool": sum(room.pool_bytes for room in rooms),
        "workspace": sum(room.workspace_bytes for room in rooms),
        "buffers": sum(room.buffers_bytes for room in rooms),
    }


def _check(settings: RealSettings, parts: dict[str, int], free: int | None, place: str, executors: int) -> None:
    needed = sum(parts.values())
    if free is None or needed <= free:
        return
    names = {"weights": f"weights in {weights_dtype(settings)}"}
    said = ", ".join(f"{names.get(part, part)} {size_text(size)}" for part, size in parts.items() if size)
    replicas = f" for {executors} replicas" if executors > 1 else ""
    raise ConfigError(
        f"{settings.shape.name}{replicas} needs {size_text(needed)} ({said}), but {place} has {size_text(free)} free; "
        f"{_remedy(settings, parts, free, place, executors)}"
    )


def _remedy(settings: RealSettings, parts: dict[str, int], free: int, place: str, executors: int) -> str:
    others = {part: size for part, size in parts.items() if part != "weights"}
    if parts.get("weights", 0) > free:
        fits = largest_model(weights_dtype(settings), free - sum(others.values()))
        named = "" if fits is None else f" ({fits.name}, {size_text(fits.weight_bytes(weights_dtype(settings)))}, fits)"
        return f"take a smaller model{named}, or leave --executor torch out to simulate it"
    if executors > 1 and parts.get("weights", 0) + sum(others.values()) // executors <= free:
        return "give fewer replicas"
    largest = max(others, key=lambda part: others[part])
    if largest == "KV pool" and place.startswith("cuda"):
        return f"{REMEDIES[largest]} or gpu_memory_utilization"
    return REMEDIES[largest]


def largest_model(dtype: str, free: int) -> ModelShape | None:
    """The largest model of the catalogue that can be run for real and whose weights fit into `free` bytes; None: none does."""
    fitting = [shape for shape in MODELS.values() if _runs(shape) and shape.weight_bytes(dtype) <= free]
    return max(fitting, key=lambda shape: shape.num_parameters, default=None)


def _runs(shape: ModelShape) -> bool:
    try:
        DecoderConfig(shape=shape)
    except ConfigError:
        return False
    return True


def _at_most(engine: EngineConfig, tokens: int) -> EngineConfig:
    """The engine with budgets that make its largest step one of `tokens` tokens."""
    tokens = min(tokens, engine.max_num_batched_tokens)
    return replace(
        engine,
        max_num_batched_tokens=tokens,
        max_num_seqs=min(engine.max_num_seqs, tokens),
        enable_chunked_prefill=True,
    )
