"""Models with several attention groups on the real pool: windows beside full attention, in one arena, with a block table a group.

Whatever happens to a request's blocks, its answer is that of a run in which one table keeps every token of every layer. What left a
window is given back to the device, poisoned and never read: of a model of windows alone at once, in stretches when the core says so.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.cli import main
from experiments.real_run import run_scenario
from experiments.validation import SCENARIOS, check_cell, reference_answers, replay, run_for_real
from experiments.validation.scenario_kinds import ANY_GPU, BLOCK_SIZE, HYBRID, MAX_MODEL_LEN, windowed
from experiments.validation.scenarios import SmallScenario
from experiments.validation.worlds import Recorded, changed_answers, first_difference, preset, with_engine
from gpu.cpu_moves import CpuMoves
from gpu.layout import KVLayout
from gpu.metering import allocation_meter
from gpu.ops import Ops
from gpu.plan_moves import PlanMoves
from gpu.pool import PagedKVPool, PoisonedReadError
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from sim import Scenario
from sim.catalog.models import model_shape
from sim.core.blocks import DoubleFreeError, IntegrityError
from sim.core.clock import to_fs
from sim.core.config import AttentionGroup, ConfigError, EngineConfig
from sim.core.engine import EngineCore
from sim.core.forking import Forking
from sim.core.plan import BatchShape, ScheduledRequest, StepPlan
from sim.core.policies import PRESETS
from sim.core.request import RequestSpec, samples
from sim.memory import build_ledger
from sim.simulation import core_groups


def groups_of(shape) -> tuple[AttentionGroup, ...]:
    """Those of the ledger."""
    return core_groups(build_ledger(shape, ANY_GPU, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN))


# -- answers ---------------------------------------------------------------------------------------------------------------


@st.composite
def hybrid_scenarios(draw: st.DrawFn) -> SmallScenario:
    """Layers of up to three kinds in any order, requests that share prefixes, fork and leave, and an engine with too few blocks."""
    kinds = draw(st.sampled_from(((5, None), (9, None), (6, 13), (3, 8, None), (17, None))))
    order = (*range(len(kinds)), *draw(st.lists(st.sampled_from(range(len(kinds))), max_size=3)))
    base = model_shape(HYBRID)
    attention = tuple(replace(base.attention[1], window=window) for window in kinds)
    shape = replace(base, num_layers=len(order), attention=attention, attention_of_layer=order)
    made: list[RequestSpec] = []
    for index in range(draw(st.integers(1, 7))):
        input_tokens = draw(st.integers(1, 30))
        named = draw(st.integers(0, (input_tokens + 8) // 3))
        spec = RequestSpec(
            request_id=f"r{index}",
            arrival_s=index * draw(st.integers(0, 12)) / 1000,
            input_tokens=input_tokens,
            output_tokens=draw(st.integers(1, MAX_MODEL_LEN - 30)),
            priority=draw(st.integers(0, 1)),
            content_ids=tuple(draw(st.lists(st.sampled_from("xy"), min_size=named, max_size=named))),
            content_block_tokens=3 if named else 0,
            cancel_after_s=draw(st.none() | st.integers(1, 80).map(lambda ms: ms / 1000)),
        )
        width = draw(st.sampled_from((1, 1, 1, 2, 3)))
        forking = Forking(width=width, change=draw(st.sampled_from((0.0, 0.4)))) if draw(st.booleans()) else None
        made += samples(replace(spec, n=width, forking=forking if width > 1 else None))
    groups = groups_of(shape)
    engine = EngineConfig(
        num_gpu_blocks=len(groups) * MAX_MODEL_LEN // BLOCK_SIZE + draw(st.integers(0, 6)),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=draw(st.integers(2, 8)),
        max_num_batched_tokens=draw(st.integers(8, 40)),
        enable_prefix_caching=draw(st.booleans()),
        reserve_full_prompt=draw(st.booleans()),
        scheduling_policy=draw(st.sampled_from(("fcfs", "priority"))),
        kv_groups=groups,
        num_cpu_blocks=draw(st.sampled_from((0, 0, 8, 60))),
        async_scheduling=all(spec.forking is None for spec in made) and draw(st.booleans()),
    )
    made.sort(key=lambda spec: spec.arrival_s)
    return SmallScenario(name="drawn", requests=tuple(made), engine=engine, shape=shape, seed=draw(st.integers(0, 3)))


@given(scenario=hybrid_scenarios(), name=st.sampled_from(sorted(PRESETS)))
@settings(max_examples=40)
def test_every_request_gets_the_tokens_it_gets_with_unlimited_memory_and_one_table(scenario, name):
    cell = check_cell(scenario, name, "cpu")
    assert cell.ok, cell.error


def test_a_roomy_engine_keeps_every_token_in_one_table():
    """What the answers are compared with does not slide, has no groups, and is not idle: without the windows they are others."""
    scenario = SCENARIOS["hybrid-0"]
    assert scenario.roomy.engine.groups == (AttentionGroup(block_size=BLOCK_SIZE),)
    wide = replace(scenario, shape=windowed(scenario.shape, MAX_MODEL_LEN))
    answers, others = reference_answers(scenario), reference_answers(wide)
    assert sum(answers[name] != others[name] for name in answers) > len(answers) // 2


def test_forks_copy_in_every_group_and_prefixes_are_hit_in_every_group(steady_time):
    beams = run_for_real(SCENARIOS["hybrid-beams-0"], preset("vllm-v1"))
    assert sum(len(entry["copied"]) for entry in beams.decisions) > 3 * 3
    assert beams.report["copied_blocks"] >= sum(len(entry["copied"]) for entry in beams.decisions)
    found = run_for_real(SCENARIOS["hybrid-2"], preset("trtllm-no-evict"))
    assert sum(request.prefix_hit_tokens for request in found.requests) > 0


@pytest.mark.parametrize("name", ["hybrid-1", "hybrid-swaps-0"])
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8", "fp8_per_token_head"])
def test_a_narrower_cache_makes_no_difference_between_groups_and_one_table(name, kv_cache_dtype, steady_time):
    scenario, more = SCENARIOS[name], {"kv_cache_dtype": kv_cache_dtype}
    run = run_for_real(scenario, preset("vllm-v1"), **more)
    assert changed_answers(run, reference_answers(scenario, **more)) == []


@pytest.mark.parametrize(
    "action", ["pause", "swap_out", "cap_running", "shrink_step", "no_reuse", "drop_cache", "micro_batch", "truncate"]
)
def test_rungs_of_the_ladder_work_on_several_groups(action, steady_time):
    scenario = with_engine(SCENARIOS["hybrid-0"], num_cpu_blocks=40)
    scenario = replace(
        scenario, requests=tuple(replace(spec, priority=index % 2) for index, spec in enumerate(scenario.requests))
    )
    value = {"pause": 0.5, "swap_out": 0.5, "cap_running": 3.0, "shrink_step": 0.5, "truncate": 8.0, "micro_batch": 2.0}
    rungs = [
        {"action": action, "signal": "kv_usage", "on": 0.6, "off": 0.4, "hold_s": 0.0, "value": value.get(action, 0.0)}
    ]
    run = run_for_real(scenario, preset("ladder", rungs))
    assert any(entry["ladder"] for entry in run.decisions)
    assert any("truncate" in request.degraded for request in run.requests) == (action == "truncate")
    assert changed_answers(run, reference_answers(scenario)) == []
    assert run.leaked_blocks == 0
    assert first_difference(run.decisions, replay(scenario, preset("ladder", rungs), run.recording)) is None


def test_a_step_that_is_too_large_is_taken_back_in_every_group(steady_time):
    scenario = SCENARIOS["hybrid-2"]
    used = run_for_real(scenario, preset("vllm-v1")).report["bytes"]["workspace_high_water"]
    run = run_for_real(scenario, preset("vllm-v1"), workspace_bytes=used * 3 // 4)
    assert run.report["oom_steps"] > 0
    assert run.leaked_blocks == 0
    assert changed_answers(run, reference_answers(scenario)) == []
    assert first_difference(run.decisions, replay(scenario, preset("vllm-v1"), run.recording)) is None


# -- what left a window ----------------------------------------------------------------------------------------------------


class Watcher:
    """An executor after each of whose plans every block that the device's book calls free must be poison, in every place."""

    def __init__(self, inner) -> None:
        self.inner, self.slid, self.passed, self.checked_blocks = inner, 0, 0, 0

    def execute(self, plan):
        self.slid += sum(len(blocks) for _, blocks in plan.slid)
        for share in plan.scheduled(0):
            self.passed += any(0 in table for table in share.group_tables or (share.block_table,))
        result = self.inner.execute(plan)
        pool = self.inner.pool
        for block in range(1, pool.num_blocks + 1):
            if not pool.tags.holders(block):
                assert (pool.rows.strided[block] == -1).all(), f"block {block} is free and not poisoned"
                self.checked_blocks += 1
        return result

    def close(self, releases):
        self.inner.close(releases)


