"""CUDA graphs: which batch sizes are captured, and what the captures take."""

from __future__ import annotations

from dataclasses import dataclass

from .rounding import MIB

ESTIMATED_BYTES_PER_LAYER = MIB // 4
"""What the engine's own estimate comes to, a layer and captured graph. Two public logs of vLLM 0.2x (27B class: 1.55 GiB, 64 layers;
0.6B class: 0.58 GiB, 28 layers) give 0.24 to 0.28 MiB for the sizes captured by default."""

ACTUAL_SHARE = 0.45
"""Actual over estimated: 0.71 / 1.55 and 0.24 / 0.58 in the same logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """The graphs an engine captures."""

    piecewise_sizes: tuple[int, ...]
    """Batch sizes (tokens) captured piece by piece between attention calls, for any batch."""
    full_sizes: tuple[int, ...]
    """Batch sizes captured whole, for pure decode."""

    @property
    def count(self) -> int:
        """Captured graphs."""
        return len(self.piecewise_sizes) + len(self.full_sizes)


def graph_plan(max_num_seqs: int, max_num_batched_tokens: int, *, enforce_eager: bool) -> GraphPlan:
    """The sizes vLLM captures by default: 1, 2, 4, every 8th below 256, every 16th up to min(2 * max_num_seqs, 512).

    **Source:** vLLM 0.19 to 0.29, `cudagraph_capture_sizes`, mode FULL_AND_PIECEWISE.
    """
    if enforce_eager:
        return GraphPlan(piecewise_sizes=(), full_sizes=())
    largest = min(2 * max_num_seqs, 512, max_num_batched_tokens)
    sizes = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if size <= largest]
    return GraphPlan(piecewise_sizes=tuple(sizes), full_sizes=tuple(size for size in sizes if size <= max_num_seqs))


def estimated_graph_bytes(plan: GraphPlan, layers: int, activation_bytes: int) -> int:
    """What the engine takes off its budget for graphs: their nodes, and the largest batch's tensors in a shared pool."""
    if not plan.count:
        return 0
    return plan.count * layers * ESTIMATED_BYTES_PER_LAYER + activation_bytes
