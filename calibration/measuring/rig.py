"""The rig: a real executor that runs designed steps one at a time. The only part of calibration that needs torch.

Every step is a `StepPlan` like those of a run, carried out and timed by the very code that serves requests. What a run does
seldom (drawing a prompt, booking the blocks of a context) is done before the clock starts, so that a step costs what it
costs in a run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from calibration.errors import StepTooLargeError
from gpu.batch import Sampling
from gpu.device import find_device
from gpu.executor import TorchExecutor
from gpu.nvml import nvml_clocks
from gpu.readings import StepReading, process_bytes
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings, threads_of
from gpu.tokens import TokenBook
from sim.catalog.shape import ModelShape
from sim.core.batch_shape import BatchShape
from sim.core.clock import to_s
from sim.core.config import EngineConfig
from sim.core.engine import EngineCore
from sim.core.need import blocks_for
from sim.core.plan import ScheduledRequest, StepPlan, Untold
from sim.core.request import RequestSpec

from .design import DesignPoint, Limits, Share
from .rig_memory import Before, memory_lines, non_torch_bytes

FIRST_STEPS = ((Share(16, 0, True),), (Share(1, 15, True, True), Share(1, 15, True, True)))
"""A prompt and two decodes, run once before memory is read: libraries load kernels and take their workspaces at the first call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What one step took."""

    duration_us: float
    workspace_bytes: int
    """Most bytes of the workspace in use at once."""
    process_bytes: int | None
    """Resident memory of this process after the step, where the system tells."""
    device_bytes: int | None
    """Bytes that torch has reserved on the device; None on the CPU."""
    served_by: str
    """`eager`, or `graph of N` for decodes that a captured graph served."""


class StepRig:
    """A model on a device, with a pool and a workspace for steps within `limits`."""

    def __init__(
        self,
        shape: ModelShape,
        limits: Limits,
        *,
        source: str | None = None,
        device: str = "cpu",
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        seed: int = 0,
        clock: str = "wall",
        decode_graphs: bool | None = None,
    ) -> None:
        """`decode_graphs` serves decodes by graphs; None: on CUDA. Raises ConfigError for a model or device that cannot be run,
        OutOfMemoryError when it does not fit.
        """
        self.limits, self.shape = limits, shape
        before = Before.now(find_device(device))
        self._engine = RealEngine(
            RealSettings(
                shape=shape,
                source=source,
                device=device,
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
                seed=seed,
                sampling=Sampling(),
                num_threads=threads_of(device, shape, clock),
                clock=clock,
                decode_graphs=decode_graphs,
            ),
            [],
            on_step=self._read,
        )
        core = EngineCore(
            EngineConfig(
                num_gpu_blocks=limits.num_gpu_blocks,
                num_cpu_blocks=limits.num_cpu_blocks,
                block_size=limits.block_size,
                max_model_len=limits.max_model_len,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
            )
        )
        self.executor: TorchExecutor = self._engine.executor(core)
        self._fill_pool(seed)
        self._draw = random.Random(f"{seed}:blocks")
        self._step = 0
        self._reading: StepReading | None = None
        for shares in FIRST_STEPS:
            self.run(DesignPoint(point=0, group="warm-up", shares=shares))
        self._before = before
        self.memory = memory_lines(self.executor, limits, before)
        """Bytes that are always there, by ledger line."""

    def run(self, point: DesignPoint) -> Timed:
        """Time one step: it is run twice on the same blocks, and the second counts. A step of a run finds the caches as the step
        before it left them, which was much like it; after a step of quite another size it would take longer.

        Raises StepTooLargeError when it runs out of memory; what it held is given back.
        """
        blocks = self._draw.sample(range(1, self.limits.num_gpu_blocks + 1), point.blocks(self.limits.block_size))
        self._run(point, blocks)
        return self._run(point, blocks)

    def non_torch_bytes(self) -> int | None:
        """What is in use on a GPU now beside tensors and graphs; None on the CPU, whose process grows with whoever measures."""
        return (
            None
            if self.executor.pool.device.type == "cpu"
            else non_torch_bytes(self.executor, self._before, self.memory)
        )

    def _run(self, point: DesignPoint, blocks: list[int]) -> Timed:
        size, ids = self.limits.block_size, iter(blocks)
        scheduled, specs = [], []
        for index, share in enumerate(point.shares):
            name, last = f"s{self._step}.{index}", share.context_tokens + share.num_tokens
            table = tuple(next(ids) for _ in range(blocks_for(last, size)))
            known = last if share.samples else last + 1  # a chunk that does not sample has more prompt to come
            specs.append(RequestSpec(request_id=name, arrival_s=0.0, input_tokens=known, output_tokens=2))
            scheduled.append(
                ScheduledRequest(
                    request_id=name,
                    num_tokens=share.num_tokens,
                    context_tokens=share.context_tokens,
                    block_table=table,
                    samples=share.samples,
                )
            )
        self._announce(scheduled, specs)
        moves = self._moves(point, ids)
        plan = self._plan(point.shape, scheduled, **moves)
        graphs = self.executor.forward.graphs
        if point.eager:
            self.executor.forward.graphs = None
        try:
            result = self.executor.execute(plan)
        finally:
            self.executor.forward.graphs = graphs
        if result.oom is not None:
            self._give_back(scheduled)
            raise StepTooLargeError(
                f"step {point.point} ({point.kind}, {point.shape.num_tokens} tokens) ran out of memory: "
                f"{result.oom.requested_bytes:,} bytes for {result.oom.op}, {result.oom.free_bytes:,} were free"
            )
        self.executor.close(Untold(releases=tuple((share.request_id, share.block_table) for share in scheduled)))
        assert self._reading is not None
        return Timed(
            duration_us=to_s(result.durations.total_fs) * 1e6,
            workspace_bytes=self._reading.workspace_bytes,
            process_bytes=process_bytes(),
            device_bytes=self.executor.pool.counters().device_reserved_bytes,
            served_by=self._reading.served_by,
        )

    def _give_back(self, scheduled: list[ScheduledRequest]) -> None:
        """After a step that was taken back: its sequences hold the blocks of their contexts, and what was moved is where it was put."""
        size = self.limits.block_size
        held = [(share.request_id, share.block_table[: blocks_for(share.context_tokens, size)]) for share in scheduled]
        self.executor.close(Untold(releases=tuple((name, blocks) for name, blocks in held if blocks)))
        if self.executor.pool.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def has_graphs(self) -> bool:
        """Whether decodes are served by captured graphs."""
        return self.executor.forward.graphs is not None

    def clocks(self) -> dict[str, Any] | None:
        """What NVML says of a GPU's clocks now; None on the CPU."""
        return None if self.executor.pool.device.type == "cpu" else nvml_clocks(self.executor.pool.device)

    def _announce(self, scheduled: list[ScheduledRequest], specs: list[RequestSpec]) -> None:
        """Make the sequences known: their prompts drawn and the blocks of their contexts booked, as earlier steps would have."""
        book = TokenBook(specs, seed=self._step, vocab_size=self.shape.vocab_size)
        self.executor.forward.tokens = book
        for share in scheduled:
            if share.context_tokens:
                book.tokens(share.request_id, 0, 0)
                held = blocks_for(share.context_tokens, self.limits.block_size)
                self.executor.moves.hold(
                    ScheduledRequest(
                        request_id=share.request_id,
                        num_tokens=share.num_tokens,
                        context_tokens=share.context_tokens,
                        block_table=share.block_table[:held],
                        samples=share.samples,
                    )
                )

    def _moves(self, point: DesignPoint, ids: Iterator[int]) -> dict[str, Any]:
        """The copies and swaps of a step, as a plan has them. What is swapped in was swapped out before."""
        copies = tuple((next(ids), next(ids)) for _ in range(point.copied_blocks))
        half = point.swapped_blocks // 2
        if not half:
            return {"copies": copies}
        leaver, comer = f"out{self._step}", f"in{self._step}"
        out, back, again = (tuple(next(ids) for _ in range(half)) for _ in range(3))
        for name, table in ((leaver, out), (comer, back)):
            self.executor.moves.hold(
                ScheduledRequest(
                    request_id=name,
                    num_tokens=1,
                    context_tokens=half * self.limits.block_size - 1,
                    block_table=table,
                    samples=False,
                )
            )
        # The CPU pool's blocks count from 1, as the core's do: those of who comes back first, then those of who leaves.
        away = self._plan(
            BatchShape(),
            [],
            swap_outs=((comer, tuple((block, place) for place, block in enumerate(back, 1))),),
            releases=((comer, back),),
        )
        self.executor.moves.begin(away)
        return {
            "copies": copies,
            "swap_outs": ((leaver, tuple((block, half + place) for place, block in enumerate(out, 1))),),
            "releases": ((leaver, out),),
            "swap_ins": ((comer, tuple(enumerate(again, 1))),),
        }

    def _plan(self, shape: BatchShape, scheduled: list[ScheduledRequest], **moves: Any) -> StepPlan:
        requests = tuple(scheduled)
        self._step += 1
        return StepPlan(
            step=self._step, repeat=1, start_fs=0, shape=shape, scheduled=lambda ahead: requests, **moves
        )  # fmt: skip

    def _read(self, reading: StepReading) -> None:
        self._reading = reading

    def _fill_pool(self, seed: int) -> None:
        """Numbers of unit variance where contexts will be read: zeros would cost a GPU less power, and so less time."""
        pool = self.executor.pool
        generator = torch.Generator(device=pool.device).manual_seed(seed)
        for layer in range(pool.layout.num_layers):
            kv = pool.layer(layer).kv
            if kv.element_size() > 1:
                kv.normal_(generator=generator)
