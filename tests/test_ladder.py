"""The degradation ladder: triggers with hysteresis, the effect of each rung by hand, whom it spares, and that it leaps exactly."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core import (
    Batching,
    ConfigError,
    Durations,
    EngineConfig,
    EngineCore,
    Outcome,
    Policy,
    RequestSpec,
    State,
    StepResult,
)
from sim.core.clock import FS_PER_S
from sim.core.cpu_server import CpuExecutor
from sim.core.ladder import ACTIONS, SIGNALS, LadderConfig, Rung, check_ladder, standard_ladder
from sim.core.plan import BatchShape
from sim.core.preemption import last_admitted, worst_priority
from sim.core.waiting import FcfsQueue, priority_queue
from sim.costs.constant import FixedCost
from sim.results.summary import mark_columns, request_columns, summarize, timeline_columns
from sim.world import run_world

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


class Engine:
    """A core with a ladder, driven a second a step; its books are checked after every event."""

    def __init__(
        self,
        *rungs: Rung,
        guard: int = 0,
        swap: bool = False,
        cpu: CpuExecutor | None = None,
        **config: object,
    ) -> None:
        settings = {"num_gpu_blocks": 20, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, **config}
        self.log: list[dict] = []
        self.core = EngineCore(
            EngineConfig(**settings),
            policy=Policy(
                queue=priority_queue,
                victim=worst_priority,
                swap=swap,
                cpu_executor=cpu,
                ladder=LadderConfig(rungs=rungs, guard_priority=guard),
            ),
            decision_sink=lambda entry, start_fs: self.log.append(entry),
        )
        self.now_fs = 0

    def add(self, request_id, input_tokens, output_tokens=20, priority=1, **fields):
        spec = RequestSpec(
            request_id=request_id,
            arrival_s=0.0,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            max_tokens=output_tokens,
            priority=priority,
            **fields,
        )
        return self.core.add(spec, self.now_fs).request

    def step(self):
        plan = self.core.plan(self.now_fs, 1)
        self.core.check()
        if plan is None:
            return None
        scheduled = plan.scheduled(0)
        self.now_fs += FS_PER_S
        self.core.commit(plan, StepResult(durations=Durations.one(FS_PER_S)), self.now_fs)
        self.core.check()
        return {share.request_id: share.num_tokens for share in scheduled}

    def run(self):
        while self.step() is not None:
            pass
        assert self.core.num_unfinished == 0
        assert self.core.pool.num_owned == 0

    def ladder_log(self):
        return [(entry["step"], *change) for entry in self.log for change in entry["ladder"]]


# -- triggers ---------------------------------------------------------------------------------------------------------------------


def test_a_rung_goes_on_at_its_threshold_and_off_below_the_lower_one():
    """Pool of 20, on at 50 %, off below 30 %: a prompt of 40 tokens takes 10 blocks in step 0, so step 1 sees 50 %; the request
    ends after 2 steps, and step 2 sees only the 4 blocks (20 %) of the other one."""
    engine = Engine(Rung(action="no_reuse", on=0.5, off=0.3, hold_s=0.0))
    engine.add("big", 40, 2)
    engine.step()
    engine.add("small", 13, 4)
    engine.run()
    assert engine.ladder_log() == [(1, "no_reuse", "on"), (2, "no_reuse", "off")]


def test_a_rung_stays_on_for_its_hold_time():
    engine = Engine(Rung(action="no_reuse", on=0.5, off=0.3, hold_s=5.0))
    engine.add("big", 40, 2)
    engine.step()
    engine.add("small", 4, 10)
    engine.run()
    assert engine.ladder_log() == [(1, "no_reuse", "on"), (6, "no_reuse", "off")]


def test_a_harder_rung_goes_on_only_after_the_milder_ones_of_its_signal():
    """Both are due in step 1 and go on in order; with the milder one's threshold out of reach the harder one never does."""
    mild = Rung(action="no_reuse", on=0.5, off=0.3)
    hard = Rung(action="pause_admission", on=0.5, off=0.3)
    engine = Engine(mild, hard)
    engine.add("big", 40, 3)
    engine.step()
    engine.step()
    assert engine.ladder_log() == [(1, "no_reuse", "on"), (1, "pause_admission", "on")]
    never = Engine(Rung(action="no_reuse", on=1.1, off=1.1), hard)
    never.add("big", 40, 3)
    never.run()
    assert never.ladder_log() == []


