"""What a cost model must answer, and nothing about how."""

from __future__ import annotations

from typing import Protocol

from sim.core.batch_shape import BatchShape
from sim.core.durations import Durations


class CostModel(Protocol):
    """Prices engine steps. The same question always gets the same answer, to the femtosecond."""

    name: str
    """What to print in a report, e.g. `roofline:h100-sxm-80gb`."""

    def step_fs(self, shape: BatchShape) -> int:
        """Duration of one step of this shape."""
        ...

    def decode_stretch(
        self, decode_seqs: int, context_tokens: int, steps: int, max_context_tokens: int = 0
    ) -> Durations:
        """Durations of `steps` pure decode steps, in closed form.

        Step i reads `context_tokens + i * decode_seqs` tokens of KV (the new tokens included), of which the longest sequence
        `max_context_tokens + i` (0: not known), and must cost exactly what `step_fs(BatchShape(decode_seqs=decode_seqs,
        decode_context_tokens=..., decode_max_context_tokens=..., sampled_seqs=decode_seqs))` says.
        """
        ...

    def copy_fs(self, num_blocks: int) -> int:
        """Time to move KV blocks between the device and CPU memory, one way, beside the steps."""
        ...

    def warnings(self) -> list[str]:
        """Sentences about this run's prices that a reader must know, such as use outside the fitted range."""
        ...
