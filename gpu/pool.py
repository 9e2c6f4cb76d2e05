"""PagedKVPool: the KV blocks of one device, in one arena taken once.

Blocks are addressed by the core's ids. In checked mode every block that holds nothing is filled with NaN and every block in
use carries its owners' names, so that a read of what was never written, was given back, or belongs to somebody else fails
and says which block, which owner and which step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from sim.core.blocks import NO_BLOCK

from .fences import CudaFence, Fence, StepClock, StepFence
from .kernels.block_rows import BlockRows
from .kernels.launch import KVView
from .layout import KVLayout
from .metering import DeviceBudget
from .owners import OwnerTags

POISON = 0xFF
"""The byte whose repetition is NaN in every format: bfloat16, float16, float32 and e4m3fn."""


class PoisonedReadError(RuntimeError):
    """A token's KV is NaN: it was never written, or its block was given back. Names block, layer, owner and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounters:
    """What the device's pool holds now."""

    reserved_bytes: int
    """Bytes of the arena (and of the constant scales), as the tensors' storage says."""
    device_reserved_bytes: int | None
    """Bytes that torch has reserved on the device for everything; None without a CUDA device."""
    allocated_blocks: int
    """Blocks that a request holds."""
    quarantined_blocks: int
    """Blocks that nobody holds and a fence still guards."""
    free_blocks: int
    """All others, NO_BLOCK not counted."""