@pytest.mark.parametrize("name", ["window-0", "window-1", "window-2", "hybrid-0", "hybrid-1", "hybrid-swaps-1"])
def test_what_nobody_holds_is_poison_and_no_answer_suffers(name, steady_time):
    """Without a prefix cache every block that is given back is filled with NaN. Of a model of windows alone every plan's releases tell
    what slid; with several groups, what slid in the later steps of a stretch is in the next plan's `slid`.
    """
    scenario, watchers = with_engine(SCENARIOS[name], enable_prefix_caching=False), []

    def watched(inner):
        watchers.append(Watcher(inner))
        return watchers[0]

    run = run_for_real(scenario, preset("vllm-v1"), wrap=watched)
    assert watchers[0].checked_blocks > 0
    assert watchers[0].passed > 20
    assert (watchers[0].slid > 0) == name.startswith("hybrid")
    assert changed_answers(run, reference_answers(scenario)) == []
    assert run.leaked_blocks == 0


class Served:
    """One hybrid engine on the CPU device, driven step by step: window 6 and blocks of 4, so that blocks leave the window in steps in
    which nobody takes one.
    """

    def __init__(self, **settings: object) -> None:
        self.shape = windowed(model_shape(HYBRID), 6)
        self.specs = [
            RequestSpec(request_id=f"r{index}", arrival_s=0.0, input_tokens=tokens, output_tokens=26)
            for index, tokens in enumerate((11, 15))
        ]
        self.core = EngineCore(
            EngineConfig(
                num_gpu_blocks=72,
                block_size=BLOCK_SIZE,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=4,
                max_num_batched_tokens=32,
                kv_groups=groups_of(self.shape),
            )
        )
        self.engine = RealEngine(
            RealSettings(**{"shape": self.shape, "checked": True, "num_threads": 1} | settings), self.specs
        )
        self.executor = self.engine.executor(self.core)
        self.plans: list[StepPlan] = []
        self.now_s = 0.0
        for spec in self.specs:
            self.core.add(spec, 0)

    def step(self, max_repeat: int | None = None, cut: Callable[[int], int] = lambda steps: steps) -> None:
        """Plan, execute, and commit what is left when `cut` has said how many of the steps done count."""
        plan = self.core.plan(to_fs(self.now_s), max_repeat)
        assert plan is not None
        self.plans.append(plan)
        result = self.executor.execute(plan)
        self.now_s += 1.0
        self.core.commit(plan, result.cut(cut(result.steps)), to_fs(self.now_s))

    def run(self, **how: object) -> dict[str, list[int]]:
        while self.core.num_unfinished:
            self.step(**how)
        self.executor.close(self.core.pending_releases)
        assert self.executor.leaked_blocks == 0
        return {spec.request_id: self.engine.tokens.answer(spec.request_id) for spec in self.specs}


