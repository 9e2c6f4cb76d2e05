"""Durations of real steps that are the same on every machine."""

from __future__ import annotations

import random

from sim.core.clock import FS_PER_S


class SteadyTimer:
    """Stands in for the timer of a device: steps of one to eight milliseconds, drawn from a seed."""

    def __init__(self, seed: int = 7) -> None:
        self.draw = random.Random(seed)

    def start(self) -> None: ...

    def stop_fs(self) -> int:
        return int(self.draw.uniform(1, 8) * FS_PER_S / 1000)
