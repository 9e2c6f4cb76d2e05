"""What a step needs by measured memory lines: the fitted phases, and for work that was never timed what the account counts besides."""

from __future__ import annotations

from sim.catalog.gpus import Gpu
from sim.catalog.shape import ModelShape
from sim.core.batch_shape import BatchShape

from .measured import MeasuredMemory
from .ops import Peak
from .settings import Settings
from .step_memory import Need, StepMemory

_NOTHING: frozenset[str] = frozenset()


class MeasuredStepMemory(StepMemory):
    """Prices steps by fitted phases of their workspace; they grow with the context, so the last step of a stretch is the widest."""

    def __init__(self, model: ModelShape, gpu: Gpu, settings: Settings, measured: MeasuredMemory) -> None:
        super().__init__(model, gpu, settings)
        self._measured = measured

    def need(self, shape: BatchShape, steps: int = 1, extra: frozenset[str] = _NOTHING) -> Need:
        """As for counted steps."""
        if shape.passes > 1:
            return max((self.need(part, steps, extra) for part in shape.split()), key=lambda need: need.bytes)
        counted = self._measured.need_bytes(shape.later(steps - 1))
        phase = "prefill" if shape.prefill else "decode"
        if not extra:
            return Need(counted, phase)
        more = super().need(shape, steps, extra)
        return Need(counted + max(0, more.bytes - super().need(shape, steps).bytes), more.phase)

    def widest(self, shape: BatchShape, steps: int = 1, extra: frozenset[str] = _NOTHING) -> Peak:
        """As for counted steps: of unprofiled work the counted operators, else the terms of the widest phase."""
        if extra:
            return super().widest(shape, steps, extra)
        return max(self.phases(shape.later(steps - 1)), key=lambda peak: peak.bytes)

    def phases(self, shape: BatchShape, extra: frozenset[str] = _NOTHING) -> list[Peak]:
        """Every phase of a step, term by term; of several passes, those of the most demanding one."""
        if extra:
            return super().phases(shape, extra)
        parts = shape.split() if shape.passes > 1 else (shape,)
        return max((self._measured.phases(part) for part in parts), key=lambda peaks: max(peak.bytes for peak in peaks))
