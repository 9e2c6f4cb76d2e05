"""Admission by predicted peak: the estimate of lengths, the probability, and what it is good for.

claim                                             test
product-limit estimate, by hand                   test_the_survival_of_…
exact sum = every outcome written out             test_the_exact_probability_is_that_of_every_outcome
normal approximation near the exact one           test_the_normal_approximation_is_close_where_it_is_used
the promise: the pool overflows at most as said   test_the_pool_is_exceeded_no_more_often_than_the_risk
it wins where prompts are long                    test_it_serves_more_in_time_than_the_engines_when_recomputing_is_dear
"""

from __future__ import annotations

import itertools
import math
import random
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.core.config import EngineConfig
from sim.core.policies import PredictedPeak, Survival, preset_of
from sim.core.policies.predicted_peak import exceeds, horizons, normal_exceeds, still_running
from sim.core.request import RequestSpec
from sim.costs.constant import FixedCost
from sim.results.summary import summarize
from sim.world import run_world

# -- lengths -----------------------------------------------------------------------------------------------------------------


def test_the_survival_of_finished_outputs_by_hand() -> None:
    """Lengths 2, 2, 5 and one imagined that never ends: 4 reach 2, of which 2 end; 2 reach 5, of which 1 ends."""
    lengths = Survival([5, 2, 2])
    assert [lengths.beyond(n) for n in (0, 1, 2, 4, 5, 100)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert still_running(2, 100, lengths, 3, [0, 1]) == (1.0, 0.5)
    assert still_running(0, 100, lengths, 1, [1]) == (1.0,)
    assert still_running(0, 1, lengths, 1, [0, 1, 2]) == (1.0, 0.0, 0.0)


def test_the_survival_of_running_outputs_counts_them_as_far_as_they_have_come() -> None:
    """As above, with two running at 3 and 7 tokens: 6 reach 2, of which 2 end; 3 reach 5 (finished, running, imagined), 1 ends."""
    lengths = Survival([5, 2, 2], running=[3, 7])
    assert lengths.beyond(2) == pytest.approx(2 / 3)
    assert lengths.beyond(5) == pytest.approx(2 / 3 * 2 / 3)


def test_with_nothing_finished_every_output_may_reach_its_cap() -> None:
    assert Survival([], running=[10, 20]).beyond(10**6) == 1.0


def test_quantiles_are_joined_by_straight_lines() -> None:
    lengths = Survival.from_quantiles([(0.5, 100), (1.0, 300)])
    assert lengths.beyond(0) == pytest.approx(1.0, abs=0.04)
    assert lengths.beyond(100) == pytest.approx(0.5)
    assert lengths.beyond(200) == pytest.approx(0.25, abs=0.04)
    assert lengths.beyond(300) == 0.0


def test_the_estimate_finds_the_distribution_that_lengths_were_drawn_from() -> None:
    rng = random.Random(3)
    lengths = Survival([1 + int(rng.expovariate(1 / 100)) for _ in range(4000)])
    for tokens in (20, 100, 250):
        assert lengths.beyond(tokens) == pytest.approx(math.exp(-tokens / 100), abs=0.02)


# -- the probability -----------------------------------------------------------------------------------------------------------

parts_lists = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30)), min_size=1, max_size=7)


@given(parts_lists, st.integers(0, 120))
def test_the_exact_probability_is_that_of_every_outcome(parts: list[tuple[float, int]], pool: int) -> None:
    expected = 0.0
    for outcome in itertools.product((False, True), repeat=len(parts)):
        if sum(blocks for lives, (_, blocks) in zip(outcome, parts, strict=True) if lives) > pool:
            expected += math.prod(q if lives else 1 - q for lives, (q, _) in zip(outcome, parts, strict=True))
    assert exceeds(pool, parts) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("num", "within"), [(9, 0.04), (16, 0.025), (40, 0.012)])
def test_the_normal_approximation_is_close_where_it_is_used(num: int, within: float) -> None:
    """For nine requests and more, at the probabilities that decide (1 to 10 %), it is a few points off at worst, and closer for more."""
    rng = random.Random(num)
    for _ in range(30):
        parts = [(rng.uniform(0.3, 0.95), rng.randint(10, 60)) for _ in range(num)]
        expected = sum(q * b for q, b in parts)
        variance = sum(q * (1 - q) * b * b for q, b in parts)
        for deviations in (1.3, 1.645, 2.0, 2.3):
            pool = int(expected + deviations * math.sqrt(variance))
            assert normal_exceeds(pool, expected, variance) == pytest.approx(exceeds(pool, parts), abs=within)


