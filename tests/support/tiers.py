"""Engines with a CPU prefix tier: driven by hand, or with conversations whose beginnings come back when others have taken their blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from sim.core.config import EngineConfig
from sim.core.plan import StepPlan
from sim.core.policies import preset_of
from sim.core.request import Outcome, RequestSpec
from sim.costs.constant import FixedCost
from tests.support.engine_driver import EngineDriver
from tests.support.leaping import Scenario, assert_leap_equals_step
from tests.support.roomy import TICK_S


def named(names: str, tokens: int = 4) -> dict[str, object]:
    """A prompt whose content is named by letters, `tokens` a letter."""
    return {"content_ids": tuple(names), "content_block_tokens": tokens}


def pass_all(engine: EngineDriver, plan: StepPlan) -> None:
    """The copies that a plan began are done."""
    for fence in [save[0] for save in plan.saves] + [load[1] for load in plan.loads]:
        engine.core.pass_fence(fence, engine.now_fs)
    engine.core.check()


def finish(engine: EngineDriver) -> None:
    """Let everybody end, and every copy be done right after the plan that began it."""
    while (plan := engine.plan()) is not None:
        engine.commit(plan)
        pass_all(engine, plan)


def warm(engine: EngineDriver, name: str, names: str, tokens: int = 4) -> None:
    """Serve a prompt that is one token longer than its names, and let its blocks be saved."""
    engine.add(name, len(names) * tokens + 1, **named(names, tokens))
    finish(engine)


def fill(engine: EngineDriver, tokens: int) -> None:
    """Let somebody use so many tokens' blocks, so that what was cached in them is gone."""
    engine.add("filler", tokens)
    finish(engine)


@st.composite
def conversations(draw: st.DrawFn, most_output_tokens: int = 15) -> tuple[RequestSpec, ...]:
    """Turns of a few conversations, singly and in bursts; some stop by themselves, and some of their clients leave."""
    ticks, made = 0, []
    for number in range(draw(st.integers(4, 18))):
        ticks += draw(st.sampled_from([0, 0, 8, 40, 90]))
        conversation, turns = draw(st.sampled_from("abcd")), draw(st.integers(1, 3))
        output_tokens = draw(st.integers(1, most_output_tokens))
        patience = draw(st.sampled_from([None] * 6 + [4, 20, 64]))
        made.append(
            RequestSpec(
                request_id=f"r{number}",
                arrival_s=ticks * TICK_S,
                input_tokens=8 * turns + draw(st.integers(1, 5)),
                output_tokens=output_tokens,
                max_tokens=draw(st.sampled_from([None, output_tokens, most_output_tokens])),
                priority=draw(st.integers(0, 2)),
                content_ids=tuple(f"{conversation}{turn}" for turn in range(turns)),
                content_block_tokens=8,
                cancel_after_s=None if patience is None else patience * TICK_S,
            )
        )
    return tuple(made)


@dataclass(frozen=True)
class Copies:
    """A tier and its link."""

    num_blocks: int
    mode: str
    block_s: float
    """How long a block takes."""
    failing: int
    """Each so manyth copy fails; 0: none."""

    def fails(self, fence: int) -> bool:
        return self.failing > 0 and fence % self.failing == 0


copies = st.builds(
    Copies,
    st.sampled_from([1, 6, 200]),
    st.sampled_from(["write_through", "write_back"]),
    st.sampled_from([0.0, TICK_S, 60 * TICK_S]),
    st.sampled_from([0, 2]),
)


def scenario_of(
    name: str, config: EngineConfig, tier: Copies, requests: tuple[RequestSpec, ...], eviction: str = "lru"
) -> Scenario:
    """Those requests to an engine with a preset's policy and this tier."""
    preset = preset_of(name, config)
    config = replace(preset.config, num_cpu_prefix_blocks=tier.num_blocks, cpu_prefix_mode=tier.mode)
    cost = FixedCost(8 * TICK_S, per_token_s=TICK_S, per_copied_block_s=tier.block_s)
    return Scenario(config, cost, requests, policy=replace(preset.policy, eviction=eviction))


def assert_nobody_is_lost(scenario: Scenario, fails: Callable[[int], bool]) -> None:
    """Everybody ends, every block comes back, and every copy has ended; and a leap leaves what its steps leave, to the last bill."""
    record = scenario.run(stepping=False, failing_copies=fails)
    core = record.recorders[0].core
    assert core.offload is not None
    assert not core.offload.in_flight
    assert (core.pool.num_owned, core.pool.num_quarantined, core.offload.tier.num_busy) == (0, 0, 0)
    assert all(request.outcome not in (None, Outcome.FAILED) for request in record.requests)
    assert_leap_equals_step(scenario, failing_copies=fails)
