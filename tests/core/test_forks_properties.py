"""Forks under load: leaping decides as stepping does, bills add up to the pool, and every sequence ends with its blocks back.

invariant     test
I1-I6         every run here is checked after every event
I8, I13       test_forking_loads_leap_as_they_step_and_their_books_add_up, one case a policy
I8            test_no_preset_loses_a_forking_request
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings

from sim.core.admission import CanEverFit, Every, FreeBlocks
from sim.core.config import EngineConfig
from sim.core.forking import Forking
from sim.core.policies import PRESETS, FairQueue, LoraSlots, MaxInFlight, PredictedPeak, preset_of
from sim.core.policy import Batching, Policy
from sim.core.preemption import worst_priority
from sim.core.request import Outcome, RequestSpec
from sim.core.rungs import LadderConfig, Rung, standard_ladder
from sim.core.waiting import priority_queue
from sim.results.bill import bill_of
from tests.support.tenant_worlds import engines, fates, loads, run

TRUNCATE = LadderConfig(
    rungs=(
        Rung(action="cap_running", on=0.5, off=0.2, value=6, hold_s=0.0),
        Rung(action="truncate", on=0.6, off=0.2, value=4, hold_s=0.0),
        Rung(action="pause", on=0.7, off=0.3, value=0.5, hold_s=0.0),
    )
)
forking_loads = loads(most=6, widths=[1, 2, 2, 3, 4])
forking_engines = engines(planned_ahead=[False, False, True], full_prompts=[True, True, False])
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
    @given(forking_engines, forking_loads)
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
    @given(forking_engines, forking_loads)
    def ends(config: EngineConfig, requests: tuple[RequestSpec, ...]) -> None:
        config = replace(config, reserve_full_prompt=True, sliding_window=None, kv_groups=())
        if name == "vllm-v0":
            config = replace(config, num_cpu_prefix_blocks=0)  # it has no prefix cache
        preset = preset_of(name, config)
        record, _ = run(preset.config, preset.policy, requests, stepping=False)
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
    for entry in map(json.loads, log):
        scheduled = entry["scheduled"]
        assert isinstance(scheduled, list)
        assert len(scheduled) <= 2 * 3
        for request_id, _, _ in scheduled:
            homes.setdefault(request_id.split("#")[0], set()).add(entry["replica"])
    assert len(homes) == 6
    assert all(len(replicas) == 1 for replicas in homes.values())
    assert sum(request.recomputed_tokens for request in record.requests) == 0
