"""Random loads of several tenants on engines from starved to comfortable, and what such a run decides and leaves behind."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import strategies as st

from sim.core.config import AttentionGroup, EngineConfig
from sim.core.forking import Forking
from sim.core.policy import Policy
from sim.core.request import Namespace, RequestSpec
from sim.costs.constant import FixedCost
from sim.results.recorder import RunRecord
from sim.world import run_world
from tests.support.roomy import TICK_S

COST = FixedCost(8 * TICK_S, per_token_s=TICK_S)


@st.composite
def loads(draw: st.DrawFn, *, most: int = 10, widths: Sequence[int] = (1,)) -> tuple[RequestSpec, ...]:
    """Requests of three tenants and priorities that arrive singly and in bursts, some of which leave.

    At most `most` of them, and 70 tokens each. `widths`: sequences a request may fork into, as samples or as beams.
    """
    arrival, made = 0, []
    for number in range(draw(st.integers(1, most))):
        arrival += draw(st.sampled_from([0, 0, 0, 1, 8, 16, 40, 100]))
        output_tokens = draw(st.integers(1, 30))
        patience = draw(st.sampled_from([None, None, None, None, 8, 40, 96]))
        shared = draw(st.integers(0, 3))
        width = draw(st.sampled_from(widths))
        forking = None
        if width > 1:
            change = draw(st.sampled_from([0.0, 0.05, 0.3, 0.8]))
            forking = Forking(width=width, change=change, seed=draw(st.integers(0, 9)))
        made.append(
            RequestSpec(
                request_id=f"r{number}",
                arrival_s=arrival * TICK_S,
                input_tokens=draw(st.integers(1, 40)),
                output_tokens=output_tokens,
                max_tokens=draw(st.sampled_from([None, output_tokens, output_tokens + 12, 4])),
                priority=draw(st.integers(0, 2)),
                tenant=draw(st.sampled_from("abc")),
                content_ids=tuple("xyz"[:shared]),
                content_block_tokens=8 if shared else 0,
                namespace=Namespace(lora=draw(st.sampled_from(["", "", "l", "m"]))),
                n=width,
                forking=forking,
                cancel_after_s=None if patience is None else patience * TICK_S,
            )
        )
    return tuple(made)


@st.composite
def engines(
    draw: st.DrawFn, *, planned_ahead: Sequence[bool] = (False, True), full_prompts: Sequence[bool] = (True,)
) -> EngineConfig:
    """Engines whose pool holds one longest request, or several."""
    max_num_seqs = draw(st.integers(1, 10))
    window = draw(st.sampled_from([None, None, None, 9, "groups", "groups"]))
    groups: tuple[AttentionGroup, ...] = ()
    if window == "groups":
        groups = tuple(
            AttentionGroup(block_size=size, window=draw(st.sampled_from([None, 5, 9, 13])))
            for size in draw(st.sampled_from([(4, 4), (4, 8), (8, 4), (4, 4, 4)]))
        )
    caching, ahead = draw(st.booleans()), draw(st.sampled_from(planned_ahead))
    return EngineConfig(
        num_gpu_blocks=max(len(groups), 1) * draw(st.sampled_from([18, 24, 40, 60])),
        block_size=4,
        max_model_len=72,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([2, 16, 64])),
        enable_prefix_caching=caching,
        reserve_full_prompt=draw(st.sampled_from(full_prompts)),
        num_cpu_prefix_blocks=draw(st.sampled_from([0, 12])) if caching else 0,
        cpu_prefix_mode=draw(st.sampled_from(["write_through", "write_back"])),
        sliding_window=None if groups else window,
        kv_groups=groups,
        num_cpu_blocks=draw(st.sampled_from([0, 0, 10])),
        async_scheduling=ahead,
    )


def run(
    config: EngineConfig, policy: Policy, requests: tuple[RequestSpec, ...], *, stepping: bool, **world: object
) -> tuple[RunRecord, list[str]]:
    """A checked run, and its decisions as they are written to a log."""
    log: list[str] = []
    record = run_world(
        config,
        COST,
        requests,
        policy=policy,
        stepping=stepping,
        check=True,
        decision_log=lambda entry: log.append(json.dumps(entry)),
        **world,
    )
    return record, log


def fates(record: RunRecord) -> list[tuple[object, ...]]:
    """What became of every request, and when."""
    return [
        (
            *(r.request_id, r.outcome, r.reason, r.retry_after_s, r.num_output_tokens),
            *(r.scheduled_fs, r.first_token_fs, r.ended_fs, r.token_fs),
            *(r.num_preemptions, r.recomputed_tokens, r.kv_block_fs, sorted(r.shared_fs.items())),
        )
        for r in record.requests
    ]
