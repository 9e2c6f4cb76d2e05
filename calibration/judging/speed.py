"""Prices of a device that is faster or slower than it was when it was measured: every time of a profile times one factor."""

from __future__ import annotations

from dataclasses import replace

from sim.costs.profile import FittedProfile


def at_speed(cost: FittedProfile, factor: float) -> FittedProfile:
    """The same prices with every time multiplied by `factor`; shares (skew, overlap) stay. Draws of what is not known are left behind."""
    terms = cost.terms
    return FittedProfile(
        replace(
            terms.device_scaled(factor),
            gap_s=terms.gap_s * factor,
            step_s=terms.step_s * factor,
            seq_s=terms.seq_s * factor,
            token_s=terms.token_s * factor,
            copy_block_s=terms.copy_block_s * factor,
            swap_block_s=terms.swap_block_s * factor,
            samples={},
            drawn=(),
            spreads={},
            host_samples=(),
        ),
        name=cost.name,
    )
