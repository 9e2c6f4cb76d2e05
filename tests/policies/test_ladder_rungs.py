"""The degradation ladder: what each rung does, by hand."""

import pytest

from sim.core import ConfigError, Durations, Forking, Outcome, RequestSpec, State, StepResult, samples
from sim.core.batch_shape import BatchShape
from sim.core.clock import FS_PER_S
from sim.core.cpu_server import CpuExecutor
from sim.core.rungs import Rung
from tests.support.laddered_engine import LadderedEngine


def test_drop_cache_forgets_what_nobody_holds():
    engine = LadderedEngine(Rung(action="drop_cache", on=0.5, off=0.3))
    engine.add("first", 8, 1, content_ids=("a", "b"), content_block_tokens=4)
    engine.step()
    assert engine.core.pool.num_cached == 2
    engine.add("big", 44, 3)
    engine.step()
    engine.step()
    assert engine.core.pool.num_cached == 0


def test_no_reuse_keeps_only_the_spared_in_the_prefix_cache():
    engine = LadderedEngine(Rung(action="no_reuse", on=0.1, off=0.05))
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
    engine = LadderedEngine(Rung(action="pause_admission", on=0.1, off=0.05))
    engine.add("running", 12, 3)
    engine.step()
    low, high = engine.add("low", 4, 1, priority=1), engine.add("high", 4, 1, priority=0)
    assert engine.step().tokens == {"running": 1, "high": 4}
    engine.run()
    assert (low.outcome, high.outcome) == (Outcome.FINISHED, Outcome.FINISHED)
    assert low.degraded == ["pause_admission"]
    assert high.degraded == []


def test_micro_batch_computes_a_step_in_several_passes_and_degrades_nobody():
    """Two prompts of 20 tokens in two passes of 20; then two decodes in two; once it is off, in one."""
    engine = LadderedEngine(Rung(action="micro_batch", on=0.2, off=0.1, value=3))
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
    engine = LadderedEngine(Rung(action="shrink_step", on=0.1, off=0.05, value=0.25))
    engine.add("running", 12, 9, priority=0)
    engine.step()
    low = engine.add("low", 20, 1, priority=1)
    assert engine.step().tokens == {"running": 1, "low": 16}
    high = engine.add("high", 20, 1, priority=0)
    assert engine.step().tokens == {"running": 1, "low": 4, "high": 20}
    assert low.degraded == ["shrink_step"]
    assert high.degraded == []