@pytest.mark.parametrize("seed", range(4))
def test_a_stretch_may_be_cut_before_or_after_a_block_slid_out_of_it(seed):
    """Steps that were run and do not count may have passed a block that the next step reads after all: it must still be there."""
    stepped = Served()
    want = stepped.run(max_repeat=1)
    assert not any(plan.slid for plan in stepped.plans)
    whole = Served()
    assert whole.run() == want
    assert any(plan.slid for plan in whole.plans)
    assert len(whole.plans) < len(stepped.plans) / 2
    draw, cuts = random.Random(seed), Served()
    assert cuts.run(cut=lambda steps: draw.randint(1, steps)) == want
    assert any(plan.slid for plan in cuts.plans)
    assert len(cuts.plans) > len(whole.plans)


def test_a_later_step_of_a_stretch_is_what_the_core_says_but_for_what_slid(monkeypatch):
    """The device goes on with its first tables: they are the core's, with blocks where the core has NO_BLOCK already."""
    served, compared, slid = Served(), 0, 0
    seen: list[tuple[ScheduledRequest, ...]] = []
    run = type(served.executor.forward).run
    monkeypatch.setattr(
        served.executor.forward,
        "run",
        lambda scheduled, parts=1: (seen.append(scheduled), run(served.executor.forward, scheduled, parts))[1],
    )
    while served.core.num_unfinished:
        plan = served.core.plan(to_fs(served.now_s))
        seen.clear()
        result = served.executor.execute(plan)
        for ahead, mine in enumerate(seen):
            for share, told in zip(mine, plan.scheduled(ahead), strict=True):
                compared += 1
                assert (share.request_id, share.context_tokens) == (told.request_id, told.context_tokens)
                for own, table in zip(share.group_tables, told.group_tables, strict=True):
                    assert len(own) == len(table)
                    assert all(block in (0, kept) for block, kept in zip(table, own, strict=True))
                    slid += own != table
        served.now_s += 1.0
        served.core.commit(plan, result, to_fs(served.now_s))
    assert compared > 40
    assert slid > 5