# -- what each rung does ------------------------------------------------------------------------------------------------------------


def test_drop_cache_forgets_what_nobody_holds():
    engine = Engine(Rung(action="drop_cache", on=0.5, off=0.3))
    engine.add("first", 8, 1, content_ids=("a", "b"), content_block_tokens=4)
    engine.step()
    assert engine.core.pool.num_cached == 2
    engine.add("big", 44, 3)
    engine.step()
    engine.step()
    assert engine.core.pool.num_cached == 0


def test_no_reuse_keeps_only_the_spared_in_the_prefix_cache():
    engine = Engine(Rung(action="no_reuse", on=0.1, off=0.05))
    named = {"content_ids": ("a", "b", "c"), "content_block_tokens": 4}
    holder = engine.add("holder", 12, 10, **named)
    engine.step()
    low = engine.add("low", 12, 2, priority=1, **named)
    high = engine.add("high", 12, 2, priority=0, **named)
    engine.step()
    assert (low.prefix_hit_tokens, high.prefix_hit_tokens, holder.prefix_hit_tokens) == (0, 8, 0)
    assert low.degraded == ["no_reuse"]
    assert high.degraded == []


def test_pause_admission_holds_back_the_unimportant_while_anything_runs():
    engine = Engine(Rung(action="pause_admission", on=0.1, off=0.05))
    engine.add("running", 12, 3)
    engine.step()
    low, high = engine.add("low", 4, 1, priority=1), engine.add("high", 4, 1, priority=0)
    assert engine.step() == {"running": 1, "high": 4}
    engine.run()
    assert (low.outcome, high.outcome) == (Outcome.FINISHED, Outcome.FINISHED)
    assert low.degraded == ["pause_admission"]
    assert high.degraded == []


def test_micro_batch_computes_a_step_in_several_passes_and_degrades_nobody():
    """Two prompts of 20 tokens in two passes of 20; then two decodes in two; once it is off, in one."""
    engine = Engine(Rung(action="micro_batch", on=0.2, off=0.1, value=3))
    requests = [engine.add(f"r{i}", 20, output_tokens=6) for i in range(2)]
    shapes = []
    while engine.core.num_unfinished:
        plan = engine.core.plan(engine.now_fs, 1)
        shapes.append(plan.shape)
        engine.now_fs += FS_PER_S
        engine.core.commit(plan, StepResult(durations=Durations.one(FS_PER_S)), engine.now_fs)
    assert [shape.passes for shape in shapes] == [
        1,
        2,
        2,
        2,
        2,
        2,
    ]  # the rung looks before a step, and sees the blocks of the one before
    assert all(not request.degraded for request in requests)


def test_the_passes_of_a_step_are_its_tokens_and_no_more():
    shape = BatchShape(
        prefill=((7, 0), (5, 16)),
        decode_seqs=4,
        decode_context_tokens=90,
        decode_max_context_tokens=30,
        sampled_seqs=6,
        copied_blocks=2,
        swapped_blocks=3,
        passes=4,
    )
    parts = shape.split()
    assert [part.num_tokens for part in parts] == [4, 4, 4, 4]
    assert [part.prefill for part in parts] == [(), ((4, 0),), ((3, 4), (1, 16)), ((4, 17),)]
    assert [part.sampled_seqs for part in parts] == [4, 0, 1, 1]
    assert [part.decode_context_tokens for part in parts] == [90, 0, 0, 0]
    assert [(part.copied_blocks, part.swapped_blocks) for part in parts] == [(2, 3), (0, 0), (0, 0), (0, 0)]


@pytest.mark.parametrize("value", [0.0, 1.0, 2.5])
def test_fewer_than_two_passes_are_refused(value):
    with pytest.raises(ConfigError, match="rung micro_batch needs a whole number of passes, at least 2"):
        Rung(action="micro_batch", on=0.5, off=0.2, value=value)


def test_shrink_step_shortens_the_prompt_chunks_of_the_unimportant_only():
    """A quarter of 64 tokens is 16."""
    engine = Engine(Rung(action="shrink_step", on=0.1, off=0.05, value=0.25))
    engine.add("running", 12, 9, priority=0)
    engine.step()
    low = engine.add("low", 20, 1, priority=1)
    assert engine.step() == {"running": 1, "low": 16}
    high = engine.add("high", 20, 1, priority=0)
    assert engine.step() == {"running": 1, "low": 4, "high": 20}
    assert low.degraded == ["shrink_step"]
    assert high.degraded == []


