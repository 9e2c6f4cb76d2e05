"""RealEngine: everything that a run on a device needs, made once; hands out one executor an engine core."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sim.catalog.dtypes import dtype_name
from sim.catalog.models import MODELS
from sim.catalog.shape import ModelShape
from sim.core.config import ConfigError, EngineConfig
from sim.core.engine import EngineCore
from sim.core.request import RequestSpec

from .batch import BatchBuffers, Sampling
from .cpu_pool import CpuBlockPool
from .decoder_config import DecoderConfig
from .executor import StepReading, TorchExecutor
from .layout import KVLayout
from .metering import DeviceBudget, StorageMeter
from .model import Decoder, decode_splits, workspace_bytes
from .ops import Ops
from .pool import PagedKVPool
from .swap import BlockMover
from .tokens import TokenBook
from .weights import DecoderWeights
from .workspace import Workspace


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
    workspace_bytes: int | None = None
    """Workspace, instead of what the largest step needs; a step that does not fit is taken back and tried smaller."""


class RealEngine:
    """A model on a device, and the executors that serve from it. Weights are shared, pools are not."""

    def __init__(
        self,
        settings: RealSettings,
        requests: Sequence[RequestSpec],
        *,
        on_step: Callable[[StepReading], None] | None = None,
    ) -> None:
        """Raises ConfigError for a model or device that cannot be run, OutOfMemoryError if the weights do not fit."""
        self.settings = settings
        self.device = find_device(settings.device)
        self.config = DecoderConfig.of(settings.shape, settings.source)
        self.dtype = dtype_name(settings.shape.dtype if settings.dtype == "auto" else settings.dtype)
        self.tokens = TokenBook(requests, seed=settings.seed, vocab_size=settings.shape.vocab_size)
        self.executors: list[TorchExecutor] = []
        """Those handed out, in order."""
        self._on_step = on_step
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        self._budget = None if settings.memory_limit_bytes is None else DeviceBudget(settings.memory_limit_bytes)
        self.weights = self._load()
        if self._budget is not None:
            self._budget.reserve("weights", self.weights.num_bytes)

    def executor(self, core: EngineCore) -> TorchExecutor:
        """An executor for `core`, with a pool of the core's size.

        Raises:
            ConfigError: a cache format without a real pool.
            OutOfMemoryError: the pool or the workspace does not fit.
        """
        engine, shape, settings = core.config, self.config.shape, self.settings
        ops = Ops(self.device)
        splits = decode_splits(self.config, engine, self.device)
        room = settings.workspace_bytes or workspace_bytes(
            self.config,
            engine,
            element_bytes=torch.empty(0, dtype=self._torch_dtype).element_size(),
            num_splits=splits,
            twins=ops.meant == "torch",
        )
        layout = KVLayout(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=engine.block_size,
            dtype=self.dtype,
            kv_cache_dtype=settings.kv_cache_dtype,
        )
        pool = PagedKVPool(layout, engine.num_gpu_blocks, self.device, checked=settings.checked, budget=self._budget)
        workspace = Workspace(room, self.device, budget=self._budget)
        if ops.meant == "torch":
            ops.scratch = workspace
        mover = None
        if engine.num_cpu_blocks:
            mover = BlockMover(pool, CpuBlockPool(layout, engine.num_cpu_blocks), ops)
        executor = TorchExecutor(
            Decoder(self.config, self.weights, ops, max_positions=engine.max_model_len, num_splits=splits),
            pool,
            workspace,
            self._buffers(engine),
            self.tokens,
            mover=mover,
            is_cached=core.pool.index.__contains__,
            sampling=settings.sampling,
            watch=None if self._budget is None else StorageMeter(self._budget),
            on_step=self._on_step,
        )
        self.executors.append(executor)
        return executor

    def serving(self, requests: Sequence[RequestSpec]) -> RealEngine:
        """The same model on the same device, with the same weights, for other requests; its executors are its own."""
        other = copy(self)
        other.tokens = TokenBook(requests, seed=self.settings.seed, vocab_size=self.settings.shape.vocab_size)
        other.executors = []
        return other

    def report(self) -> list[dict[str, Any]]:
        """What each executor did."""
        return [executor.report() for executor in self.executors]

    @property
    def _torch_dtype(self) -> Any:
        return getattr(torch, self.dtype)

    def _buffers(self, engine: EngineConfig) -> BatchBuffers:
        blocks = -(-engine.max_model_len // engine.block_size)
        seqs = min(engine.max_num_seqs, engine.max_num_batched_tokens)
        return BatchBuffers(
            max_tokens=engine.max_num_batched_tokens,
            max_seqs=seqs,
            max_blocks=blocks,
            device=self.device,
        )

    def _load(self) -> DecoderWeights:
        source = self.settings.source
        if source is not None and source not in MODELS:
            path = Path(source)
            folder = path if path.is_dir() else path.parent
            if any(folder.glob("*.safetensors")):
                return DecoderWeights.from_folder(self.config, folder, dtype=self._torch_dtype, device=self.device)
        return DecoderWeights.random(self.config, seed=self.settings.seed, dtype=self._torch_dtype, device=self.device)


SMALL = 1 << 24
"""A model of fewer parameters runs faster on one core: waking the others takes longer than their share of the work."""


def for_scenario(
    tables: Mapping[str, Mapping[str, Any]], shape: ModelShape, requests: Sequence[RequestSpec]
) -> RealEngine:
    """The engine that a resolved scenario asks for: `tables` as `Resolved.tables`.

    Raises:
        ConfigError: a model, format or device that cannot be run.
    """
    run, model = tables["run"], tables["model"]
    if model["quantization"] not in (None, "auto", "none"):
        raise ConfigError(f"quantization is {model['quantization']!r}; executor torch runs plain weights only")
    settings = RealSettings(
        shape=shape,
        source=model["model"],
        device=run["device"],
        dtype=model["dtype"],
        kv_cache_dtype=tables["engine"]["kv_cache_dtype"],
        seed=run["seed"],
        checked=run["check"],
        workspace_bytes=run.get("workspace_bytes"),
        num_threads=1 if run["device"] == "cpu" and shape.num_parameters < SMALL else None,
    )
    return RealEngine(settings, requests)


def find_device(name: str) -> Any:
    """The torch device called `name`. Raises ConfigError when this machine has none."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ConfigError(f"device is {name!r}; it must be cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch sees no CUDA device on this machine; cpu is always there")
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, but this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device(name)
