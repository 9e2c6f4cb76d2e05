"""The fixed cost model: an exact formula, so that analytic tests have exact answers."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.core.batch_shape import BatchShape
from sim.core.clock import FS_PER_S
from sim.core.config import ConfigError
from sim.costs import CostModel, FixedCost


def test_a_step_costs_what_the_formula_says() -> None:
    cost = FixedCost(1.0, per_token_s=0.1, per_context_token_s=0.01, per_seq_s=0.001)
    shape = BatchShape(prefill=((10, 100), (5, 0)), decode_seqs=3, decode_context_tokens=50, sampled_seqs=3)
    assert cost.step_fs(shape) == FS_PER_S * 1 + 18 * FS_PER_S // 10 + 150 * FS_PER_S // 100 + 5 * FS_PER_S // 1000
    assert cost.step_fs(BatchShape()) == FS_PER_S


@given(
    costs=st.lists(st.floats(0, 1e-2), min_size=4, max_size=4),
    seqs=st.integers(1, 300),
    context=st.integers(0, 10**6),
    steps=st.integers(1, 50),
)
def test_a_stretch_is_exactly_its_steps(costs: list[float], seqs: int, context: int, steps: int) -> None:
    cost: CostModel = FixedCost(*costs)
    stretch = cost.decode_stretch(seqs, context, steps)
    assert stretch.total_fs == sum(
        cost.step_fs(BatchShape(decode_seqs=seqs, decode_context_tokens=context + i * seqs, sampled_seqs=seqs))
        for i in range(steps)
    )


@given(costs=st.lists(st.floats(0, 1e-2), min_size=4, max_size=4), context=st.integers(0, 10**6))
def test_doubling_every_cost_doubles_every_step_exactly(costs: list[float], context: int) -> None:
    shape = BatchShape(prefill=((100, 30),), decode_seqs=7, decode_context_tokens=context, sampled_seqs=8)
    assert FixedCost(*costs).scaled(2).step_fs(shape) == 2 * FixedCost(*costs).step_fs(shape)


def test_it_can_be_pickled_and_compared() -> None:
    cost = FixedCost(0.01, per_seq_s=1e-6)
    assert pickle.loads(pickle.dumps(cost)) == cost
    assert cost != FixedCost(0.02)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_is_no_time_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="per_token_s"):
        FixedCost(0.0, per_token_s=bad)