def test_cap_new_shortens_what_starts_and_cap_running_what_runs():
    engine = LadderedEngine(
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
    engine = LadderedEngine(Rung(action="cap_running", on=0.5, off=0.4, value=2))
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
    engine = LadderedEngine(rung, swap=swap, num_cpu_blocks=20 if swap else 0)
    important = engine.add("important", 20, 4, priority=0)
    bad, worse = engine.add("bad", 20, 4, priority=1), engine.add("worse", 20, 4, priority=2)
    engine.step()
    scheduled = engine.step().tokens
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
    engine = LadderedEngine(rung, cpu=CpuExecutor(token_s=2.0), num_cpu_blocks=20)
    high = engine.add("high", 30, 8, priority=0)
    low = engine.add("low", 13, 10, priority=2)
    assert engine.step().tokens == {"high": 30, "low": 13}
    assert engine.step().tokens == {"high": 1}
    assert (low.state, low.degraded, engine.core.pool.num_owned) == (State.ON_CPU, ["run_on_cpu"], 8)
    assert engine.core.next_wake_fs(engine.now_fs) == (1 + 9 * 2) * FS_PER_S
    for _ in range(5):
        assert engine.step().tokens == {"high": 1}
    assert engine.now_fs == 7 * FS_PER_S
    assert engine.step().tokens == {"high": 1}
    assert high.outcome is Outcome.FINISHED
    assert engine.step().tokens == {"low": 1}
    assert low.num_output_tokens == 1 + 3 + 1
    engine.run()
    assert (low.outcome, low.num_output_tokens, low.num_preemptions) == (Outcome.FINISHED, 10, 0)
    assert high.degraded == []
    assert engine.core.cpu_tokens == 3
    assert [entry["to_cpu"] for entry in engine.log if "to_cpu" in entry] == [["low"]]
    assert engine.ladder_log() == [(1, "run_on_cpu", "on"), (8, "run_on_cpu", "off")]


def test_who_has_all_tokens_on_the_cpu_has_finished_there_and_who_leaves_is_gone():
    rung = Rung(action="run_on_cpu", on=0.5, off=0.0, hold_s=0.0, value=0.3)
    engine = LadderedEngine(rung, cpu=CpuExecutor(token_s=1.5), num_cpu_blocks=20)
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
        engine = LadderedEngine(rung, cpu=CpuExecutor(token_s=9.0, max_num_seqs=1), num_cpu_blocks=blocks)
        engine.add("high", 13, 10, priority=0)
        requests = [engine.add("low", 13, 10, priority=1), engine.add("lower", 13, 10, priority=2)]
        engine.step()
        engine.step()
        assert [request.request_id for request in requests if request.state is State.ON_CPU] == moved
        engine.run()


def test_offload_cache_saves_all_that_nobody_holds():
    """Write-back keeps only what is next to be evicted saved, which here are blocks never used; the rung saves the 2 cached ones."""
    rung = Rung(action="offload_cache", on=0.2, off=0.1)
    engine = LadderedEngine(rung, num_cpu_prefix_blocks=10, cpu_prefix_mode="write_back")
    engine.add("first", 8, 1, content_ids=("a", "b"), content_block_tokens=4)
    engine.step()
    engine.add("second", 17, 4)
    assert engine.step().tokens == {"second": 17}
    assert engine.log[-1].get("saved") is None
    engine.step()
    assert engine.log[-1]["saved"] == [[(2, 1), (1, 2)]]


def test_the_workspace_signal_is_what_the_latest_step_needed_and_must_be_known():
    rung = Rung(action="shrink_step", signal="workspace", on=0.8, off=0.5, hold_s=0.0, value=0.25)
    engine = LadderedEngine(rung)
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
    unknown = LadderedEngine(rung)
    unknown.add("x", 4)
    with pytest.raises(ConfigError, match="does not say what its steps need"):
        unknown.step()


def test_truncate_keeps_the_first_block_and_a_window_and_says_so():
    """40 tokens in 10 blocks, keep 8: blocks 1 to 7 (of 0 to 9) go, 0 is the sink, 8 and 9 the window."""
    engine = LadderedEngine(Rung(action="truncate", on=0.5, off=0.1, value=8))
    low = engine.add("low", 40, 10, priority=1)
    engine.step()
    engine.step()
    assert low.table.blocks[1:8] == [0] * 7
    assert all(low.table.blocks[index] for index in (0, 8, 9, 10))
    assert low.degraded == ["truncate"]
    assert engine.core.pool.num_owned == 4
    engine.run()
    assert low.num_output_tokens == 10


def test_who_goes_on_as_a_copy_of_a_truncated_sequence_says_so_too():
    """One slot: r#0 computes the prompt, r#1 waits with its first token. In step 1 the context of r#0 is cut, and from step 2 on r#1 is
    made of what r#0 said then, though no block of its own was ever taken away."""
    engine = LadderedEngine(Rung(action="truncate", on=0.5, off=0.1, value=8), max_num_seqs=1)
    spec = RequestSpec(
        request_id="r",
        arrival_s=0.0,
        input_tokens=40,
        output_tokens=9,
        priority=1,
        n=2,
        forking=Forking(width=2, change=0.5),
    )
    first, second = (engine.core.add(each, engine.now_fs).request for each in samples(spec))
    for step in range(3):
        plan = engine.core.plan(engine.now_fs, 1)
        engine.now_fs += FS_PER_S
        chosen = {"r#1": "r#0"} if step == 2 else {}
        engine.core.commit(plan, StepResult(durations=Durations.one(FS_PER_S), forked=chosen), engine.now_fs)
        assert first.degraded == ([] if step == 0 else ["truncate"])
        assert second.degraded == ([] if step < 2 else ["truncate"])
    assert second.num_output_tokens == 3


def test_shed_sends_the_unimportant_away_with_the_numbers_and_a_time_to_come_back():
    """One sequence at a time, 5 steps each. After two have left, the one that has waited 11 s is sent away; the important waits on."""
    engine = LadderedEngine(Rung(action="shed", signal="queue_s", on=11.0, off=11.0, hold_s=0.0), max_num_seqs=1)
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
