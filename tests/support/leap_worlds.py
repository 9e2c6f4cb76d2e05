"""Random engines, costs, policies and requests in which events often coincide with the ends of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from sim.core.batching import check_batching
from sim.core.config import AttentionGroup, ConfigError, EngineConfig
from sim.core.eviction import EVICTIONS
from sim.core.policy import Batching, BatchLimits, Policy
from sim.core.preemption import VICTIMS
from sim.core.request import Namespace, RequestSpec
from sim.core.retention import Retention
from sim.core.rungs import ACTIONS, LadderConfig, Rung
from sim.core.waiting import FcfsQueue, aging_queue, priority_queue
from sim.costs.constant import FixedCost
from tests.support.leaping import Scenario
from tests.support.roomy import TICK, TICK_S


@st.composite
def request_lists(draw: st.DrawFn) -> tuple[RequestSpec, ...]:
    """Requests whose arrivals, cancellations and time-outs often fall on the end of a step, and on each other."""
    growing = draw(st.booleans())  # short prompts and long answers: everybody is let in, and then there is not enough
    span = draw(st.sampled_from([4, 2, 16]))
    arrival_ticks = 0
    made = []
    for number in range(draw(st.integers(1, 9))):
        arrival_ticks += draw(st.sampled_from([0, 1, 4, 8, 8, 16, 24, 61]))
        output_tokens = draw(st.integers(20, 50) if growing else st.integers(1, 30))
        ids = draw(st.sampled_from(["", "xxxx", "xx", "xxxxxx", "xxy", "y"]))
        cap = draw(st.sampled_from([None, "tight", "loose", "short"]))
        impatient = draw(st.sampled_from([None] * 6 + ["cancels", "times out", "either"]))
        limit_s = draw(st.sampled_from([0, 4, 8, 16, 20, 24, 40, 64, 96])) * TICK_S
        made.append(
            RequestSpec(
                request_id=f"r{number}",
                arrival_s=arrival_ticks * TICK_S,
                input_tokens=draw(st.integers(1, 8 if growing else 40)),
                output_tokens=output_tokens,
                max_tokens={None: None, "tight": output_tokens, "loose": output_tokens + 9, "short": 3}[cap],
                priority=draw(st.integers(0, 2)),
                content_ids=tuple(ids),
                content_block_tokens=span if ids else 0,
                namespace=Namespace(salt=draw(st.sampled_from(["", "", "", "s"]))),
                cancel_after_s=limit_s if impatient in ("cancels", "either") else None,
                timeout_s=limit_s if impatient in ("times out", "either") else None,
            )
        )
    return tuple(made)


@st.composite
def attention(draw: st.DrawFn, block_size: int) -> dict[str, object]:
    """One kind of layer, mostly; else two or three groups of layers that keep different tokens, in blocks of different sizes."""
    if draw(st.sampled_from([True, True, False])):
        return {"sliding_window": draw(st.sampled_from([None, None, None, 4, 9]))}
    windows = st.sampled_from([None, 1, 4, 9, 20])
    sizes = [block_size, *draw(st.lists(st.sampled_from([block_size, 2 * block_size]), min_size=1, max_size=2))]
    return {"kv_groups": tuple(AttentionGroup(block_size=size, window=draw(windows)) for size in sizes)}


@st.composite
def configs(draw: st.DrawFn, *, cpu_blocks: Sequence[int] = (0,)) -> EngineConfig:
    """Engines from starved to comfortable."""
    chunked = draw(st.sampled_from([True, True, True, False]))
    max_num_seqs = draw(st.integers(1, 6))
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    return EngineConfig(
        num_gpu_blocks=draw(st.sampled_from([24, 48, 64, 96, 300])) // block_size,
        block_size=block_size,
        max_model_len=draw(st.sampled_from([128, 48])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([60, 10, 3, 0])) if chunked else 128,
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        enable_chunked_prefill=chunked,
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        reserve_full_prompt=draw(st.sampled_from([True, True, False])),
        **draw(attention(block_size)),
        num_cpu_blocks=draw(st.sampled_from(cpu_blocks)),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.1, 0.3])),
        async_scheduling=draw(st.booleans()),
    )


smooth_costs = st.sampled_from(
    [
        FixedCost(8 * TICK_S),
        FixedCost(8 * TICK_S, per_context_token_s=TICK_S / 4),
        FixedCost(4 * TICK_S, per_token_s=TICK_S, per_seq_s=TICK_S),
        FixedCost(3.3e-3, per_context_token_s=1.7e-6),
    ]
)
NEED_CPU_MEMORY = ("swap_out", "offload_cache", "run_on_cpu")


@st.composite
def rungs(draw: st.DrawFn) -> Rung:
    """A rung of the degradation ladder that goes on and off often; `swap_out` is a `pause` with a CPU pool."""
    signal = draw(st.sampled_from(["kv_usage", "shortage", "queue_s", "preemptions"]))
    thresholds = {"kv_usage": [0.3, 0.6, 0.9], "shortage": [0.0001, 0.2], "queue_s": [4 * TICK_S, 20 * TICK_S]}
    on = draw(st.sampled_from(thresholds.get(signal, [1.0, 2.0])))
    action = draw(st.sampled_from([action for action in ACTIONS if action not in NEED_CPU_MEMORY]))
    return Rung(
        action=action,
        signal=signal,
        on=on,
        off=on * draw(st.sampled_from([1.0, 0.5])),
        hold_s=draw(st.sampled_from([0.0, 20 * TICK_S])),
        value={"shrink_step": 0.5, "micro_batch": 3, "cap_new": 5, "cap_running": 5, "truncate": 8, "pause": 0.5}.get(
            action, 0.0
        ),
    )


ladders = st.lists(rungs(), min_size=1, max_size=3, unique_by=lambda rung: rung.action).map(
    lambda made: LadderConfig(rungs=tuple(made), guard_priority=0)
)
retentions = st.builds(
    Retention,
    priority=st.sampled_from([0, 35, 60, 100]),
    start=st.sampled_from([0, 4, 12]),
    end=st.sampled_from([None, 16]),
    duration_s=st.sampled_from([None, TICK_S, 20 * TICK_S, 90 * TICK_S]),
    output=st.booleans(),
)
some = st.sampled_from([None, None, 1, 2, 3])
batch_limits = st.sampled_from(Batching).flatmap(
    lambda batching: st.tuples(
        st.just(batching),
        st.builds(
            BatchLimits,
            max_prefill_seqs=some,
            max_decode_seqs=some,
            max_prefill_tokens=st.sampled_from([None, 5, 200]),
            continuous_decode_steps=st.sampled_from([None, 1, 3, 20])
            if batching is Batching.DECODE_FIRST
            else st.none(),
        ),
    )
)
policies = st.builds(
    lambda batching, **fields: Policy(batching=batching[0], limits=batching[1], **fields),
    batching=batch_limits,
    queue=st.sampled_from([FcfsQueue, priority_queue, aging_queue(20 * TICK)]),
    victim=st.sampled_from(list(VICTIMS.values())),
    ladder=st.one_of(st.none(), ladders),
    swap=st.booleans(),
    eviction=st.sampled_from(list(EVICTIONS)),
).flatmap(
    lambda policy: st.builds(
        lambda ranges: replace(policy, retention=tuple(ranges)) if policy.eviction == "retention" else policy,
        st.lists(retentions, max_size=3),
    )
)


def is_possible(scenario: Scenario) -> bool:
    """Whether the limits on a step agree with the engine's own."""
    policy = scenario.policy or Policy()
    try:
        check_batching(policy.batching, policy.limits, scenario.config)
    except ConfigError:
        return False
    return True