def test_cap_new_shortens_what_starts_and_cap_running_what_runs():
    engine = Engine(
        Rung(action="cap_new", on=0.1, off=0.05, value=3), Rung(action="cap_running", on=0.5, off=0.4, value=5)
    )
    running = engine.add("running", 12, 20)
    engine.step()
    capped, spared = engine.add("capped", 4, 9), engine.add("spared", 4, 9, priority=0)
    engine.step()
    engine.add("filler", 24, 3, priority=0)
    engine.run()
    assert (capped.num_output_tokens, capped.degraded) == (3, ["cap_new"])
    assert (spared.num_output_tokens, spared.degraded) == (9, [])
    assert running.degraded == ["cap_running"]
    assert running.num_output_tokens == 5


def test_cap_running_never_takes_back_a_token_that_was_delivered():
    """Capped at 2 when it has 4 tokens: the next one is its last."""
    engine = Engine(Rung(action="cap_running", on=0.5, off=0.4, value=2))
    running = engine.add("running", 8, 20)
    for _ in range(4):
        engine.step()
    engine.add("filler", 36, 5, priority=0)
    engine.step()
    engine.run()
    assert running.num_output_tokens == 6  # 4, one more with the filler's prompt, and the last


@pytest.mark.parametrize("swap", [False, True])
def test_pause_takes_blocks_from_the_least_important_until_usage_falls(swap):
    """15 of 20 blocks owned; down to 10: "worse" (5 blocks) goes first, and comes back when the rung is off."""
    action = "swap_out" if swap else "pause"
    rung = Rung(action=action, on=0.75, off=0.7, hold_s=0.0, value=0.5)
    engine = Engine(rung, swap=swap, num_cpu_blocks=20 if swap else 0)
    important = engine.add("important", 20, 4, priority=0)
    bad, worse = engine.add("bad", 20, 4, priority=1), engine.add("worse", 20, 4, priority=2)
    engine.step()
    scheduled = engine.step()
    assert "worse" not in scheduled and {"important", "bad"} <= scheduled.keys()
    engine.run()
    assert worse.degraded[0] == action
    assert important.degraded == []
    assert all(r.outcome is Outcome.FINISHED and r.num_output_tokens == 4 for r in (important, bad, worse))
    assert (engine.core.swapped_out_blocks > 0) == swap
    assert engine.core.swapped_out_blocks == engine.core.swapped_in_blocks


def test_run_on_cpu_moves_the_least_important_and_brings_it_back():
    """12 of 20 blocks owned; down to 8: "low" (4 blocks) goes on on the CPU, at 2 s a token, while "high" takes a token a second.
    At 7 s "high" has its 8 tokens; usage is 0, so the rung is off, and "low", which has its token of 1 s and those of 3, 5 and 7 s, comes
    back for the rest: its swap-in and next token in the step to 8 s."""
    rung = Rung(action="run_on_cpu", on=0.5, off=0.3, hold_s=0.0, value=0.45)
    engine = Engine(rung, cpu=CpuExecutor(token_s=2.0), num_cpu_blocks=20)
    high = engine.add("high", 30, 8, priority=0)
    low = engine.add("low", 13, 10, priority=2)
    assert engine.step() == {"high": 30, "low": 13}
    assert engine.step() == {"high": 1}
    assert (low.state, low.degraded, engine.core.pool.num_owned) == (State.ON_CPU, ["run_on_cpu"], 8)
    assert engine.core.next_wake_fs(engine.now_fs) == (1 + 9 * 2) * FS_PER_S
    for _ in range(5):
        assert engine.step() == {"high": 1}
    assert engine.now_fs == 7 * FS_PER_S
    assert engine.step() == {"high": 1}
    assert high.outcome is Outcome.FINISHED
    assert engine.step() == {"low": 1}
    assert low.num_output_tokens == 1 + 3 + 1
    engine.run()
    assert (low.outcome, low.num_output_tokens, low.num_preemptions) == (Outcome.FINISHED, 10, 0)
    assert high.degraded == []
    assert engine.core.cpu_tokens == 3
    assert [entry["to_cpu"] for entry in engine.log if "to_cpu" in entry] == [["low"]]
    assert engine.ladder_log() == [(1, "run_on_cpu", "on"), (8, "run_on_cpu", "off")]


