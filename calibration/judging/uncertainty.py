"""What the uncertainty of a profile does to a prediction: the run is simulated again with prices as they may also be.

Draw k of the prices changes all that is not known of them at once, each source by random numbers of its own (`SOURCES`):

    terms         every table by its draw: held-out errors of kernel tables, or resampled steps of a run that was timed
    step          whole steps by one factor: what the fit to timed steps leaves beyond their noise
    composition   whole steps by one factor: another model's shape, as far off as axes were that the fit had not seen
    gap           stated gaps between kernels by one factor
    host          host times that were fitted to a run's first requests, by their draw

A run priced by all of it spans the interval. What no profile knows (clocks under load, an engine of another version) is not in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from calibration.errors import CalibrationError
from calibration.numerics.split import SEED
from calibration.recorded.runs import RecordedRun
from calibration.recorded.twin import SimulatedRun
from sim.costs.overlap import OverlappedHost, overlapped
from sim.costs.profile import FittedProfile
from sim.costs.profile_file import tables_of
from sim.costs.protocol import CostModel
from sim.costs.terms import StepTerms

from .judge import Judgement

SHARE = 0.9
"""Share of runs that an interval is to hold."""
LEAST_DRAWS = 4
SOURCES = ("terms", "step", "composition", "gap", "host")


def check_draws(count: int, flag: str) -> None:
    """Raise CalibrationError for a number of draws that spans no interval; 0 asks for none."""
    if 0 < count < LEAST_DRAWS:
        raise CalibrationError(
            f"{flag} is {count}; an interval takes the spread of the draws, which fewer than {LEAST_DRAWS} cannot tell: give at least "
            f"{LEAST_DRAWS} (12 or more for a narrow one), or 0 for no interval"
        )


def drawn(cost: FittedProfile, number: int) -> FittedProfile:
    """The prices as draw `number` has them: always the same for the same number."""
    terms = _terms(cost.terms, number)
    spreads = cost.terms.spreads
    whole = float(np.exp(sum(spreads.get(name, 0.0) * _normal(name, number) for name in ("step", "composition"))))
    gap = float(np.exp(spreads.get("gap", 0.0) * _normal("gap", number)))
    host = (terms.step_s, terms.seq_s, terms.token_s)
    if terms.host_samples:
        host = terms.host_samples[_index("host", number, len(terms.host_samples))]
    changed = replace(
        terms.device_scaled(whole), gap_s=terms.gap_s * gap, step_s=host[0], seq_s=host[1], token_s=host[2]
    )
    return FittedProfile(changed, name=cost.name)


def draws(cost: CostModel, count: int) -> list[CostModel]:
    """So many draws of the prices. Raises: CalibrationError for prices that know no uncertainty, or too few draws."""
    if isinstance(cost, OverlappedHost):
        return [overlapped(one) for one in draws(cost.inner, count)]
    if not isinstance(cost, FittedProfile) or not sources_of(cost):
        raise CalibrationError(
            f"prices {cost.name!r} say nothing of their uncertainty; those of a fitted profile do (--profile auto)"
        )
    check_draws(count, "the number of draws")
    return [drawn(cost, number) for number in range(count)]


def sources_of(cost: CostModel) -> tuple[str, ...]:
    """Which of `SOURCES` draws of the prices change."""
    if isinstance(cost, OverlappedHost):
        return sources_of(cost.inner)
    if not isinstance(cost, FittedProfile):
        return ()
    terms = cost.terms
    there = {
        "terms": bool(terms.samples or terms.drawn),
        "host": bool(terms.host_samples),
        **dict.fromkeys(terms.spreads, True),
    }
    return tuple(name for name in SOURCES if there.get(name))


def next_value(values: Sequence[float]) -> tuple[float, float]:
    """Where the next value lies with probability `SHARE`, by Student's t: of logarithms, where all values are positive.

    The quantiles of a dozen draws are too narrow: their outermost ones hold the next value in 85 % of cases, not in 90.
    """
    from scipy.special import stdtrit  # scipy.stats.t.ppf, without the time to import scipy.stats

    found = np.asarray(values, dtype=np.float64)
    found = found[np.isfinite(found)]
    if found.size < 2:
        return float("nan"), float("nan")
    logarithms = bool((found > 0).all())
    if logarithms:
        found = np.log(found)
    half = float(stdtrit(found.size - 1, (1 + SHARE) / 2) * found.std(ddof=1) * np.sqrt(1 + 1 / found.size))
    low, high = float(found.mean()) - half, float(found.mean()) + half
    return (float(np.exp(low)), float(np.exp(high))) if logarithms else (low, high)


def with_intervals(
    judgement: Judgement,
    costs: Sequence[CostModel],
    simulate: Callable[[CostModel], SimulatedRun],
    judged: Callable[[RecordedRun, SimulatedRun], Judgement],
) -> Judgement:
    """The judgement with the interval of every prediction. `simulate` prices the run again by each of `costs`, which `draws` made;
    `judged` compares as before.
    """
    again = [judged(judgement.run, simulate(one)) for one in costs]
    values: dict[str, list[float]] = {metric.name: [] for metric in judgement.metrics}
    for other in again:
        for metric in other.metrics:
            values[metric.name].append(metric.predicted)
    metrics = []
    for metric in judgement.metrics:
        low, high = next_value(values[metric.name])
        metrics.append(
            replace(metric, predicted_low=min(low, metric.predicted), predicted_high=max(high, metric.predicted))
        )
    return replace(judgement, metrics=tuple(metrics))


def _terms(terms: StepTerms, number: int) -> StepTerms:
    """Every table by its draw. Draws of tables are kept together: where one is too high because another is too low, both say so."""
    if terms.drawn:
        return replace(terms, **tables_of(terms.drawn[_choice(number, len(terms.drawn))]))
    factor = {name: found[_choice(number, len(found))] for name, found in terms.samples.items()}
    return replace(
        terms,
        dense=terms.dense.scaled(factor.get("dense", 1.0)),
        rows=terms.rows.scaled(factor.get("rows", 1.0)),
        prefill=terms.prefill.scaled(factor.get("prefill", 1.0)),
        decode=terms.decode.scaled(factor.get("decode", 1.0)),
        mixed=terms.mixed.scaled(factor.get("mixed", 1.0)),
        chunk_launch_s=terms.chunk_launch_s * factor.get("prefill", 1.0),
        mixed_tile_s=terms.mixed_tile_s * factor.get("mixed", 1.0),
    )


def _choice(number: int, count: int) -> int:
    """Which of `count` draws: each once, and then again in another order with the other sources."""
    return number if number < count else _index("terms", number, count)


def _stream(source: str, number: int) -> np.random.Generator:
    return np.random.default_rng([SEED, zlib.crc32(source.encode()), number])


def _normal(source: str, number: int) -> float:
    return float(_stream(source, number).standard_normal())


def _index(source: str, number: int, count: int) -> int:
    return int(_stream(source, number).integers(count))
