"""The bandwidth account of a compiled kernel: what it can ask of a card's memory, computed and not measured.

By Little's law a card moves B bytes a second only while B times the latency of its memory is under way. How much that is follows from the
machine code: programs a multiprocessor (`gpu.occupancy`) times what each reads per latency (`gpu.sass_walk`). Divided by the card's
bandwidth it is the time that one round trip may take, a program's own work included, before memory has to wait for the kernel.
The second bound is the rate at which a multiprocessor carries out instructions: one a clock in each quarter.

What is not in it: how long dependent instructions and barriers of one program take (they eat into the first figure), conflicts
of banks, pages and cache sets. A kernel that fails here cannot reach the card's bandwidth; one that passes may.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from sim.catalog.gpus import GPUS, Gpu

from .kernels.launch import Launch
from .occupancy import LIMITS, Occupancy, occupancy
from .sass import Resources

CARDS = {80: "a100-sxm-80gb", 89: "l40s-48gb", 90: "h200-sxm-141gb", 100: "b200-sxm-180gb", 120: "rtx-pro-6000-96gb"}
"""The card an account is for, by compute capability: of those in the catalogue the one with the fastest memory."""

LATENCY_NS = 1000
"""Assumed time of one read of a memory that is kept busy: an assumption, which nobody here has measured. Of an idle memory it is 466 clocks
on an A100 and 479 on an H100, about 300 ns; it grows as queues fill. **Source of the idle figures:** Luo et al. (arXiv:2402.13499).
"""
QUARTERS = 4
"""Warp schedulers of a multiprocessor; each carries out one instruction of a warp a clock. **Source:** CUDA C++ Programming Guide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthAccount:
    """What a kernel can ask of one card's memory."""

    gpu: Gpu
    """The card."""
    programs: int
    """Of this launch."""
    fits: Occupancy
    """Programs on one multiprocessor, and why not more."""
    program_in_flight_bytes: float
    """Bytes that one program reads per latency."""
    issued_bytes_per_s: float
    """What the card's multiprocessors can read and write at the rate of their instructions; 0 for code that moves no data."""

    @property
    def in_flight_bytes(self) -> float:
        """Bytes under way for one multiprocessor that is full."""
        return self.fits.programs * self.program_in_flight_bytes

    @property
    def hidden_ns(self) -> float:
        """How long a round trip may take, work included, at the card's full bandwidth."""
        return self.in_flight_bytes * self.gpu.sm_count / self.gpu.memory_bandwidth_bytes_per_s * 1e9

    @property
    def sustained_share(self) -> float:
        """Share of the card's bandwidth that it can ask for at `LATENCY_NS`, by both bounds; more than 1 is room to spare."""
        return min(self.hidden_ns / LATENCY_NS, self.issued_bytes_per_s / self.gpu.memory_bandwidth_bytes_per_s)

    @property
    def waves(self) -> float:
        """Programs of the launch over those that the card holds at once; 0 where none fits."""
        room = self.fits.programs * self.gpu.sm_count
        return self.programs / room if room else 0.0

    def as_json(self) -> dict[str, Any]:
        """The account as JSON values."""
        return {
            "gpu": self.gpu.name,
            "assumed_latency_ns": LATENCY_NS,
            "programs_per_sm": self.fits.programs,
            "held_by": self.fits.held_by,
            "in_flight_bytes_per_sm": round(self.in_flight_bytes),
            "hidden_ns": round(self.hidden_ns),
            "issued_gb_per_s": round(self.issued_bytes_per_s / 1e9),
            "sustained_share": round(self.sustained_share, 3),
            "programs": self.programs,
            "waves": round(self.waves, 2),
        }


def bandwidth_account(launch: Launch, architecture: int, found: Resources, shared_bytes: int) -> BandwidthAccount:
    """The account of a launch that was compiled to `found` for a compute capability."""
    gpu, threads = GPUS[CARDS[architecture]], 32 * launch.num_warps
    traffic = found.traffic
    moved = threads * (traffic.read_bytes + traffic.written_bytes)
    clocks = traffic.instructions * launch.num_warps / QUARTERS
    return BandwidthAccount(
        gpu=gpu,
        programs=prod(launch.grid),
        fits=occupancy(
            registers=found.registers,
            shared_bytes=shared_bytes,
            num_warps=launch.num_warps,
            architecture=architecture,
        ),
        program_in_flight_bytes=threads * traffic.in_flight_bytes,
        issued_bytes_per_s=moved / clocks * gpu.sm_count * clock_hz(gpu) if clocks else 0.0,
    )


def clock_hz(gpu: Gpu) -> float:
    """The clock at which a card has the peak of its data sheet."""
    major, minor = gpu.compute_capability
    return gpu.bf16_flops_per_s / (gpu.sm_count * LIMITS[10 * major + minor].flops_per_clock)
