"""Prices of a device that is faster or slower than it was when it was measured: every time of a profile times one factor."""

from __future__ import annotations

from dataclasses import replace

from sim.costs.piecewise import Grid, Line
from sim.costs.profile import FittedProfile


def at_speed(cost: FittedProfile, factor: float) -> FittedProfile:
    """The same prices with every time multiplied by `factor`; shares (skew, overlap) stay. Draws of what is not known are left behind."""
    terms = cost.terms
    return FittedProfile(
        replace(
            terms,
            dense=_line(terms.dense, factor),
            rows=_line(terms.rows, factor),
            all_reduce=None if terms.all_reduce is None else _line(terms.all_reduce, factor),
            prefill=_grid(terms.prefill, factor),
            decode=_grid(terms.decode, factor),
            mixed=_grid(terms.mixed, factor),
            mixed_tile_s=terms.mixed_tile_s * factor,
            excess_token_s=terms.excess_token_s * factor,
            chunk_launch_s=terms.chunk_launch_s * factor,
            gap_s=terms.gap_s * factor,
            step_s=terms.step_s * factor,
            seq_s=terms.seq_s * factor,
            copy_block_s=terms.copy_block_s * factor,
            swap_block_s=terms.swap_block_s * factor,
            samples={},
            drawn=(),
            spreads={},
            host_samples=(),
        ),
        name=cost.name,
    )


def _line(table: Line, factor: float) -> Line:
    return Line(table.x, tuple(value * factor for value in table.y))


def _grid(table: Grid, factor: float) -> Grid:
    return Grid(table.x, table.y, tuple(tuple(value * factor for value in row) for row in table.z))