def test_who_has_all_tokens_on_the_cpu_has_finished_there_and_who_leaves_is_gone():
    rung = Rung(action="run_on_cpu", on=0.5, off=0.0, hold_s=0.0, value=0.3)
    engine = Engine(rung, cpu=CpuExecutor(token_s=1.5), num_cpu_blocks=20)
    engine.add("high", 30, 20, priority=0)
    ends, leaves = engine.add("ends", 9, 3, priority=2), engine.add("leaves", 9, 9, priority=3)
    engine.step()
    engine.step()
    assert (ends.state, leaves.state) == (State.ON_CPU, State.ON_CPU)
    engine.core.abort("leaves", engine.now_fs + FS_PER_S)
    engine.core.check()
    assert (leaves.outcome, leaves.num_output_tokens) == (Outcome.ABORTED, 2)
    engine.run()
    assert (ends.outcome, ends.num_output_tokens, ends.ended_fs) == (Outcome.FINISHED, 3, 4 * FS_PER_S)
    assert engine.core.cpu_tokens == 3


def test_nobody_is_moved_to_a_cpu_that_has_no_slot_or_no_room():
    """ "lower" takes the one slot. With 5 CPU blocks not even that: 13 + 9 tokens need 6."""
    rung = Rung(action="run_on_cpu", on=0.5, off=0.1, value=0.1)
    for blocks, moved in ((40, ["lower"]), (5, [])):
        engine = Engine(rung, cpu=CpuExecutor(token_s=9.0, max_num_seqs=1), num_cpu_blocks=blocks)
        engine.add("high", 13, 10, priority=0)
        requests = [engine.add("low", 13, 10, priority=1), engine.add("lower", 13, 10, priority=2)]
        engine.step()
        engine.step()
        assert [request.request_id for request in requests if request.state is State.ON_CPU] == moved
        engine.run()


def test_offload_cache_saves_all_that_nobody_holds():
    """Write-back keeps only what is next to be evicted saved, which here are blocks never used; the rung saves the 2 cached ones."""
    rung = Rung(action="offload_cache", on=0.2, off=0.1)
    engine = Engine(rung, num_cpu_prefix_blocks=10, cpu_prefix_mode="write_back")
    engine.add("first", 8, 1, content_ids=("a", "b"), content_block_tokens=4)
    engine.step()
    engine.add("second", 17, 4)
    assert engine.step() == {"second": 17}
    assert engine.log[-1].get("saved") is None
    engine.step()
    assert engine.log[-1]["saved"] == [[(2, 1), (1, 2)]]


def test_the_workspace_signal_is_what_the_latest_step_needed_and_must_be_known():
    rung = Rung(action="shrink_step", signal="workspace", on=0.8, off=0.5, hold_s=0.0, value=0.25)
    engine = Engine(rung)
    engine.add("low", 40, 4)
    for share, moved in ((0.9, []), (0.4, [(1, "shrink_step", "on")])):
        plan = engine.core.plan(engine.now_fs)
        assert plan.repeat == 1
        engine.now_fs += FS_PER_S
        result = StepResult(durations=Durations.one(FS_PER_S), workspace_share=share)
        engine.core.commit(plan, result, engine.now_fs)
        assert engine.ladder_log() == moved
    engine.core.plan(engine.now_fs)
    assert engine.ladder_log() == [(1, "shrink_step", "on"), (2, "shrink_step", "off")]
    unknown = Engine(rung)
    unknown.add("x", 4)
    with pytest.raises(ConfigError, match="does not say what its steps need"):
        unknown.step()


def test_truncate_keeps_the_first_block_and_a_window_and_says_so():
    """40 tokens in 10 blocks, keep 8: blocks 1 to 7 (of 0 to 9) go, 0 is the sink, 8 and 9 the window."""
    engine = Engine(Rung(action="truncate", on=0.5, off=0.1, value=8))
    low = engine.add("low", 40, 10, priority=1)
    engine.step()
    engine.step()
    assert low.table.blocks[1:8] == [0] * 7
    assert all(low.table.blocks[index] for index in (0, 8, 9, 10))
    assert low.degraded == ["truncate"]
    assert engine.core.pool.num_owned == 4
    engine.run()
    assert low.num_output_tokens == 10


