"""What a decode stretch must be equal to: its steps, priced one by one."""

from __future__ import annotations

from sim.core.batch_shape import BatchShape
from sim.costs import CostModel


def each_step_of(cost: CostModel, seqs: int, context: int, longest: int, steps: int) -> list[int]:
    """Femtoseconds of each of `steps` decode steps of `seqs` sequences, whose context grows by a token a step."""
    return [
        cost.step_fs(
            BatchShape(
                decode_seqs=seqs,
                decode_context_tokens=context + i * seqs,
                decode_max_context_tokens=longest + i,
                sampled_seqs=seqs,
            )
        )
        for i in range(steps)
    ]
