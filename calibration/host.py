"""What runs take beyond their kernels, which no kernel table holds, from what requests of real runs took: an end-to-end correction.

    step += step_s + seq_s * sequences + token_s * tokens

solved for non-negative times by Gauss-Newton steps with numerical derivatives, so that a simulation's statistics of one or more runs
come closest to the measured ones. One observation can only tell the time a step; the time a token needs observations of prompts, the
time a sequence runs with different batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace

import numpy as np

from sim.costs.profile import FittedProfile

from .errors import CalibrationError
from .tent import Array

ROUNDS = 5


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
"""By which each term is raised to see what it changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionFit:
    """What was found."""

    found: Correction
    residuals: tuple[float, ...]
    """Relative error left at each observation."""
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
    tried: list[tuple[float, Array, Array]] = []
    slopes = np.zeros((measured.size, len(terms)))
    for _ in range(ROUNDS):
        now = predict(of(here))
        off = now / measured - 1
        tried.append((float(np.sum(off**2)), here, off))
        raised = [predict(of(here + probe)) for probe in np.diag(probes)]
        slopes = np.stack([(then - now) / measured for then in raised], axis=1)
        solved, _ = nnls(slopes, slopes @ (here / probes) - off)
        here = solved * probes
    off = predict(of(here)) / measured - 1
    tried.append((float(np.sum(off**2)), here, off))
    _, best, left = min(tried, key=lambda one: one[0])
    return CorrectionFit(found=of(best), residuals=tuple(left.tolist()), identified=terms, slopes=slopes)


def text(correction: Correction) -> str:
    """In words, for reports."""
    step, token, seq = astuple(correction)
    return f"{step * 1e3:.2f} ms a step, {token * 1e6:.1f} us a token, {seq * 1e6:.0f} us a sequence"
