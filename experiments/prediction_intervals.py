"""The interval of a prediction: the scenario is simulated again with draws of its profile's uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calibration.errors import CalibrationError
from calibration.uncertainty import SHARE, check_draws, draws, interval, sources_of
from sim.assembly import cost_model
from sim.costs.protocol import CostModel
from sim.resolve import resolve
from sim.scenario import Scenario
from sim.simulation import simulate

TIMES = ("ttft_s", "tpot_s", "itl_s", "e2el_s")
STATISTICS = ("mean", "p50", "p90", "p99")
WORDS = {
    "terms": "held-out error of its terms",
    "step": "what the fit leaves of a step",
    "composition": "another model's shape",
    "gap": "the stated gap between kernels",
    "host": "fitted host times",
}
"""What each source of uncertainty is."""
NUMBERS = ("request_throughput_per_s", "output_throughput_tokens_per_s", "simulated_time_s")


def drawn_prices(scenario: Scenario, count: int) -> list[CostModel]:
    """So many draws of the scenario's prices; to be asked before anything runs. None for 0.

    Raises: CalibrationError for too few draws, a run that is real, or prices that know no uncertainty.
    """
    check_draws(count, "--profile-draws")
    if not count:
        return []
    if scenario.run.executor == "torch":
        raise CalibrationError("a real run is measured, not predicted: leave --profile-draws out")
    return draws(cost_model(resolve(scenario)), count)


def prediction_intervals(scenario: Scenario, costs: Sequence[CostModel]) -> dict[str, Any]:
    """By the summary's own keys, `[low, high]` of each time and throughput over runs with these draws of the prices."""
    found = [simulate(scenario, cost=cost).summary for cost in costs]
    times = {
        name: {
            statistic: list(interval([one[name][statistic] for one in found]))
            for statistic in STATISTICS
            if all(one.get(name) and one[name].get(statistic) is not None for one in found)
        }
        for name in TIMES
    }
    return {
        "draws": len(costs),
        "share": SHARE,
        "sources": list(sources_of(cost_model(resolve(scenario)))),
        **{name: statistics for name, statistics in times.items() if statistics},
        **{name: list(interval([one[name] for one in found])) for name in NUMBERS},
    }


def interval_lines(intervals: dict[str, Any]) -> list[str]:
    """The intervals of means and medians in words."""
    shown = [
        f"{name} {statistic} [{low:.4g}, {high:.4g}]"
        for name in TIMES
        for statistic, (low, high) in intervals.get(name, {}).items()
        if statistic in ("mean", "p99")
    ]
    return [
        f"{intervals['share']:.0%} intervals by {intervals['draws']} draws of the profile's uncertainty "
        f"({', '.join(WORDS[source] for source in intervals['sources'])}): {', '.join(shown)}; clocks under load and another engine "
        "version are not in them"
    ]