def test_a_decode_step_of_several_groups_makes_no_allocator_call():
    served = Served(checked=False)
    for _ in range(4):
        served.step(max_repeat=1)
    meter = allocation_meter("cpu")
    for _ in range(8):
        with meter:
            served.step(max_repeat=1)
    assert meter.allocations == 0, getattr(meter, "by_operation", None)


# -- faults ----------------------------------------------------------------------------------------------------------------


class Tampered:
    """An executor whose plans somebody tampers with."""

    def __init__(self, inner, change: Callable[[StepPlan], StepPlan]) -> None:
        self.inner, self.change = inner, change

    def execute(self, plan):
        return self.inner.execute(self.change(plan))

    def close(self, releases):
        self.inner.close(releases)


def run_tampered(change: Callable[[StepPlan], StepPlan]) -> Recorded:
    scenario = with_engine(SCENARIOS["hybrid-0"], enable_prefix_caching=False)
    return run_for_real(scenario, preset("vllm-v1"), wrap=lambda inner: Tampered(inner, change))


def test_a_device_that_is_not_told_what_slid_out_is_found_out(steady_time):
    with pytest.raises(
        IntegrityError, match=r"r\d no longer uses blocks \[[\d, ]+\] at step \d+, and no plan released them"
    ):
        run_tampered(lambda plan: replace(plan, slid=()))


def test_a_block_that_slides_out_twice_is_named(steady_time):
    with pytest.raises(
        DoubleFreeError, match=r"block \d+ is released twice: first by (r\d) at step (\d+), now by \1 at step \2"
    ):
        run_tampered(lambda plan: replace(plan, slid=plan.slid * 2))


def test_a_block_that_slides_out_while_it_is_read_is_named(steady_time):
    planted: list[int] = []

    def slide_early(plan):
        share = plan.scheduled(0)[0]
        if plan.step < 6 or planted or share.num_tokens > 1 or share.context_tokens < 12:
            return plan
        planted.append(plan.step)
        seen = next(block for block in share.group_tables[1] if block)
        return replace(plan, slid=(*plan.slid, (share.request_id, (seen,))))

    with pytest.raises(
        PoisonedReadError, match=r"^(r\d) reads block \d+ at step (\d+): .* layer 2; .*released by \1 at step \2$"
    ):
        run_tampered(slide_early)


def test_layers_that_read_the_table_of_another_group_give_other_answers(steady_time):
    """Each table is the request's own, so no owner tag is wrong: only the answers show that the tests above are not blind."""
    run = run_for_real(SCENARIOS["hybrid-swaps-0"], preset("vllm-v1"))
    reference = reference_answers(SCENARIOS["hybrid-swaps-0"])
    assert changed_answers(run, reference) == []

    def crossed(plan):
        shares = plan.scheduled(0)
        turned = tuple(
            replace(share, group_tables=share.group_tables[1::-1] + share.group_tables[2:]) for share in shares
        )
        return replace(plan, repeat=1, scheduled=lambda ahead: turned if plan.step % 2 else shares)

    scenario = with_engine(SCENARIOS["hybrid-swaps-0"], enable_prefix_caching=False, num_cpu_blocks=0)
    wrong = run_for_real(scenario, preset("vllm-v1"), checked=False, wrap=lambda inner: Tampered(inner, crossed))
    assert changed_answers(wrong, reference)