class PagedKVPool:
    """`num_blocks` blocks of `layout` on `device`; ids 1 to `num_blocks`, 0 is NO_BLOCK."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: Any = "cpu",
        *,
        checked: bool = False,
        budget: DeviceBudget | None = None,
        num_model_layers: int | None = None,
    ) -> None:
        """`num_model_layers`: the model's layers, where several have one place in a block; by default each has its own."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        self.checked = checked
        """Poison what holds nothing, refuse early reuse, verify owners."""
        self._budget = budget
        self.clock = StepClock()
        self.tags = OwnerTags(num_blocks)
        arena_bytes = layout.arena_bytes(num_blocks)
        if budget is not None:
            budget.reserve("KV pool", arena_bytes)
        self.arena = torch.zeros(arena_bytes, dtype=torch.uint8, device=self.device)
        """`[arena_bytes]` uint8."""
        if checked:
            self.arena.fill_(POISON)
        scaled = layout.num_layers if num_model_layers is None else num_model_layers
        self.scales = torch.ones((scaled, 2), dtype=torch.float32, device=self.device)
        """`[num_model_layers, 2]`: the constant scales of K and V, used by an fp8 cache without a scale a vector. They are a layer's, not
        its place's, and 1 without calibration. **Source:** vLLM, `BaseKVCacheMethod`: `_k_scale`, `_v_scale` of each attention layer.
        """
        self.rows = BlockRows.of(layout, self.arena, num_blocks + 1)
        """The arena as rows of blocks, for moving and summing them."""
        self._findable: set[int] = set()  # in quarantine, and a prefix cache may still find them: not to be poisoned
        self._layers = [self._view(place) for place in range(layout.num_layers)]
        self._scaled: dict[tuple[int, int], KVView] = {}

    def layer(self, place: int, layer: int | None = None) -> KVView:
        """The cache of the model's `layer` (by default the one of that number) at its place in the blocks:
        `[num_blocks + 1, 2, block_size, num_kv_heads, head_dim]` and its scales. With several attention groups the layers that have one
        place share it: no block is in two of their tables.
        """
        if self.layout.scaling != "static" or layer is None:
            return self._layers[place]
        if (place, layer) not in self._scaled:
            self._scaled[place, layer] = self._view(place, layer)
        return self._scaled[place, layer]

    def _view(self, place: int, layer: int | None = None) -> KVView:
        layout = self.layout
        start = place * layout.layer_stride_bytes(self.num_blocks)
        numbers = self.arena.view(getattr(torch, layout.torch_dtype))
        shape = layout.layer_shape(self.num_blocks)
        kv = numbers.as_strided(shape, layout.layer_strides, start // layout.element_bytes)
        if layout.scaling == "none":
            return KVView.of(kv)
        if layout.scaling == "static":
            return KVView.of(kv, self.scales[place if layer is None else layer].view(1, 2, 1, 1).expand(shape[:4]))
        floats = self.arena.view(torch.float32)
        offset = (start + layout.scale_offset_bytes) // 4
        return KVView.of(kv, floats.as_strided(shape[:4], layout.scale_strides, offset), dynamic=True)

    # -- steps and fences -----------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Step `step` starts: blocks whose fence has passed are free from here on."""
        self.clock.begin(step)
        self.settle()

    def end_step(self) -> None:
        """The step's work is submitted (CUDA) or done (CPU)."""
        self.clock.end()

    def fence(self) -> Fence:
        """The point that the work submitted so far will have reached: an event on CUDA, the end of this step on the CPU."""
        return CudaFence() if self.device.type == "cuda" else StepFence(self.clock, self.clock.step)

    def settle(self) -> None:
        """Let blocks whose fence has passed out of quarantine."""
        freed = self.tags.settle()
        if self.checked:
            self.poison([block_id for block_id in freed if block_id not in self._findable])
            self._findable.difference_update(freed)

    # -- holding and giving back ----------------------------------------------------------------------------------

    def assign(self, owner: str, block_table: Sequence[int], context_tokens: int) -> None:
        """`owner` will use this table, of whose tokens the first `context_tokens` are written. In checked mode, blocks it did
        not hold before and that hold none of them are poisoned.

        Raises:
            FenceError: a block's last reader is not done (checked mode; otherwise the stream is made to wait).
        """
        fresh = set(self.tags.hold(owner, block_table, self.clock.step, wait=not self.checked))
        if self.checked:
            written = -(-context_tokens // self.layout.block_size)
            self.poison([block_id for block_id in block_table[written:] if block_id in fresh])

    def release(
        self, owner: str, block_ids: Iterable[int], *, fence: Fence | None = None, keep_content: bool = False
    ) -> None:
        """`owner` gives blocks back. Behind a `fence` they stay in quarantine until it passes. In checked mode what nobody
        holds is poisoned, now or when it leaves quarantine, unless a prefix cache may still find it (`keep_content`).

        Raises:
            DoubleFreeError: `owner` does not hold one of them.
        """
        idle = self.tags.release(owner, block_ids, self.clock.step, fence)
        if keep_content:
            self._findable.update(idle if fence is not None and not fence.passed() else ())
        elif self.checked and (fence is None or fence.passed()):
            self.poison(idle)

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN, all layers."""
        for block_id in block_ids:
            self.rows.strided[block_id].fill_(-1)

    def beside(self) -> AbstractContextManager[None]:
        """Inside, what is allocated does not count against the device's limit."""
        return nullcontext() if self._budget is None else self._budget.beside()

    # -- checking -------------------------------------------------------------------------------------------------

    def check_read(self, owner: str, block_table: Sequence[int]) -> None:
        """Verify that `owner` holds every block of a table. Looks at tags only.

        Raises:
            ForeignReadError: it does not.
        """
        self.tags.check_held(owner, block_table, self.clock.step)

    def check_content(
        self,
        owner: str,
        block_table: Sequence[int],
        num_tokens: int,
        first_token: int = 0,
        places: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Verify that tokens `[first_token, num_tokens)` of a table are written in every layer, or at these `(place, layer)` of its
        blocks. Reads the blocks, and waits for the device: for checked runs and for naming the culprit once NaN has been seen.

        Raises:
            PoisonedReadError: one is not.
        """
        size = self.layout.block_size
        if places is None:
            places = [(layer, layer) for layer in range(self.layout.num_layers)]
        for index in range(first_token // size, -(-num_tokens // size)):
            block_id = block_table[index]
            low, high = max(first_token - index * size, 0), min(num_tokens - index * size, size)
            for place, layer in places:
                with self.beside():
                    tokens = _broken_tokens(self._layers[place], block_id, low, high)
                if tokens:
                    released = self.tags.last_release(block_id)
                    what = "NO_BLOCK, which holds nothing," if block_id == NO_BLOCK else f"block {block_id}"
                    history = f"released by {released}" if released else "never written"
                    raise PoisonedReadError(
                        f"{owner} reads {what} at step {self.clock.step}: token {index * size + low + tokens[0]} of its table "
                        f"is NaN in layer {layer}; the block was {history}"
                    )

    def check(self, tables: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Verify that the core's `(owner, block table)` pairs are what this device was told.

        Raises:
            IntegrityError: which blocks differ.
        """
        self.tags.compare(tables)

    def counters(self) -> PoolCounters:
        """What the pool holds now, by the device's own book and the tensors' storage."""
        held, waiting = self.tags.num_held, self.tags.num_quarantined
        cuda = self.device.type == "cuda"
        return PoolCounters(
            reserved_bytes=self.arena.untyped_storage().nbytes() + self.scales.untyped_storage().nbytes(),
            device_reserved_bytes=torch.cuda.memory_reserved(self.device) if cuda else None,
            allocated_blocks=held,
            quarantined_blocks=waiting,
            free_blocks=self.num_blocks - held - waiting,
        )


def _broken_tokens(view: KVView, block_id: int, low: int, high: int) -> list[int]:
    """Offsets from `low` of tokens `[low, high)` of a block whose K or V (or a scale of theirs) is NaN."""
    numbers = view.kv[block_id, :, low:high].to(torch.float32).isnan().any(-1).any(-1).any(0)
    if view.dynamic:
        numbers |= view.scale[block_id, :, low:high].isnan().any(-1).any(0)
    return [int(place) for place in numbers.nonzero().flatten().tolist()]