def test_without_uncertainty_the_answer_is_yes_or_no() -> None:
    assert normal_exceeds(10, 10.0, 0.0) == 0.0
    assert normal_exceeds(10, 11.0, 0.0) == 1.0


def test_horizons_are_close_at_first_and_reach_the_end() -> None:
    assert horizons(16, 256) == [0, 1, 2, 3, 4, 6, 9, 13, 19]
    assert horizons(16, 1) == [0, 1, 2]


def test_when_it_knows_nothing_it_reserves_the_worst_case(drive) -> None:
    """20 blocks of 16: each request may reach 160 tokens, ten blocks; two run, the third waits though its prompt would fit."""
    engine = drive(num_gpu_blocks=20, block_size=16, preset="predicted-peak", max_model_len=1024)
    for index in range(3):
        engine.add(f"r{index}", 16, output_tokens=20, max_tokens=145)
    assert list(engine.step().tokens) == ["r0", "r1"]


def test_what_it_was_told_lets_more_in(drive) -> None:
    from sim.core.admission import CanEverFit, Every, FreeBlocks
    from sim.core.policy import Policy

    peak = PredictedPeak(quantiles=[(1.0, 32)])
    policy = Policy(admission=lambda config: Every([CanEverFit(config), FreeBlocks(), peak]))
    engine = drive(num_gpu_blocks=20, block_size=16, policy=policy, max_model_len=1024)
    for index in range(8):
        engine.add(f"r{index}", 16, output_tokens=20, max_tokens=145)
    assert len(engine.step().tokens) >= 6  # at most three blocks each, and not all of them at once


# -- what it is good for ---------------------------------------------------------------------------------------------------------


def rag(num: int, rate_per_s: float, seed: int) -> list[RequestSpec]:
    """Long prompts (median 3000 tokens), short answers with a long tail (median 150), and a generous max_tokens of 2048."""
    rng, now_s, made = random.Random(seed), 0.0, []
    for index in range(num):
        now_s += rng.expovariate(rate_per_s)
        output = min(max(1, int(rng.lognormvariate(math.log(150), 1.0))), 2048)
        prompt = min(max(8, int(rng.lognormvariate(math.log(3000), 0.8))), 4000)
        made.append(
            RequestSpec(
                request_id=f"r{index}", arrival_s=now_s, input_tokens=prompt, output_tokens=output, max_tokens=2048
            )
        )
    return made


def served(preset: str, requests: list[RequestSpec]) -> dict[str, object]:
    config = EngineConfig(
        num_gpu_blocks=4000,
        block_size=16,
        max_model_len=20_000,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )
    cost = FixedCost(0.012, per_token_s=6e-5, per_context_token_s=2e-8, per_seq_s=1e-5)
    made = preset_of(preset, config)
    record = run_world(made.config, cost, requests, policy=made.policy)
    return summarize(record, scenario={}, seed=0, version="", limits_s={"ttft": 5.0, "tpot": 0.05})


def test_the_pool_is_exceeded_no_more_often_than_the_risk() -> None:
    """Preemptions happen when demand exceeds the pool: at 5 % risk after at most one admission in twenty, and here far fewer."""
    summary = served("predicted-peak", rag(500, 3.0, seed=0))
    assert summary["num_preemptions"] <= 0.05 * 500
    assert served("vllm-v1", rag(500, 3.0, seed=0))["num_preemptions"] > 20


def test_it_serves_more_in_time_than_the_engines_when_recomputing_is_dear() -> None:
    """At about capacity (3 requests a second) more requests get their first token within 5 s and the others within 50 ms each than
    under any of three engines' rules: paired on common random numbers, ten sets of requests, intervals of 95 % for the three together.

    The mix and the rate were chosen among others on other sets of requests (seeds below 5), so these are new ones. Over vLLM V1 the
    gain is about 6 %. At 2.5, 3.5 and 4.5 a second it cannot be told from none; and where prompts are short, and found again in the
    prefix cache after a preemption, vLLM V1 starts requests sooner and serves more in time, with a longer tail between tokens.
    """
    presets = ("predicted-peak", "vllm-v1", "sglang", "trtllm-no-evict")
    goods = {
        preset: [served(preset, rag(300, 3.0, seed))["goodput_per_s"] for seed in range(100, 110)] for preset in presets
    }
    student = 2.933  # nine degrees of freedom, 5 % shared by three comparisons, two-sided
    for other in presets[1:]:
        gains = [ours - theirs for ours, theirs in zip(goods["predicted-peak"], goods[other], strict=True)]
        assert mean(gains) - student * stdev(gains) / math.sqrt(10) > 0, (other, goods)
