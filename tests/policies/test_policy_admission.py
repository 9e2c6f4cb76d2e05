"""Single admission policies, each against numbers worked out by hand or published.

rule                                              test
SGLang §1.3.4: 0.7, 0.098, 0.0010033 a step       test_the_ratio_starts_falls_and_stops_as_published
SGLang §1.3.4: raise on retract                   test_a_retraction_raises_the_ratio_to_what_survivors_used
SGLang §1.3.3: extend + max_new + page            test_the_head_needs_its_prompt_its_cap_and_a_page
caps on running requests and on KV blocks         test_caps_…
shares by priority                                test_an_important_request_finds_its_share
token bucket, 429                                 test_a_bucket_…
TTFT deadline                                     test_a_deadline_…
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.core.admission import CanEverFit, Every, FreeBlocks
from sim.core.config import ConfigError, EngineConfig
from sim.core.policies import (
    MaxInFlight,
    MaxKvBlocks,
    MaxQueuedTokens,
    MaxRunning,
    NewTokenRatio,
    PredictedPeak,
    PriorityShares,
    RatioSettings,
    TokenBucket,
    TtftDeadline,
)
from sim.core.policies.running_sums import RunningSums
from sim.core.policy import Policy
from sim.core.request import Outcome
from sim.core.waiting import priority_queue
from tests.support.engine_driver import EngineDriver


def gate(policy, **fields: object) -> Policy:
    """A policy behind what every engine checks first."""
    return Policy(admission=lambda config: Every([CanEverFit(config), policy, FreeBlocks()]), **fields)


# -- SGLang's ratio --------------------------------------------------------------------------------------------------------


def test_the_ratio_starts_falls_and_stops_as_published() -> None:
    settings = RatioSettings()
    assert (settings.first, round(settings.floor, 6), round(settings.step, 7)) == (0.7, 0.098, 0.0010033)
    careful = RatioSettings(conservativeness=2.0)
    assert (careful.first, round(careful.floor, 6)) == (1.0, 0.14)
    eager = RatioSettings(conservativeness=0.3)
    assert (round(eager.first, 6), round(eager.floor, 6)) == (0.21, 0.0294)


def test_each_decode_step_takes_a_600th_of_the_way_to_the_floor(drive) -> None:
    ratio = NewTokenRatio()
    engine = drive(num_gpu_blocks=200, block_size=16, policy=gate(ratio))
    view = engine.core._scheduler.view
    engine.add("r", 4, output_tokens=700)
    engine.step()
    seen = []
    for _ in range(650):
        engine.step()
        seen.append(ratio.ratio(view))
    assert seen[0] == pytest.approx(0.7 - 0.602 / 600)
    assert seen[299] == pytest.approx(0.7 - 0.301)
    assert seen[599] == pytest.approx(0.098)
    assert seen[649] == 0.098 == pytest.approx(RatioSettings().floor)
    engine.run()
    engine.add("after a pause", 4)  # an idle engine starts afresh
    assert ratio.ratio(view) == 0.7


def test_a_retraction_raises_the_ratio_to_what_survivors_used(drive) -> None:
    """Two requests of 8 + 33 tokens in 5 blocks of 8. After the prompts and 8 decode steps both have 9 output tokens and hold 2 blocks;
    at 17 tokens both need a third and one is free: one is retracted, the survivor has 9 of 33, so (9 + 20) / (33 + 1)."""
    ratio = NewTokenRatio(RatioSettings(clip_new_tokens=1))
    engine = drive(num_gpu_blocks=5, block_size=8, policy=gate(ratio), enable_prefix_caching=False)
    for name in "ab":
        engine.add(name, 8, output_tokens=30, max_tokens=33)
    steps = [engine.step() for _ in range(9)]
    assert len(steps[0].tokens) == 2
    assert not any(step.plan.preempted for step in steps)
    assert engine.step().plan.preempted == ("b",)
    # The step in which it was retracted was decode step 9: the ratio was set before it and has fallen one step since.
    assert ratio.ratio(engine.core._scheduler.view) == pytest.approx((9 + 20) / (33 + 1) - RatioSettings().step)


@pytest.mark.parametrize(("max_tokens", "starts"), [(395, True), (396, False)])
def test_the_head_needs_its_prompt_its_cap_and_a_page(drive, max_tokens, starts) -> None:
    """100 pages of 16. One request runs, with 160 prompt tokens and one of its 601 output tokens: 600 are to come, of which 0.7
    count, 420. It takes its eleventh page before anybody is admitted, which leaves 89 x 16 = 1424 tokens: the head needs less than
    1004 of them. 37 pages of prompt (592), its cap, and a page: 592 + 395 + 16 = 1003 will do, one more will not."""
    engine = drive(num_gpu_blocks=100, block_size=16, policy=gate(NewTokenRatio()), enable_prefix_caching=False)
    engine.add("runs", 160, output_tokens=601, max_tokens=601)
    engine.step()
    engine.add("head", 592, output_tokens=5, max_tokens=max_tokens)
    assert ("head" in engine.step().tokens) is starts


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=8), st.integers(1, 50))
def test_sums_that_are_kept_equal_sums_that_are_made(sizes: list[tuple[int, int]], clip: int) -> None:
    engine = EngineDriver(num_gpu_blocks=200, block_size=8)
    for index, (prompt, output) in enumerate(sizes):
        engine.add(f"r{index}", prompt, output_tokens=output, max_tokens=output + index)
    view, sums = engine.core._scheduler.view, RunningSums(clip)
    while engine.step() is not None:
        expected = sum(min(max(view.output_cap(r) - r.output_tokens, 0), clip) for r in view.running())
        assert sums.to_come(view) == expected


# -- caps --------------------------------------------------------------------------------------------------------------------


def test_caps_on_running_requests_leave_the_rest_in_the_queue(drive) -> None:
    engine = drive(num_gpu_blocks=100, block_size=16, policy=gate(MaxRunning(2)))
    for index in range(5):
        engine.add(f"r{index}", 16, output_tokens=3)
    assert [list(step.tokens) for step in engine.run()][::3] == [["r0", "r1"], ["r2", "r3"], ["r4"]]


def test_caps_on_kv_blocks_count_what_is_held_and_what_is_asked(drive) -> None:
    """Limit 10 of 20: 4 + 4 fit, 4 more do not; a request of 12 starts when nothing runs."""
    engine = drive(num_gpu_blocks=20, block_size=16, policy=gate(MaxKvBlocks(10)), enable_prefix_caching=False)
    for index in range(3):
        engine.add(f"r{index}", 64)
    engine.add("large", 192)
    assert [list(step.tokens) for step in engine.run()] == [["r0", "r1"], ["r2"], ["large"]]


# -- shares --------------------------------------------------------------------------------------------------------------------


def test_an_important_request_finds_its_share(drive) -> None:
    """20 blocks, half guaranteed to priority 0. Priority 1 may hold 10 while nobody important runs, no more; then an important one
    starts at once. What the important ones hold counts as used: with 8 of theirs held, priority 1 must leave 2."""
    config = EngineConfig(num_gpu_blocks=20, block_size=16)
    shares = PriorityShares(config, {0: 0.5})
    engine = drive(
        num_gpu_blocks=20, block_size=16, policy=gate(shares, queue=priority_queue), enable_prefix_caching=False
    )
    for index in range(4):
        engine.add(f"low{index}", 64, output_tokens=9, priority=1)
    assert list(engine.step().tokens) == ["low0", "low1"]  # 8 blocks; a third would leave 8 of the 10 guaranteed
    engine.add("high", 128, output_tokens=9, priority=0)
    assert "high" in engine.step().tokens
    engine.run()
    assert {request.outcome for request in engine.ended} == {Outcome.FINISHED}


# -- token bucket ------------------------------------------------------------------------------------------------------------


def test_a_bucket_fills_at_its_rate_and_is_the_tenants_own(drive) -> None:
    """50 tokens a second, 120 at once; a step of the driver takes a second."""
    engine = drive(num_gpu_blocks=100, block_size=16, policy=gate(TokenBucket(50, 120)))
    assert engine.add("a1", 100, output_tokens=9, tenant="a").outcome is None
    refused = engine.add("a2", 100, tenant="a")
    assert (refused.outcome, refused.retry_after_s) == (Outcome.REJECTED, pytest.approx(1.6))
    assert engine.add("b1", 100, tenant="b").outcome is None
    engine.step()  # now 20 + 50 = 70, all promised to a2
    small = engine.add("a3", 60, tenant="a")
    assert small.outcome is Outcome.REJECTED
    assert "100 are promised to its earlier requests" in small.reason
    engine.step()  # 120
    assert engine.add("a2", 100, tenant="a").outcome is None  # it came when it was told


def test_a_bucket_may_charge_for_the_output_cap_too() -> None:
    from sim.core.request import RequestSpec

    spec = RequestSpec(request_id="r", arrival_s=0.0, input_tokens=100, output_tokens=5, max_tokens=40)
    assert TokenBucket(1, 1).cost(spec) == 100
    assert TokenBucket(1, 1, count_output=True).cost(spec) == 140


# -- deadlines ----------------------------------------------------------------------------------------------------------------


def test_a_deadline_turns_away_what_would_come_too_late(drive) -> None:
    """A second a step and 100 tokens a step: prompts are computed at 100 tokens a second. 300 wait: the fourth prompt of 100 would
    have its first token after 4 s of the 3.5 it has."""
    engine = drive(num_gpu_blocks=100, block_size=16, max_num_batched_tokens=100, policy=gate(TtftDeadline(3.5)))
    engine.add("first", 100)
    engine.step()
    assert [engine.add(f"r{index}", 100).outcome for index in range(3)] == [None] * 3
    late = engine.add("late", 100)
    assert late.outcome is Outcome.REJECTED
    assert (
        "300 prompt tokens are before its 100, and at 100 a second its first token would come after 4.0 s of the 3.5 s"
        in late.reason
    )
    assert late.retry_after_s is not None
    engine.run()
    assert all(
        request.first_token_fs - request.arrival_fs <= 3.5e15
        for request in engine.ended
        if request.outcome is Outcome.FINISHED
    )


def test_a_deadline_by_priority_leaves_the_others_alone(drive) -> None:
    engine = drive(num_gpu_blocks=100, block_size=16, max_num_batched_tokens=100, policy=gate(TtftDeadline({0: 1.5})))
    engine.add("first", 100)
    engine.step()
    engine.add("before", 100)
    assert engine.add("patient", 100, priority=1).outcome is None
    assert engine.add("urgent", 100, priority=0).outcome is Outcome.REJECTED


def test_a_deadline_that_passed_in_the_queue_sends_the_request_away_unserved(drive) -> None:
    policy = gate(TtftDeadline(3.0, shed_late=True))
    engine = drive(num_gpu_blocks=4, block_size=16, policy=policy)
    engine.add("long", 16, output_tokens=40)
    waits = engine.add("waits", 50, output_tokens=1)  # 4 blocks, 3 free
    for _ in range(4):
        engine.step()
    assert waits.outcome is None
    engine.step()
    assert (waits.outcome, waits.finish_reason) == (Outcome.REJECTED, "deadline_passed")
    assert "waited 4.0 s, and its first token was due after 3 s" in waits.reason


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MaxInFlight(-1), "is -1; it must be at least 0"),
        (lambda: MaxQueuedTokens(-5), "is -5; it must be at least 0"),
        (lambda: MaxRunning(0), "is 0; it must be at least 1"),
        (lambda: MaxKvBlocks(0), "is 0; it must be at least 1"),
        (lambda: TokenBucket(0, 10), "tokens_per_s (0)"),
        (lambda: TtftDeadline(0.0), "is 0.0 s; it must be above 0"),
        (lambda: PredictedPeak(risk=1.0), "risk is 1.0"),
        (lambda: PredictedPeak(quantiles=[(0.9, 100), (0.5, 200)]), "must ascend"),
        (lambda: RatioSettings(start=1.5), "start 1.5"),
        (lambda: RatioSettings(decay_steps=0), "decay_steps"),
        (lambda: PriorityShares(EngineConfig(num_gpu_blocks=10), {0: 0.7, 1: 0.6}), "at most 1 together"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_in_words(make, said) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert said in str(caught.value)