def test_what_slid_out_may_be_somebody_else_s_in_the_same_plan():
    """First of all a plan's device gives back what slid: the new holder's block is fresh, and poisoned until it writes."""
    pool = PagedKVPool(
        KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32"), 8, checked=True
    )
    moves = PlanMoves(pool, Ops("cpu"), CpuMoves(pool, Ops("cpu")), is_cached=lambda block: False, num_groups=2)

    def hold(name: str, context: int, *tables: tuple[int, ...]) -> None:
        moves.hold(ScheduledRequest(name, 1, context, tables[0], samples=True, group_tables=tables))

    def begin(step: int, **decided: object) -> None:
        pool.begin_step(step)
        moves.begin(
            StepPlan(step=step, repeat=1, start_fs=0, shape=BatchShape(), scheduled=lambda ahead: (), **decided)
        )

    begin(0)
    hold("a", 11, (1, 2, 3), (4, 5, 6))
    for block in range(1, 7):
        pool.layer(0).kv[block].fill_(1.0)
    pool.end_step()
    begin(1, slid=(("a", (1,)), ("a", (2,))), copies=((6, 2),))
    hold("a", 11, (0, 0, 3), (4, 5, 6))
    hold("b", 4, (2, 1), (7, 8))
    assert pool.layer(0).kv[1].isnan().all()  # b's, and not written yet
    assert (pool.layer(0).kv[2] == 1.0).all()  # b's, copied into
    assert pool.tags.holders(1) == pool.tags.holders(2) == ("b",)


# -- from a configuration file to the end of a run -------------------------------------------------------------------------


def test_a_hybrid_model_runs_from_the_command_line(capsys):
    flags = ["--workload", "uniform", "--num-requests", "6", "--rate", "50", "--max-model-len", "1600"]
    flags += ["--num-gpu-blocks-override", "300", "--check", "--json"]
    assert main(["run", "--executor", "torch", "--device", "cpu", "--model", "tiny-hybrid-test", *flags]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["finished"], summary["failed"]) == (6, 0)
    (report,) = summary["executors"]
    assert report["fallbacks"] == []
    # 301 blocks of two places of 16 tokens, K and V of two heads of 16 float32; and two scales a place.
    assert report["bytes"]["kv_cache"] == 301 * 2 * 16 * 2 * 2 * 16 * 4 + 2 * 2 * 4
    assert report["blocks"] == {"allocated": 0, "quarantined": 0, "free": 300}
    assert report["bytes"]["kv_cache"] - 16 == 301 * build_ledger("tiny-hybrid-test", ANY_GPU).layout.block_bytes


@pytest.mark.parametrize(
    ("model", "why"), [("gpt-oss-20b", "attention sinks"), ("gemma-2-9b", "capped attention scores")]
)
def test_other_hybrid_families_are_refused_with_what_they_need(model, why, capsys):
    flags = [
        "--workload",
        "uniform",
        "--num-requests",
        "2",
        "--max-model-len",
        "256",
        "--num-gpu-blocks-override",
        "64",
    ]
    assert main(["run", "--executor", "torch", "--device", "cpu", "--model", model, *flags]) == 2
    message = capsys.readouterr().err
    assert f"model {model} cannot be run for real" in message
    assert why in message
    assert "llama, mistral, qwen2, qwen3 can be" in message


def test_a_release_that_keeps_every_token_serves_the_same_file_from_one_table(tmp_path):
    """One window layer and one that sees everything: two block tables a request in vLLM since 0.10, one before."""
    values = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128, "torch_dtype": "float32",
        "max_position_embeddings": 256, "tie_word_embeddings": True, "sliding_window": 19, "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    path = tmp_path / "hybrid.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    scenario = Scenario(
        model=str(path),
        workload={"workload": "uniform", "input_tokens": 60, "output_tokens": 30, "num_requests": 4, "rate": 1.0},
        engine={"num_gpu_blocks_override": 64, "max_num_batched_tokens": 64, "max_num_seqs": 4},
        run={"executor": "torch", "device": "cpu", "check": True},
    )
    hybrid, plain = run_scenario(scenario), run_scenario(scenario.with_(engine_version="0.9.2"))
    assert hybrid.summary["finished"] == plain.summary["finished"] == 4
    # In two tables, whose blocks have half the bytes: 4 + 4 blocks for the prompt. When 80 are computed both need a sixth for the next
    # token, and of the window (80 - 18) // 16 = 3 are gone: 6 + 3, the most they ever hold.
    assert set(plain.requests["peak_blocks"]) == {6}
    assert set(hybrid.requests["peak_blocks"]) == {6 + 3}


def test_an_engine_that_keeps_less_than_the_model_sees_is_refused():
    spec = RequestSpec(request_id="r", arrival_s=0.0, input_tokens=9, output_tokens=3)
    engine = RealEngine(RealSettings(shape=model_shape("tiny-llama-test")), [spec])
    config = EngineConfig(num_gpu_blocks=8, block_size=4, max_num_batched_tokens=16, max_num_seqs=2, sliding_window=8)
    with pytest.raises(
        ConfigError, match="keeps a window of 8 tokens, but tiny-llama-test has layers that see all tokens"
    ):
        engine.executor(EngineCore(config))
