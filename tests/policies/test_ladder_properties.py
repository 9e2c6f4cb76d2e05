"""Any degradation ladder leaps exactly, spares the guarded and ends every request."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core import Batching, EngineConfig, Policy, RequestSpec
from sim.core.cpu_server import CpuExecutor
from sim.core.preemption import last_admitted, worst_priority
from sim.core.rungs import ACTIONS, SIGNALS, LadderConfig, Rung
from sim.core.waiting import FcfsQueue, priority_queue
from sim.costs.constant import FixedCost
from tests.support.leap_worlds import attention
from tests.support.leaping import Scenario, assert_leap_equals_step, everything

COST = FixedCost(0.005, per_token_s=0.0001, per_context_token_s=0.00001, per_copied_block_s=0.002)
NEEDS_VALUE = {
    "shrink_step": 0.25,
    "micro_batch": 3,
    "cap_new": 3,
    "cap_running": 3,
    "truncate": 4,
    "swap_out": 0.5,
    "pause": 0.5,
    "run_on_cpu": 0.4,
}
THRESHOLDS = {
    "kv_usage": [0.3, 0.6, 0.9],
    "shortage": [0.001, 0.1],
    "queue_s": [0.01, 0.1, 0.5],
    "longest_queue_s": [0.01, 0.1, 0.5],
    "preemptions": [1, 3],
    "oom": [1],
    "workspace": [0.1],
}


@st.composite
def rungs(draw, swap, tier):
    lacking = {"swap_out": swap, "run_on_cpu": swap, "offload_cache": tier}
    actions = [action for action in ACTIONS if lacking.get(action, True)]
    chosen = draw(st.lists(st.sampled_from(actions), unique=True, max_size=5))
    made = []
    if swap and "run_on_cpu" not in chosen and draw(st.booleans()):
        made.append(Rung(action="run_on_cpu", on=0.3, off=0.2, hold_s=draw(st.sampled_from([0.0, 0.05])), value=0.2))
    for action in chosen:
        signal = draw(st.sampled_from([signal for signal in SIGNALS if signal != "workspace"]))
        on = draw(st.sampled_from(THRESHOLDS[signal]))
        off = on * draw(st.sampled_from([0.5, 1.0]))
        hold_s = draw(st.sampled_from([0.0, 0.05]))
        made.append(
            Rung(action=action, signal=signal, on=on, off=off, hold_s=hold_s, value=NEEDS_VALUE.get(action, 0.0))
        )
    return tuple(made)


@st.composite
def scenarios(draw):
    swap, tier = draw(st.booleans()), draw(st.booleans())
    block_size = draw(st.sampled_from([1, 2, 4]))
    max_num_seqs = draw(st.sampled_from([1, 3, 8]))
    config = EngineConfig(
        num_gpu_blocks=draw(st.integers(2, 60)),
        block_size=block_size,
        **draw(attention(block_size)),
        max_model_len=64,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, draw(st.sampled_from([4, 16]))),
        num_cpu_blocks=draw(st.sampled_from([3, 50, 200])) if swap else 0,
        num_cpu_prefix_blocks=draw(st.sampled_from([3, 50])) if tier else 0,
        cpu_prefix_mode=draw(st.sampled_from(["write_through", "write_back"])),
        async_scheduling=draw(st.booleans()),
    )
    policy = Policy(
        queue=draw(st.sampled_from([FcfsQueue, priority_queue])),
        victim=draw(st.sampled_from([last_admitted, worst_priority])),
        batching=draw(st.sampled_from(list(Batching))),
        swap=swap,
        cpu_executor=draw(st.sampled_from([CpuExecutor(token_s=0.03), CpuExecutor(token_s=0.007, max_num_seqs=2)]))
        if swap
        else None,
        ladder=LadderConfig(rungs=draw(rungs(swap, tier)), guard_priority=draw(st.integers(-1, 2))),
    )
    requests, time_s = [], 0.0
    for index in range(draw(st.integers(1, 12))):
        time_s += draw(st.sampled_from([0.0, 0.01, 0.003, 0.1]))
        output_tokens = draw(st.integers(1, 20))
        requests.append(
            RequestSpec(
                request_id=str(index),
                arrival_s=time_s,
                input_tokens=draw(st.integers(1, 24)),
                output_tokens=output_tokens,
                max_tokens=draw(st.sampled_from([None, output_tokens])),
                priority=draw(st.integers(0, 3)),
                content_ids=tuple(draw(st.lists(st.integers(0, 1), max_size=3))),
                content_block_tokens=4,
                cancel_after_s=draw(st.sampled_from([None, None, 0.05])),
            )
        )
    return Scenario(config, COST, tuple(requests), policy=policy)


@settings(max_examples=150)
@given(scenarios())
def test_any_ladder_leaps_exactly_spares_the_guarded_and_ends_every_request(scenario):
    assert_leap_equals_step(scenario)
    record = scenario.run(stepping=False)
    assert all(pool.num_owned == 0 for pool in (recorder.core.pool for recorder in record.recorders))
    for request in record.requests:
        assert request.outcome is not None
        if request.spec.priority <= scenario.policy.ladder.guard_priority:
            assert request.degraded == []


@settings(max_examples=60)
@given(scenarios())
def test_a_ladder_with_all_rungs_off_is_the_base_policy(scenario):
    policy = scenario.policy
    off = LadderConfig(rungs=(Rung(action="shed", signal="queue_s", on=1e9, off=1e9),))
    base = Policy(queue=policy.queue, victim=policy.victim, batching=policy.batching, swap=policy.swap)
    without, idle = (replace(scenario, policy=made) for made in (base, replace(base, ladder=off)))
    assert everything(without, stepping=False) == everything(idle, stepping=False)
