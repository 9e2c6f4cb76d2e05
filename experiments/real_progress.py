"""What a real run says while it makes its model and takes its steps: before the minute of silence, not after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.catalog.size_text import size_text
from sim.core.clock import FS_PER_S

if TYPE_CHECKING:
    from gpu.readings import StepReading
    from gpu.real_settings import RealSettings

ANNOUNCED_BYTES = 1 << 30
"""Weights from this size on take seconds: what is done is then said on stderr, whether or not it is a terminal."""
EVERY_S = 0.2
"""Seconds between two words about steps."""


def silent(text: str) -> None:
    """Says nothing."""


class RealProgress:
    """Tells of one run. `tell` gets what is going on, to be overwritten; `note` what is to stay on stderr."""

    def __init__(self, tell: Callable[[str], None] = silent, note: Callable[[str], None] = silent) -> None:
        self._tell, self._note = tell, note
        self._told_s = 0.0

    def making(self, settings: RealSettings) -> None:
        """The model's weights are about to be made, or read."""
        from gpu.machine import available_bytes
        from gpu.run_room import weights_bytes, weights_dtype
        from gpu.weight_files import weights_folder

        size, folder = weights_bytes(settings), weights_folder(settings.source)
        if size < ANNOUNCED_BYTES:
            return
        count = (
            f"{settings.shape.num_parameters / 1e9:.2f} billion numbers, {size_text(size)} in {weights_dtype(settings)}"
        )
        free = available_bytes() if settings.device == "cpu" else None
        of = "" if free is None else f"; this machine has {size_text(free)} free"
        if folder is not None:
            self._note(f"reading the weights of {settings.shape.name} from {folder}: {count}{of}")
            return
        took = f", about {self._seconds(settings):.0f} s" if settings.device == "cpu" else ""
        self._note(f"making random weights of {settings.shape.name}: {count}{took}{of}")

    def layer(self, done: int, of: int) -> None:
        """So many layers of the model are there."""
        self._tell(f"weights: layer {done} of {of}")

    def step(self, reading: StepReading) -> None:
        """A step was taken."""
        now_s = time.perf_counter()
        if now_s - self._told_s < EVERY_S:
            return
        self._told_s = now_s
        end_s = (reading.start_fs + reading.duration_fs) / FS_PER_S
        self._tell(
            f"step {reading.step + 1:,} ({reading.num_tokens} tokens of {reading.num_seqs} sequences), {end_s:.1f} s of the run"
        )

    def _seconds(self, settings: RealSettings) -> float:
        """How long drawing takes here, from a few numbers that are drawn now."""
        from calibration.measuring.making import SLOWNESS, drawing_rate

        return SLOWNESS * settings.shape.num_parameters / drawing_rate(settings.device)