def test_shed_sends_the_unimportant_away_with_the_numbers_and_a_time_to_come_back():
    """One sequence at a time, 5 steps each. After two have left, the one that has waited 11 s is sent away; the important waits on."""
    engine = Engine(Rung(action="shed", signal="queue_s", on=11.0, off=11.0, hold_s=0.0), max_num_seqs=1)
    for name in "abc":
        engine.add(name, 4, 5)
    high = engine.add("high", 4, 5, priority=0)
    engine.run()
    assert high.outcome is Outcome.FINISHED
    rejected = [request_id for entry in engine.log for request_id, _ in entry["rejected"]]
    reasons = [reason for entry in engine.log for _, reason in entry["rejected"]]
    assert rejected == ["c"]
    assert "waited 11.0 s at priority 1" in reasons[0] or "waited 12.0 s" in reasons[0]
    assert "try again in" in reasons[0]


# -- whom it spares, and what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rung", "words"),
    [
        ({"action": "sleep", "on": 1, "off": 0}, "known are drop_cache"),
        ({"action": "shed", "signal": "mood", "on": 1, "off": 0}, "known are kv_usage"),
        ({"action": "shed", "on": 0.5, "off": 0.9}, "flutter"),
        ({"action": "truncate", "on": 0.9, "off": 0.5}, "needs a value above 0"),
    ],
)
def test_a_rung_that_makes_no_sense_is_refused(rung, words):
    with pytest.raises(ConfigError, match=words):
        Rung(**rung)


def test_a_ladder_that_the_engine_cannot_carry_out_is_refused():
    swap_out = Rung(action="swap_out", on=0.9, off=0.5, value=0.5)
    with pytest.raises(ConfigError, match="no CPU pool"):
        check_ladder(LadderConfig(rungs=(swap_out,)), swap=False)
    with pytest.raises(ConfigError, match="no CPU prefix tier"):
        check_ladder(LadderConfig(rungs=(Rung(action="offload_cache", on=0.9, off=0.5),)), swap=True)
    with pytest.raises(ConfigError, match="no CPU executor"):
        check_ladder(LadderConfig(rungs=(Rung(action="run_on_cpu", on=0.9, off=0.5, value=0.5),)), swap=True)
    with pytest.raises(ConfigError, match="twice"):
        check_ladder(LadderConfig(rungs=(swap_out, swap_out)), swap=True)


# -- random ladders ---------------------------------------------------------------------------------------------------------------


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
        max_model_len=64,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, draw(st.sampled_from([4, 16]))),
        num_cpu_blocks=draw(st.sampled_from([3, 50, 200])) if swap else 0,
        num_cpu_prefix_blocks=draw(st.sampled_from([3, 50])) if tier else 0,
        cpu_prefix_mode=draw(st.sampled_from(["write_through", "write_back"])),
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
    return config, policy, requests


def everything(config, policy, requests, *, stepping):
    log = []
    record = run_world(
        config,
        FixedCost(0.005, per_token_s=0.0001, per_context_token_s=0.00001, per_copied_block_s=0.002),
        requests,
        policy=policy,
        stepping=stepping,
        check=True,
        decision_log=lambda entry: log.append(json.dumps(entry)),
    )
    summary = summarize(record, scenario={}, seed=0, version="0")
    summary.pop("core_time_s")
    return log, summary, request_columns(record), timeline_columns(record), mark_columns(record), record


@settings(max_examples=150)
@given(scenarios())
def test_any_ladder_leaps_exactly_spares_the_guarded_and_ends_every_request(scenario):
    config, policy, requests = scenario
    leapt, stepped = (everything(config, policy, requests, stepping=stepping) for stepping in (False, True))
    assert leapt[:5] == stepped[:5]
    record = leapt[5]
    assert all(pool.num_owned == 0 for pool in (recorder.core.pool for recorder in record.recorders))
    for request in record.requests:
        assert request.outcome is not None
        if request.spec.priority <= policy.ladder.guard_priority:
            assert request.degraded == []


@settings(max_examples=60)
@given(scenarios())
def test_a_ladder_with_all_rungs_off_is_the_base_policy(scenario):
    config, policy, requests = scenario
    off = LadderConfig(rungs=(Rung(action="shed", signal="queue_s", on=1e9, off=1e9),))
    base = Policy(queue=policy.queue, victim=policy.victim, batching=policy.batching, swap=policy.swap)
    idle = Policy(queue=policy.queue, victim=policy.victim, batching=policy.batching, swap=policy.swap, ladder=off)
    assert (
        everything(config, base, requests, stepping=False)[:5] == everything(config, idle, requests, stepping=False)[:5]
    )


def test_the_standard_ladder_scales_with_the_objective():
    assert [rung.on for rung in standard_ladder(4.0).rungs[1:]] == [1.0, 2.8]
