"""The small scenarios of `kvtwin validate`, changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.validation.scenarios import SmallScenario


def with_engine(scenario: SmallScenario, **changes: Any) -> SmallScenario:
    """The scenario with other engine settings."""
    return replace(scenario, engine=replace(scenario.engine, **changes))
