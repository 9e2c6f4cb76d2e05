"""What holds for every policy: leaping and stepping decide the same (I13), and everybody's request ends (I8).

invariant  test
I13        test_every_preset_decides_the_same_whether_the_engine_leaps_or_steps, one case a preset
I13        test_every_policy_decides_the_same_whether_the_engine_leaps_or_steps, one case a policy
I8         test_every_preset_serves_or_explains_every_request
I8, I11    test_every_victim_policy_comes_to_an_end
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings

from sim.core.admission import AdmissionBase, CanEverFit, Every, FreeBlocks
from sim.core.config import AttentionGroup, ConfigError, EngineConfig
from sim.core.engine import EngineCore
from sim.core.policies import (
    PRESETS,
    BackOfTheQueue,
    ContiguousReservation,
    FairQueue,
    FullReservation,
    LoraSlots,
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
    arrival_queue,
    deadline_queue,
    preset_of,
    shortest_predicted_queue,
)
from sim.core.policy import Batching, Policy
from sim.core.preemption import VICTIMS
from sim.core.request import Outcome, RequestSpec
from sim.core.rungs import standard_ladder
from sim.core.waiting import aging_queue, priority_queue
from tests.support.roomy import TICK_S
from tests.support.tenant_worlds import engines, fates, loads, run


def gated(gate):
    """The gate, beside what every engine checks."""
    return lambda config: Every([CanEverFit(config), gate(config), FreeBlocks()])


POLICIES: dict[str, Policy] = {
    "MaxInFlight": Policy(admission=gated(lambda config: MaxInFlight(4, first_wait_s=0.05, grace_s=0.05))),
    "MaxQueuedTokens": Policy(admission=gated(lambda config: MaxQueuedTokens(60, first_wait_s=0.05, grace_s=0.05))),
    "MaxRunning": Policy(admission=gated(lambda config: MaxRunning(2))),
    "MaxKvBlocks": Policy(admission=gated(lambda config: MaxKvBlocks(max(1, config.num_gpu_blocks // 2)))),
    "watermark": Policy(admission=lambda config: Every([CanEverFit(config), FreeBlocks(config.num_gpu_blocks // 4)])),
    "FullReservation": Policy(admission=gated(FullReservation)),
    "ContiguousReservation": Policy(admission=gated(ContiguousReservation)),
    "NewTokenRatio": Policy(
        admission=gated(lambda config: NewTokenRatio(RatioSettings(decay_steps=20, clip_new_tokens=16)))
    ),
    "PredictedPeak": Policy(admission=gated(lambda config: PredictedPeak(risk=0.2))),
    "PredictedPeak, given": Policy(admission=gated(lambda config: PredictedPeak(quantiles=[(0.5, 8), (1.0, 30)]))),
    "TtftDeadline": Policy(admission=gated(lambda config: TtftDeadline(0.08))),
    "TtftDeadline, shed": Policy(admission=gated(lambda config: TtftDeadline({0: 0.2, 1: 0.05}, shed_late=True))),
    "TokenBucket": Policy(admission=gated(lambda config: TokenBucket(300, 50, grace_s=0.05))),
    "PriorityShares": Policy(
        admission=gated(lambda config: PriorityShares(config, {0: 0.3, 1: 0.3})), queue=priority_queue
    ),
    "LoraSlots": Policy(admission=gated(lambda config: LoraSlots(1, give_up_after_s=0.1))),
    "LoraSlots, by fair share": Policy(admission=gated(lambda config: LoraSlots(1)), queue=FairQueue),
    "aging": Policy(queue=aging_queue(10**14)),
    "shortest predicted": Policy(queue=shortest_predicted_queue),
    "fair share": Policy(queue=FairQueue),
    "deadline first": Policy(queue=deadline_queue({0: 0.05, 1: 0.2}, late_last=False)),
    "deadline first, late last": Policy(queue=deadline_queue({0: 0.05, 1: 0.2})),
    "back of the queue": Policy(queue=BackOfTheQueue),
    "by arrival": Policy(queue=arrival_queue),
    "fair share, swapping": Policy(queue=FairQueue, swap=True),
    "new-token ratio by priority, swapping": Policy(
        admission=gated(lambda config: NewTokenRatio()), queue=priority_queue, swap=True
    ),
    "fair share on a ladder": Policy(queue=FairQueue, ladder=standard_ladder(0.05)),
    "late last on a ladder": Policy(queue=deadline_queue(0.05), ladder=standard_ladder(0.05)),
    "everything": Policy(
        admission=lambda config: Every(
            [
                CanEverFit(config),
                TokenBucket(900, 60),
                MaxInFlight(6, first_wait_s=0.05),
                TtftDeadline(0.3, shed_late=True),
                FreeBlocks(1),
                PredictedPeak(),
            ]
        ),
        queue=FairQueue,
        victim=VICTIMS["fewest-generated"],
        batching=Batching.PREFILL_FIRST,
    ),
} | {name: Policy(victim=victim) for name, victim in VICTIMS.items()}


def made(name: str, config: EngineConfig) -> tuple[EngineConfig, Policy]:
    """A preset that swaps if it can; those without a prefix cache have no tier for one."""
    if name in ("vllm-v0", "orca"):
        config = replace(config, num_cpu_prefix_blocks=0)
    preset = preset_of(name, config)
    return preset.config, replace(preset.policy, swap=config.num_cpu_blocks > 0)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_decides_the_same_whether_the_engine_leaps_or_steps(name: str) -> None:
    @settings(max_examples=40)
    @given(engines(), loads())
    def same(config: EngineConfig, requests: tuple[RequestSpec, ...]) -> None:
        leaping, leapt = run(config, POLICIES[name], requests, stepping=False)
        stepping, stepped = run(config, POLICIES[name], requests, stepping=True)
        assert leapt == stepped
        assert fates(leaping) == fates(stepping)

    same()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_decides_the_same_whether_the_engine_leaps_or_steps(name: str) -> None:
    @settings(max_examples=40)
    @given(engines(), loads())
    def same(config: EngineConfig, requests: tuple[RequestSpec, ...]) -> None:
        config, policy = made(name, config)
        leaping, leapt = run(config, policy, requests, stepping=False)
        stepping, stepped = run(config, policy, requests, stepping=True)
        assert leapt == stepped
        assert fates(leaping) == fates(stepping)

    same()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_serves_or_explains_every_request(name: str) -> None:
    """No dead-lock (run_world would raise), and no live-lock. Where the whole prompt must fit before it starts, every start gives a
    token, so a request is preempted at most once a token. Where only the next chunk must fit it may lose its prompt again and
    again (B07), but only to older requests, each time for a block that one of their tokens needs.
    """

    @settings(max_examples=40)
    @given(engines(), loads(most=16))
    def ends(config: EngineConfig, requests: tuple[RequestSpec, ...]) -> None:
        config, policy = made(name, config)
        record, _ = run(config, policy, requests, stepping=False)
        all_tokens = sum(request.spec.target_tokens for request in record.requests)
        for request in record.requests:
            assert request.outcome is not None
            if request.outcome in (Outcome.REJECTED, Outcome.FAILED):
                assert any(character.isdigit() for character in request.reason)
            own = request.spec.target_tokens + 1
            assert request.num_preemptions <= (own if config.reserve_full_prompt else all_tokens)

    ends()


def test_prompts_that_go_first_find_what_has_just_slid_out_of_a_window() -> None:
    """Blocks of 4, one group that sees all and one that sees 5 tokens, 8 blocks. "old" holds 3 + 2 while it has 9 to 12 tokens; "late"
    needs 2 + 2 and finds 3. At the 13th token "old" gives a block of its window back and takes two: "late" is tried in between, and fits.
    """
    config = EngineConfig(
        num_gpu_blocks=8,
        block_size=4,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_groups=(AttentionGroup(block_size=4), AttentionGroup(block_size=4, window=5)),
    )
    requests = (
        RequestSpec(request_id="old", arrival_s=0.0, input_tokens=8, output_tokens=12),
        RequestSpec(request_id="late", arrival_s=30 * TICK_S, input_tokens=8, output_tokens=1),
    )
    policy = Policy(batching=Batching.PREFILL_FIRST)
    (leaping, leapt), (_, stepped) = (run(config, policy, requests, stepping=stepping) for stepping in (False, True))
    assert leapt == stepped
    assert [entry["step"] for entry in map(json.loads, leapt) if entry["admitted"]] == [0, 5]
    assert leaping.recorders[0].core.steps == 13


@pytest.mark.parametrize("batching", Batching)
@pytest.mark.parametrize("name", VICTIMS)
def test_every_victim_policy_comes_to_an_end(name: str, batching: Batching) -> None:
    """Twenty requests that grow to nine blocks each, in a pool of thirty."""
    config = EngineConfig(
        num_gpu_blocks=30, block_size=4, max_model_len=64, max_num_seqs=20, max_num_batched_tokens=128
    )
    requests = tuple(
        RequestSpec(request_id=f"r{i}", arrival_s=i * TICK_S, input_tokens=4 + i % 5, output_tokens=20 + i % 9)
        for i in range(20)
    )
    record, _ = run(config, Policy(victim=VICTIMS[name], batching=batching), requests, stepping=False)
    assert {request.outcome for request in record.requests} == {Outcome.FINISHED}
    assert sum(request.num_preemptions for request in record.requests) > 0
    assert max(request.num_preemptions for request in record.requests) <= 20


def test_a_policy_whose_answer_changes_with_time_must_not_call_itself_steady() -> None:
    """The property above would notice: a gate that opens by itself, said to be steady, is leapt over."""

    class OpensLater(AdmissionBase):
        def may_start(self, request, need_blocks, view):  # type: ignore[no-untyped-def]
            return not view.num_running or view.decode_clock >= 10

    config = EngineConfig(num_gpu_blocks=40, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    requests = tuple(RequestSpec(request_id=f"r{i}", arrival_s=0.0, input_tokens=4, output_tokens=30) for i in range(2))
    policy = Policy(admission=lambda config: OpensLater())
    assert run(config, policy, requests, stepping=False)[1] != run(config, policy, requests, stepping=True)[1]


def test_a_preset_refuses_what_its_engine_could_not_run() -> None:
    config = EngineConfig(num_gpu_blocks=100, block_size=16, max_model_len=2048)
    with pytest.raises(ConfigError, match=r"max_model_len \(2048\) tokens = 128 blocks, but the pool has 100"):
        EngineCore(config, policy=PRESETS["orca"](config).policy)
    with pytest.raises(ConfigError, match="needs reserve_full_prompt"):
        FullReservation(EngineConfig(num_gpu_blocks=100, reserve_full_prompt=False))
