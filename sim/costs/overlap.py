"""Prices under asynchronous scheduling: the host prepares a step while the device works on the one before it.

A step then takes the longer of its device time and its host time instead of their sum. The first step after a pause has nothing to
hide behind, and takes the sum. Which part of a price is the host's, the cost model inside says.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from sim.core.batch_shape import BatchShape
from sim.core.clock import to_s
from sim.core.durations import Durations, Segment

from .protocol import CostModel


@runtime_checkable
class KnowsHost(CostModel, Protocol):
    """A cost model that can say which part of a step the host takes."""

    def host_fs(self, sequences: int) -> int:
        """Host time of a step with so many sequences: scheduling, preparing inputs, launching. Part of `step_fs`."""
        ...


class OverlappedHost:
    """The prices of `inner`, with the host's part hidden behind the device's where that is longer."""

    def __init__(self, inner: KnowsHost) -> None:
        """`inner` prices steps that hide nothing."""
        self.inner = inner
        self.name = inner.name

    def step_fs(self, shape: BatchShape) -> int:
        """Duration of one step of this shape."""
        whole_fs = self.inner.step_fs(shape)
        if shape.after_pause:
            return whole_fs
        host_fs = self.inner.host_fs(shape.decode_seqs + len(shape.prefill))
        return max(host_fs, whole_fs - host_fs)

    def decode_stretch(
        self, decode_seqs: int, context_tokens: int, steps: int, max_context_tokens: int = 0
    ) -> Durations:
        """Durations of `steps` pure decode steps, in closed form: in each segment the device overtakes the host at most once."""
        host_fs = self.inner.host_fs(decode_seqs)
        segments: list[Segment] = []
        for segment in self.inner.decode_stretch(decode_seqs, context_tokens, steps, max_context_tokens).segments:
            segments += _longer(segment, host_fs)
        return Durations(tuple(segments))

    def copy_fs(self, num_blocks: int) -> int:
        """As the prices inside: copies beside the steps wait for no host."""
        return self.inner.copy_fs(num_blocks)

    def warnings(self) -> list[str]:
        """Those of the prices inside, and what is hidden."""
        step_fs = self.inner.host_fs(0)
        return [
            *self.inner.warnings(),
            f"asynchronous scheduling: the host's {to_s(step_fs) * 1e3:.3g} ms a step and "
            f"{to_s(self.inner.host_fs(1) - step_fs) * 1e6:.3g} us a sequence are hidden where the device takes longer",
        ]


def overlapped(cost: CostModel) -> CostModel:
    """`cost` under asynchronous scheduling; as it is, where it knows no host time."""
    return OverlappedHost(cost) if isinstance(cost, KnowsHost) else cost


def _longer(segment: Segment, host_fs: int) -> list[Segment]:
    """The longer of `host_fs` and what is left of each step of the segment without it; steps of a segment do not get shorter."""
    device_fs = segment.first_fs - host_fs
    if device_fs >= host_fs:
        return [Segment(segment.steps, device_fs, segment.growth_fs)]
    below = (
        segment.steps if not segment.growth_fs else min(segment.steps, -(-(host_fs - device_fs) // segment.growth_fs))
    )
    parts = [Segment(below, host_fs)]
    if below < segment.steps:
        parts.append(Segment(segment.steps - below, device_fs + below * segment.growth_fs, segment.growth_fs))
    return parts
