"""RealEngine: everything that a run on a device needs, made once; hands out one executor an engine core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch

from sim.core.config import EngineConfig
from sim.core.engine import EngineCore
from sim.core.groups import tables_of
from sim.core.request import RequestSpec
from sim.memory.graphs import graph_plan

from .batch import BatchBuffers, batch_limits
from .cpu_lane import CpuLane
from .cpu_moves import CpuMoves
from .cpu_pool import CpuBlockPool
from .decode_graphs import CallAgain, CudaCapture
from .decoder_config import DecoderConfig
from .device import find_device, make_current
from .device_room import DeviceRoom
from .executor import TorchExecutor
from .forward_pass import ForwardPass
from .layer_groups import LayerGroups
from .machine import machine_facts
from .metering import StorageMeter
from .model import Decoder
from .op_timeline import OpTimeline
from .ops import Ops
from .pool import PagedKVPool
from .readings import CpuMemoryReader, CudaMemoryReader, MemoryReader, StepReading, storage_bytes
from .real_settings import RealSettings
from .run_room import ExecutorRoom, check_parts, weights_bytes, weights_dtype
from .swap import BlockMover
from .tokens import TokenBook
from .weight_files import weights_folder
from .weights import DecoderWeights, Progress


class RealEngine:
    """A model on a device, and the executors that serve from it. Weights are shared, pools are not."""

    def __init__(
        self,
        settings: RealSettings,
        requests: Sequence[RequestSpec],
        *,
        on_step: Callable[[StepReading], None] | None = None,
        recorder: Callable[[int], Callable[[StepReading], None]] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`on_step` gets a reading a step of every executor; `recorder(index)` makes one for each, which gets memory readings too;
        `progress` hears how many layers of the model are made, and of how many.

        Raises ConfigError for a model or device that cannot be run, OutOfMemoryError if the weights do not fit.
        """
        self.settings = settings
        self.device = find_device(settings.device)
        make_current(self.device)
        self.config = DecoderConfig.of(settings.shape, settings.source)
        self.dtype = weights_dtype(settings)
        self.tokens = TokenBook(requests, seed=settings.seed, vocab_size=settings.shape.vocab_size)
        self.executors: list[TorchExecutor] = []
        """Those handed out, in order."""
        self._on_step, self._recorder = on_step, recorder
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        self._room = DeviceRoom(self.device, settings.memory_limit_bytes)
        check_parts(settings, self.device, weights=weights_bytes(settings))
        self.weights = self._load(progress)
        self._room.reserve("weights", self.weights.num_bytes)

    def executor(self, core: EngineCore) -> TorchExecutor:
        """An executor for `core`, with a pool of the core's size.

        Raises:
            ConfigError: a cache format without a real pool, or attention groups that are not the model's.
            OutOfMemoryError: the pool or the workspace does not fit.
        """
        engine, settings = core.config, self.settings
        make_current(self.device)
        groups = LayerGroups.of(self.config.shape, engine.groups)
        ops = Ops(self.device)
        room = ExecutorRoom.of(self.config, engine, settings, self.device, ops)
        check_parts(settings, self.device, rooms=(room,))
        layout = room.layout
        pool = PagedKVPool(
            layout,
            engine.num_gpu_blocks,
            self.device,
            checked=settings.checked,
            budget=self._room.budget,
            num_model_layers=self.config.shape.num_layers,
        )
        model = Decoder(
            self.config, self.weights, ops, max_positions=engine.max_model_len, splits=room.splits, groups=groups
        )
        buffers = BatchBuffers(**batch_limits(engine), device=self.device, staging=ops.staging)
        self._room.reserve("constants", storage_bytes(_constants(model, pool)))
        self._room.reserve("buffers", buffers.held_bytes[0])
        workspace = self._room.workspace(room.workspace_bytes, given=settings.workspace_bytes is not None)
        if ops.meant == "torch":
            ops.scratch = workspace
        mover, tier = (
            BlockMover(pool, CpuBlockPool(layout, count, pinned=self.device.type == "cuda"), ops) if count else None
            for count in (engine.num_cpu_blocks, engine.num_cpu_prefix_blocks)
        )
        forward = ForwardPass(
            model,
            pool,
            workspace,
            buffers,
            self.tokens,
            sampling=settings.sampling,
            most_tokens=settings.micro_batch_tokens,
        )
        if self.device.type == "cuda":
            forward.warm_up()
        self._capture(forward, engine)
        index = len(self.executors)
        executor = TorchExecutor(
            forward,
            cpu=CpuMoves(
                pool,
                ops,
                mover=mover,
                tier=tier,
                lane=CpuLane(
                    forward.model, layout, self.tokens, sampling=settings.sampling, max_model_len=engine.max_model_len
                ),
            ),
            is_cached=core.pool.index.__contains__,
            tables=tables_of(core.pool, engine),
            watch=None if self._room.budget is None else StorageMeter(self._room.budget),
            on_step=self._on_step if self._recorder is None else self._recorder(index),
            memory=None if self._recorder is None else self._reader(forward),
            timeline=OpTimeline(settings.peak_step) if settings.peak_step is not None and index == 0 else None,
            clock=settings.clock,
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
        """What each executor did, and on which machine."""
        machine = machine_facts(self.settings.device)
        return [{**executor.report(), "machine": machine} for executor in self.executors]

    def _capture(self, forward: ForwardPass, engine: EngineConfig) -> None:
        """Capture decode batches, where that is wanted."""
        cuda, wanted = self.device.type == "cuda", self.settings.decode_graphs
        if not (cuda if wanted is None else wanted):
            return
        plan = graph_plan(engine.max_num_seqs, engine.max_num_batched_tokens, enforce_eager=False)
        forward.capture(plan.full_sizes, CudaCapture(self.device) if cuda else CallAgain())

    def _reader(self, forward: ForwardPass) -> MemoryReader:
        sizes: dict[str, Any] = {
            "weights_bytes": self.weights.num_bytes,
            "buffers": lambda: forward.buffers.held_bytes,
            "kv_pool_bytes": forward.pool.arena.untyped_storage().nbytes(),
            "workspace_bytes": forward.workspace.num_bytes,
        }
        if self.device.type == "cuda":
            graphs = (0, 0) if forward.graphs is None else forward.graphs.allocator_bytes
            return CudaMemoryReader(self.device, graphs_bytes=graphs, others_bytes=self.settings.others_bytes, **sizes)
        tensors = [*self.weights.tensors, *_constants(forward.model, forward.pool)]
        return CpuMemoryReader(tensors, limit_bytes=self.settings.memory_limit_bytes, **sizes)

    @property
    def _torch_dtype(self) -> Any:
        return getattr(torch, self.dtype)

    def _load(self, progress: Progress | None) -> DecoderWeights:
        folder, place = weights_folder(self.settings.source), {"dtype": self._torch_dtype, "device": self.device}
        if folder is not None:
            return DecoderWeights.from_folder(self.config, folder, **place, progress=progress)
        return DecoderWeights.random(self.config, seed=self.settings.seed, **place, progress=progress)


def _constants(model: Decoder, pool: PagedKVPool) -> list[Any]:
    """Tensors that are no weights, and as old: the table of rotations, and the scales of an fp8 cache."""
    return [model.rope_table, pool.scales]
