"""How many programs of a kernel fit on one multiprocessor, from the limits that NVIDIA publishes."""

from __future__ import annotations

from dataclasses import dataclass

REGISTERS = 65_536
"""32-bit registers of a multiprocessor, of every architecture here."""
REGISTER_UNIT = 256
"""A warp is given registers in units of so many: 8 a thread."""
WARP_UNIT = 4
"""Warps are spread over a multiprocessor's four quarters, each with a quarter of the registers."""
SHARED_UNIT = 128
"""Shared memory is given in units of so many bytes."""
RESERVED_SHARED = 1024
"""Bytes of shared memory that the system keeps for itself with every program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmLimits:
    """What one multiprocessor has room for."""

    shared_bytes: int
    """Shared memory of a multiprocessor."""
    warps: int
    programs: int
    flops_per_clock: int
    """Dense 16-bit operations with 32-bit sums that its matrix units do a clock: with a data sheet's peak, the clock it is for."""

    @property
    def shared_limit_bytes(self) -> int:
        """Most shared memory that one program may ask for."""
        return self.shared_bytes - RESERVED_SHARED


LIMITS: dict[int, SmLimits] = {
    80: SmLimits(shared_bytes=164 * 1024, warps=64, programs=32, flops_per_clock=2048),
    89: SmLimits(shared_bytes=100 * 1024, warps=48, programs=24, flops_per_clock=1024),
    90: SmLimits(shared_bytes=228 * 1024, warps=64, programs=32, flops_per_clock=4096),
    100: SmLimits(shared_bytes=228 * 1024, warps=64, programs=32, flops_per_clock=8192),
    120: SmLimits(shared_bytes=100 * 1024, warps=48, programs=24, flops_per_clock=1024),
}
"""By compute capability. **Sources:** CUDA C++ Programming Guide 13.0, table "Technical Specifications per Compute Capability"; rates of
the matrix units: NVIDIA's architecture white papers (A100, Ada, H100, Blackwell, RTX Blackwell)."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Programs on one multiprocessor at a time."""

    programs: int
    """0 when not even one fits."""
    held_by: str
    """What there would have to be more of for one more: `registers`, `shared memory`, `warps` or `programs`."""


def occupancy(*, registers: int, shared_bytes: int, num_warps: int, architecture: int) -> Occupancy:
    """Programs of `num_warps` warps, of `registers` a thread and `shared_bytes` a program, that one multiprocessor holds.

    Assumes that the driver gives shared memory as much of the first cache as they need.

    **Source:** the formulas of NVIDIA's occupancy calculator (Nsight Compute).
    """
    limits = LIMITS[architecture]
    per_warp = -(-32 * registers // REGISTER_UNIT) * REGISTER_UNIT
    warps_by_registers = REGISTERS // per_warp // WARP_UNIT * WARP_UNIT
    shared = -(-(shared_bytes + RESERVED_SHARED) // SHARED_UNIT) * SHARED_UNIT
    room = {
        "warps": limits.warps // num_warps,
        "programs": limits.programs,
        "registers": warps_by_registers // num_warps,
        "shared memory": limits.shared_bytes // shared,
    }
    held_by = min(room, key=room.__getitem__)
    return Occupancy(room[held_by], held_by)
