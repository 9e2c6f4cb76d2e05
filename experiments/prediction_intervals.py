"""The interval of a prediction: the scenario is simulated again with draws of its profile's uncertainty."""

from __future__ import annotations

from typing import Any

from calibration.errors import CalibrationError
from calibration.uncertainty import SHARE, draws, interval
from sim.resolve import resolve
from sim.scenario import Scenario
from sim.simulation import cost_model, simulate

TIMES = ("ttft_s", "tpot_s", "itl_s", "e2el_s")
STATISTICS = ("mean", "p50", "p90", "p99")
NUMBERS = ("request_throughput_per_s", "output_throughput_tokens_per_s", "simulated_time_s")


def prediction_intervals(scenario: Scenario, count: int) -> dict[str, Any]:
    """By the summary's own keys, `[low, high]` of each time and throughput over `count` draws of the profile.

    Raises: CalibrationError for a run that is real, or prices that know no uncertainty.
    """
    resolved = resolve(scenario)
    if scenario.run.executor == "torch":
        raise CalibrationError("a real run is measured, not predicted: leave --profile-draws out")
    found = [simulate(scenario, cost=cost).summary for cost in draws(cost_model(resolved), count)]
    times = {
        name: {
            statistic: list(interval([one[name][statistic] for one in found]))
            for statistic in STATISTICS
            if all(one.get(name) and one[name].get(statistic) is not None for one in found)
        }
        for name in TIMES
    }
    return {
        "draws": count,
        "share": SHARE,
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
        f"profile's uncertainty, {intervals['share']:.0%} of {intervals['draws']} draws: {', '.join(shown)}; "
        "host time and clocks under load are not in it"
    ]
