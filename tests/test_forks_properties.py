"""Forks under load: leaping decides as stepping does, bills add up to the pool, and every sequence ends with its blocks back.

invariant     test
I1-I6         every run here is checked after every event
I8, I13       test_forking_loads_leap_as_they_step_and_their_books_add_up, one case a policy
I8            test_no_preset_loses_a_forking_request
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.admission import CanEverFit, Every, FreeBlocks
from sim.core.config import AttentionGroup, EngineConfig
from sim.core.forking import Forking
from sim.core.ladder import LadderConfig, Rung, standard_ladder
from sim.core.policies import PRESETS, FairQueue, LoraSlots, MaxInFlight, PredictedPeak
from sim.core.policy import Batching, Policy
from sim.core.preemption import worst_priority
from sim.core.request import Namespace, Outcome, RequestSpec
from sim.core.waiting import priority_queue
from sim.costs.constant import FixedCost
from sim.results.bill import bill_of
from sim.results.recorder import RunRecord
from sim.world import run_world

TICK_S = 2.0**-10
COST = FixedCost(8 * TICK_S, per_token_s=TICK_S)


@st.composite
def forking_loads(draw: st.DrawFn) -> tuple[RequestSpec, ...]:
    """Plain requests, samples and beams of three tenants and priorities; some clients leave."""
    arrival, made = 0, []
    for number in range(draw(st.integers(1, 6))):
        arrival += draw(st.sampled_from([0, 0, 0, 1, 8, 16, 40, 100]))
        width = draw(st.sampled_from([1, 2, 2, 3, 4]))
        change = draw(st.sampled_from([0.0, 0.05, 0.3, 0.8]))
        patience = draw(st.sampled_from([None, None, None, None, 8, 40, 96]))
        output_tokens = draw(st.integers(1, 24))
        shared = draw(st.integers(0, 3))
        made.append(
            RequestSpec(
                request_id=f"r{number}",
                arrival_s=arrival * TICK_S,
                input_tokens=draw(st.integers(1, 30)),
                output_tokens=output_tokens,
                max_tokens=draw(st.sampled_from([None, output_tokens, output_tokens + 8, 4])),
                priority=draw(st.integers(0, 2)),
                tenant=draw(st.sampled_from("abc")),
                content_ids=tuple("xyz"[:shared]),
                content_block_tokens=8 if shared else 0,
                namespace=Namespace(lora=draw(st.sampled_from(["", "", "x", "y"]))),
                n=width,
                forking=None if width == 1 else Forking(width=width, change=change, seed=draw(st.integers(0, 9))),
                cancel_after_s=None if patience is None else patience * TICK_S,
            )
        )
    return tuple(made)


@st.composite
def engines(draw: st.DrawFn) -> EngineConfig:
    """Engines from starved to comfortable."""
    max_num_seqs = draw(st.integers(1, 10))
    groups = draw(st.sampled_from([(), (), ((4, None), (4, 9)), ((8, None), (4, 5)), ((4, 6), (4, 13))]))
    window = None if groups else draw(st.sampled_from([None, None, 9]))
    caching = draw(st.booleans())
    tier = draw(st.sampled_from([0, 0, 10])) if caching and not groups and window is None else 0
    return EngineConfig(
        num_gpu_blocks=draw(st.sampled_from([16, 20, 28, 60])) * (2 if groups else 1),
        block_size=4,
        max_model_len=60,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([2, 16, 64])),
        enable_prefix_caching=caching,
        reserve_full_prompt=draw(st.sampled_from([True, True, False])),
        sliding_window=window,
        num_cpu_prefix_blocks=tier,
        cpu_prefix_mode=draw(st.sampled_from(["write_through", "write_back"])),
        kv_groups=tuple(AttentionGroup(block_size=size, window=window) for size, window in groups),
        num_cpu_blocks=draw(st.sampled_from([0, 0, 12])),
        async_scheduling=not tier and draw(st.sampled_from([False, False, True])),
    )


def run(
    config: EngineConfig, policy: Policy, requests: tuple[RequestSpec, ...], *, stepping: bool, **world: object
) -> tuple[RunRecord, list[dict[str, object]]]:
    log: list[dict[str, object]] = []
    record = run_world(
        config, COST, requests, policy=policy, stepping=stepping, check=True, decision_log=log.append, **world
    )
    return record, log


def fates(record: RunRecord) -> list[tuple[object, ...]]:
    return [
        (
            *(r.request_id, r.outcome, r.reason, r.num_output_tokens, r.scheduled_fs, r.first_token_fs, r.ended_fs),
            *(r.num_preemptions, r.recomputed_tokens, r.kv_block_fs, sorted(r.shared_fs.items()), r.token_fs),
        )
        for r in record.requests
    ]


TRUNCATE = LadderConfig(
    rungs=(
        Rung(action="cap_running", on=0.5, off=0.2, value=6, hold_s=0.0),
        Rung(action="truncate", on=0.6, off=0.2, value=4, hold_s=0.0),
        Rung(action="pause", on=0.7, off=0.3, value=0.5, hold_s=0.0),
    )
)
POLICIES: dict[str, Policy] = {
    "vllm-v1": Policy(),
    "by priority, on the ladder": Policy(queue=priority_queue, victim=worst_priority, ladder=standard_ladder(0.05)),
    "a ladder that cuts": Policy(queue=priority_queue, victim=worst_priority, ladder=TRUNCATE),
    "swapping": Policy(swap=True),
    "prompts first": Policy(batching=Batching.PREFILL_FIRST, swap=True),
    "static": Policy(batching=Batching.STATIC),
    "one adapter at a time": Policy(
        admission=lambda config: Every([CanEverFit(config), LoraSlots(1, give_up_after_s=0.1), FreeBlocks()])
    ),
    "fair, capped, by predicted peak": Policy(
        admission=lambda config: Every(
            [CanEverFit(config), MaxInFlight(9, first_wait_s=0.05), FreeBlocks(1), PredictedPeak()]
        ),
        queue=FairQueue,
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_forking_loads_leap_as_they_step_and_their_books_add_up(name: str) -> None:
    @settings(max_examples=60)
    @given(engines(), forking_loads())
    def same(config: EngineConfig, requests: tuple[RequestSpec, ...]) -> None:
        leaping, leapt = run(config, POLICIES[name], requests, stepping=False)
        stepping, stepped = run(config, POLICIES[name], requests, stepping=True)
        assert leapt == stepped
        assert fates(leaping) == fates(stepping)
        (recorder,) = leaping.recorders
        bills = [bill_of(request, config.slots_per_block) for request in leaping.requests]
        assert sum(bill.owed_fs for bill in bills) == recorder.integrals.block_fs
        assert all(bill.owed_fs >= 0 and bill.unfilled_slot_fs >= 0 for bill in bills)
        core = recorder.core
        assert core.pool.num_owned == core.pool.num_quarantined == core._scheduler.backlog_tokens == 0

    same()


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "orca"])
def test_no_preset_loses_a_forking_request(name: str) -> None:
    """Every sequence ends, with a reason; and what reserves the worst case preempts nobody, copies included."""

    @settings(max_examples=40)
    @given(engines(), forking_loads())
    def ends(config: EngineConfig, requests: tuple[RequestSpec, ...]) -> None:
        config = replace(config, reserve_full_prompt=True, sliding_window=None, kv_groups=())
        if name == "vllm-v0":
            config = replace(config, num_cpu_prefix_blocks=0)  # it has no prefix cache
        preset = PRESETS[name](config)
        record, _ = run(preset.configure(config), preset.policy, requests, stepping=False)
        assert len(record.requests) == sum(spec.n for spec in requests)
        for request in record.requests:
            assert request.outcome is not None
            assert request.reason
            if request.outcome is Outcome.FINISHED:
                assert request.num_output_tokens == request.target_tokens - request.spec.input_tokens
            if name in ("trtllm-no-evict", "static-batch"):
                assert not request.num_preemptions

    ends()


@pytest.mark.parametrize("stepping", [False, True])
def test_several_engines_and_a_closed_loop_keep_a_family_together(stepping: bool) -> None:
    """Six requests of three beams over two engines, two outstanding: at most 6 sequences run, and each family on one engine."""
    config = EngineConfig(num_gpu_blocks=60, block_size=4, max_model_len=60, max_num_seqs=16, max_num_batched_tokens=64)
    family = Forking(width=3, change=0.3)
    requests = tuple(
        RequestSpec(request_id=f"r{i}", arrival_s=0.0, input_tokens=9, output_tokens=12, n=3, forking=family)
        for i in range(6)
    )
    record, log = run(config, Policy(), requests, stepping=stepping, replicas=2, max_concurrency=2)
    assert {request.outcome for request in record.requests} == {Outcome.FINISHED}
    homes: dict[str, set[object]] = {}
    for entry in log:
        scheduled = entry["scheduled"]
        assert isinstance(scheduled, list)
        assert len(scheduled) <= 2 * 3
        for request_id, _, _ in scheduled:
            homes.setdefault(request_id.split("#")[0], set()).add(entry["replica"])
    assert len(homes) == 6
    assert all(len(replicas) == 1 for replicas in homes.values())
    assert sum(request.recomputed_tokens for request in record.requests) == 0
