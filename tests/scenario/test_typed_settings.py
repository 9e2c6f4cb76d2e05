"""What is typed is what runs, under every preset, or it is refused: never a third thing.

The values are read where they act (`EngineConfig`, `Policy`, the memory account), not from the scenario's own tables.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim
from sim.core.config import ConfigError
from sim.core.policies import PRESETS
from sim.preset_settings import settings_of
from sim.scenario_errors import ScenarioError
from sim.scenario_tables import EngineTable, PolicyTable
from tests.support.typed_settings import DECIDED, VALUES, contradicted, resolved, typed


def test_every_key_of_engine_and_policy_has_admissible_values_here():
    keys = {*EngineTable.model_fields, *PolicyTable.model_fields} - {"vllm_args", "policy"}
    assert set(VALUES) == keys
    assert {key for preset in PRESETS for key in settings_of(preset)} <= set(DECIDED)


@st.composite
def _scenarios(draw: st.DrawFn) -> tuple[str, dict[str, object]]:
    keys = draw(st.lists(st.sampled_from(DECIDED), min_size=1, max_size=3, unique=True))
    keys += draw(st.lists(st.sampled_from(sorted(set(VALUES) - set(DECIDED))), max_size=3, unique=True))
    return draw(st.sampled_from(sorted(PRESETS))), {key: draw(st.sampled_from(VALUES[key])) for key in keys}


@settings(max_examples=400)
@given(_scenarios())
def test_an_engine_has_every_value_that_was_typed_or_there_is_no_engine(drawn):
    preset, given = drawn
    try:
        engine = resolved(sim.Scenario(**typed(preset, given)))
    except (ScenarioError, ConfigError):
        return
    for key, value in given.items():
        assert contradicted(engine, key, value) is None


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("key", VALUES)
def test_each_value_by_itself_is_had_or_refused_with_its_name(preset, key):
    for value in VALUES[key]:
        said, engine = "", None
        try:
            engine = resolved(sim.Scenario(**typed(preset, {key: value})))
        except (ScenarioError, ConfigError) as error:
            said = str(error)
        assert key in said if engine is None else contradicted(engine, key, value) is None
