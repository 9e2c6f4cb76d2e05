"""Every preset that caches prefixes, with a CPU tier of any size and copies of any speed: nobody waits for ever (I8), and nothing leaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.config import EngineConfig
from sim.core.policies import PRESETS, preset_of
from sim.core.policies.engine_settings import as_in
from sim.core.policy import Batching, BatchLimits
from sim.core.request import Outcome, RequestSpec
from sim.costs.constant import FixedCost
from sim.world import run_world
from tests.support.roomy import TICK_S
from tests.support.tiers import Copies, assert_nobody_is_lost, conversations, copies, scenario_of

CACHING = [name for name in PRESETS if as_in(name, EngineConfig(num_gpu_blocks=9000)).enable_prefix_caching]


@pytest.mark.parametrize("name", CACHING)
def test_every_request_ends_and_every_block_comes_back(name: str) -> None:
    @settings(max_examples=40)
    @given(
        conversations(),
        st.sampled_from([12, 16, 24]),
        st.sampled_from([1, 6, 200]),
        st.sampled_from(["write_through", "write_back"]),
        st.sampled_from([0.0, TICK_S, 60 * TICK_S]),
        st.sampled_from([0, 2]),
    )
    def ends(
        requests: tuple[RequestSpec, ...], blocks: int, cpu_blocks: int, mode: str, copy_s: float, failing: int
    ) -> None:
        config = EngineConfig(
            num_gpu_blocks=blocks, block_size=4, max_model_len=44, max_num_seqs=4, max_num_batched_tokens=48
        )
        preset = preset_of(name, config)
        config = replace(preset.config, num_cpu_prefix_blocks=cpu_blocks, cpu_prefix_mode=mode)
        record = run_world(
            config,
            FixedCost(8 * TICK_S, per_token_s=TICK_S, per_copied_block_s=copy_s),
            requests,
            policy=preset.policy,
            check=True,
            failing_copies=lambda fence: failing > 0 and fence % failing == 0,
        )
        core = record.recorders[0].core
        assert core.offload is not None
        assert not core.offload.in_flight
        assert (core.pool.num_owned, core.pool.num_quarantined, core.offload.tier.num_busy) == (0, 0, 0)
        for request in record.requests:
            assert request.outcome is not None
            assert request.outcome is not Outcome.FAILED
            assert request.num_preemptions <= sum(other.spec.target_tokens for other in record.requests)
            if name == "trtllm-no-evict":
                assert request.num_preemptions == 0

    ends()


@settings(max_examples=60)
@given(
    conversations(most_output_tokens=40),
    copies,
    st.sampled_from(list(Batching)),
    st.sampled_from([3, 7, 20]),
    st.sampled_from([None, 1, 2]),
    st.booleans(),
)
def test_with_every_batching_a_leap_leaves_what_its_steps_leave(
    requests: tuple[RequestSpec, ...],
    tier: Copies,
    batching: Batching,
    turn: int,
    most_prompts: int | None,
    ahead: bool,
) -> None:
    config = EngineConfig(
        num_gpu_blocks=30,
        block_size=4,
        max_model_len=72,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        async_scheduling=ahead,
    )
    scenario = scenario_of("vllm-v1", config, tier, requests)
    limits = BatchLimits(
        continuous_decode_steps=turn if batching is Batching.DECODE_FIRST else None, max_prefill_seqs=most_prompts
    )
    assert scenario.policy is not None
    policy = replace(scenario.policy, batching=batching, limits=limits)
    assert_nobody_is_lost(replace(scenario, policy=policy), tier.fails)
