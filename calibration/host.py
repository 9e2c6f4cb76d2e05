"""What runs take beyond their kernels, which no kernel table holds, from what requests of real runs took: an end-to-end correction.

    step += step_s + seq_s * sequences + token_s * tokens

solved for non-negative times, so that a simulation's statistics of one or more runs come closest to the measured ones. When a request
meets others differs from one guess to the next, and statistics jump by a per cent or two with it: so errors and slopes at a guess are
those of a plane through a grid of simulations around it (a response surface), and the guess moves to where the plane is lowest. One
observation can only tell the time a step; the time a token needs observations of prompts, the
time a sequence runs with different batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import product

import numpy as np

from sim.costs.profile import FittedProfile

from .errors import CalibrationError
from .tent import Array

ROUNDS = 4
GRID = (-1, 0, 1)
"""Places of the grid along each term, in probes from the guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Times added to a step, in seconds."""

    step_s: float = 0.0
    """A step: host work and launches that the device does not hide."""
    token_s: float = 0.0
    """A token computed: clocks that sustained work lowers, collectives of long messages."""
    seq_s: float = 0.0
    """A sequence of a step."""


PROBES = {"step_s": 4e-4, "token_s": 1e-5, "seq_s": 4e-5}
"""By which each term is changed to see what that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionFit:
    """What was found."""

    found: Correction
    residuals: tuple[float, ...]
    """Relative error left at each observation, of the plane."""
    identified: tuple[str, ...]
    """Which terms the observations can tell; the others are 0."""
    slopes: Array
    """Relative change of each observation for `PROBES` of each identified term, where the fit ended; `[observations, terms]`."""

    def drawn(self, off: Array) -> Correction:
        """The correction that observations ask for which are off by `off` under the one that was found, by its slopes; at least 0."""
        from scipy.optimize import nnls

        probes = np.asarray([PROBES[term] for term in self.identified])
        here = np.asarray([getattr(self.found, term) for term in self.identified]) / probes
        solved, _ = nnls(self.slopes, self.slopes @ here - off)
        return Correction(**{term: float(value) for term, value in zip(self.identified, solved * probes, strict=True)})


def corrected(cost: FittedProfile, correction: Correction) -> FittedProfile:
    """The same kernel prices with these times instead of the profile's host times and gaps."""
    terms = replace(cost.terms, gap_s=0.0, **asdict(correction))
    return FittedProfile(terms, name=cost.name)


def fit_correction(
    predict: Callable[[Correction], Array], measured: Array, terms: Sequence[str] = ("step_s", "token_s")
) -> CorrectionFit:
    """Times under which `predict` comes closest to `measured`, relatively; `[observations]` each.

    No more of `terms` are fitted than there are observations, the first ones. Raises: CalibrationError when a measured value is not
    positive.
    """
    from scipy.optimize import nnls

    if not (measured > 0).all():
        raise CalibrationError(f"host time cannot be fitted to {measured.tolist()}: times must be above 0")
    terms = tuple(terms)[: measured.size]
    probes = np.asarray([PROBES[term] for term in terms])

    def of(values: Array) -> Correction:
        return Correction(**dict(zip(terms, (float(value) for value in values), strict=True)))

    here = np.zeros(len(terms))
    tried: list[tuple[float, Array, Array, Array]] = []
    for _ in range(ROUNDS):
        off, slopes = _plane(lambda values: predict(of(values)) / measured - 1, here, probes)
        tried.append((float(np.sum(off**2)), here, off, slopes))
        solved, _ = nnls(slopes, slopes @ (here / probes) - off)
        here = solved * probes
    _, best, left, slopes = min(tried, key=lambda one: one[0])
    return CorrectionFit(found=of(best), residuals=tuple(left.tolist()), identified=terms, slopes=slopes)


def _plane(error: Callable[[Array], Array], here: Array, probes: Array) -> tuple[Array, Array]:
    """Errors at `here` `[observations]` and their slopes for a probe of each term `[observations, terms]`. No time falls below 0."""
    grid = np.asarray(list(product(GRID, repeat=here.size)), dtype=np.float64)
    centre = np.maximum(here / probes, -min(GRID))  # the whole grid is moved up where a term is near 0
    places = centre + grid
    design = np.column_stack([np.ones(len(places)), places - here / probes])
    plane, *_ = np.linalg.lstsq(design, np.stack([error(place * probes) for place in places]), rcond=None)
    return plane[0], plane[1:].T


def text(correction: Correction) -> str:
    """In words, for reports."""
    step, token, seq = astuple(correction)
    return f"{step * 1e3:.2f} ms a step, {token * 1e6:.1f} us a token, {seq * 1e6:.0f} us a sequence"
