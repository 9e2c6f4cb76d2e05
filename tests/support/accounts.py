"""A bandwidth account on an H200 (132 multiprocessors, 4.8 TB/s), with what a test changes of it."""

from __future__ import annotations

from typing import Any

from gpu.bandwidth import BandwidthAccount
from gpu.occupancy import Occupancy
from sim.catalog.gpus import GPUS


def account(**changes: Any) -> BandwidthAccount:
    """Five programs of 32 KiB in flight, and instructions for twice the bandwidth."""
    given: dict[str, Any] = {
        "gpu": GPUS["h200-sxm-141gb"],
        "programs": 1024,
        "fits": Occupancy(5, "registers"),
        "program_in_flight_bytes": 32_768.0,
        "issued_bytes_per_s": 9.6e12,
    }
    return BandwidthAccount(**(given | changes))
