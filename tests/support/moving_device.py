"""A checked pool of a few blocks, and what plans do to them before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu.cpu_moves import CpuMoves
from gpu.cpu_pool import CpuBlockPool
from gpu.layout import KVLayout
from gpu.ops import Ops
from gpu.plan_moves import PlanMoves
from gpu.pool import PagedKVPool
from gpu.swap import BlockMover
from sim.core.batch_shape import BatchShape
from sim.core.plan import ScheduledRequest, StepPlan

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")


class Device:
    """A checked pool of eight blocks and a CPU pool of four, and what plans do to them."""

    def __init__(self) -> None:
        self.pool = PagedKVPool(LAYOUT, 8, checked=True)
        self.ops = Ops("cpu")
        self.cached: set[int] = set()
        self.mover = BlockMover(self.pool, CpuBlockPool(LAYOUT, 4), self.ops)
        self.moves = PlanMoves(
            self.pool, self.ops, CpuMoves(self.pool, self.ops, mover=self.mover), is_cached=self.cached.__contains__
        )
        self.step = 0

    def begin(self, **decided: object) -> None:
        plan = StepPlan(step=self.step, repeat=1, start_fs=0, shape=BatchShape(), scheduled=lambda ahead: (), **decided)
        self.pool.begin_step(self.step)
        self.moves.begin(plan)

    def end(self) -> None:
        self.moves.settle()
        self.pool.end_step()
        self.step += 1

    def hold(self, name: str, table: Sequence[int], context: int = 0) -> None:
        self.moves.hold(scheduled(name, table, context))

    def write(self, block: int, value: float) -> None:
        for layer in range(LAYOUT.num_layers):
            self.pool.layer(layer).kv[block].fill_(value)

    def reads(self, block: int) -> float:
        """What a block holds, all of it; NaN when it is poisoned."""
        values = torch.stack([self.pool.layer(layer).kv[block] for layer in range(LAYOUT.num_layers)])
        assert values.isnan().all() or (values == values.flatten()[0]).all()
        return float(values.flatten()[0])

    def poisoned(self, block: int) -> bool:
        return self.reads(block) != self.reads(block)

    def owns(self, name: str, table: Sequence[int], context: int = 0) -> None:
        """`name` got these blocks in an earlier step, and wrote its own number of block and ten into each."""
        self.begin()
        self.hold(name, table, context)
        for block in table:
            self.write(block, block + 10)
        self.end()


def scheduled(name: str, table: Sequence[int], context: int = 0) -> ScheduledRequest:
    return ScheduledRequest(name, 1, context, tuple(table), samples=True)
