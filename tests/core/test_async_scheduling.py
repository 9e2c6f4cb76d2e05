"""Asynchronous scheduling: what each step's plan knows, by hand first. A step takes a second; blocks hold 4 tokens."""

from __future__ import annotations

import json

import sim
from experiments.cli import main
from sim.core.clock import FS_PER_S
from sim.core.policies import shortest_predicted_queue
from sim.core.policy import Policy
from sim.core.request import Outcome
from sim.costs.constant import FixedCost
from sim.world import run_world
from tests.support.roomy import TICK_S, request
from tests.support.roomy import engine as roomy_engine

SECOND = FS_PER_S


def test_three_requests_step_by_step(drive):
    """4 blocks, 2 sequences. A: 4 + 3 tokens, capped at 3. B: 4 + 2, ended by a stop token. C: 8 + 2, capped at 2, waits for a slot.

    step 0  A and B compute their prompts, one block each. Nothing was under way, so all three were seen.
    step 1  A and B compute token 5, in a second block each. B's stop token comes at its end: B's client has it at 2 s.
    step 2  was planned without knowing: A computes token 6, B a token that is dropped; C waits, 2 slots are taken.
            A gets its third token, which was sure to be its last. B is known to have ended: its blocks 2 and 4 return, tail first.
    step 3  A computes nothing, and keeps blocks 1 and 3 and a slot. C starts in 4 and 2. A's blocks return.
    step 4  C computes token 9, in block 3. It was sure to be its last.
    """
    engine = drive(num_gpu_blocks=4, block_size=4, max_num_seqs=2, async_scheduling=True)
    a = engine.add("A", 4, output_tokens=3, max_tokens=3)
    b = engine.add("B", 4, output_tokens=2)
    c = engine.add("C", 8, output_tokens=2, max_tokens=2)
    steps = engine.run()
    assert [step.tokens for step in steps] == [{"A": 4, "B": 4}, {"A": 1, "B": 1}, {"A": 1, "B": 1}, {"C": 8}, {"C": 1}]
    assert [step.tables for step in steps] == [
        {"A": (1,), "B": (2,)},
        {"A": (1, 3), "B": (2, 4)},
        {"A": (1, 3), "B": (2, 4)},
        {"C": (4, 2)},
        {"C": (4, 2, 3)},
    ]
    assert [entry["released"] for entry in engine.log] == [[], [], [], [("B", [2, 4])], [("A", [1, 3])]]
    assert [entry["admitted"] for entry in engine.log] == [["A", "B"], [], [], ["C"], []]
    assert [request.ended_fs for request in (a, b, c)] == [3 * SECOND, 2 * SECOND, 5 * SECOND]
    assert [request.num_output_tokens for request in (a, b, c)] == [3, 2, 2]
    assert [request.finish_reason for request in (a, b, c)] == ["length", "stop", "length"]
    assert engine.core.discarded_tokens == 1
    assert (engine.pool.num_free, engine.core.num_running) == (4, 0)


def test_the_same_requests_without_it(drive):
    """C starts a step sooner: B's end is known, and its blocks are free, when step 2 is planned. Nothing is computed in vain."""
    engine = drive(num_gpu_blocks=4, block_size=4, max_num_seqs=2)
    engine.add("A", 4, output_tokens=3, max_tokens=3)
    engine.add("B", 4, output_tokens=2)
    engine.add("C", 8, output_tokens=2, max_tokens=2)
    assert [step.tokens for step in engine.run()] == [
        {"A": 4, "B": 4},
        {"A": 1, "B": 1},
        {"A": 1, "C": 8},
        {"C": 1},
    ]
    assert engine.core.discarded_tokens == 0


def test_an_arrival_during_a_step_is_in_the_plan_after_the_next(drive):
    engine = drive(num_gpu_blocks=40, block_size=4, async_scheduling=True)
    engine.add("running", 4, output_tokens=9)
    engine.step()
    plan = engine.plan(max_repeat=1)  # step 1
    engine.now_fs += SECOND // 2
    engine.add("new", 4, output_tokens=2)
    assert engine.core.num_waiting == 1
    engine.commit(plan)
    assert engine.step().tokens == {"running": 1}  # step 2 was planned before it came
    assert engine.step().tokens == {"running": 1, "new": 4}


def test_an_arrival_at_an_idle_engine_starts_at_once(drive):
    engine = drive(num_gpu_blocks=40, block_size=4, async_scheduling=True)
    engine.add("first", 4)
    engine.run()
    engine.now_fs += 7 * SECOND
    engine.add("second", 4)
    assert engine.step().tokens == {"second": 4}


def test_an_arrival_during_the_last_step_starts_right_after_it(drive):
    """What is planned during step 0 is nothing, since its only request is sure to end; so the engine waits, and then knows all."""
    engine = drive(num_gpu_blocks=40, block_size=4, async_scheduling=True)
    engine.add("first", 4, output_tokens=1, max_tokens=1)
    plan = engine.plan()
    engine.now_fs += SECOND // 2
    engine.add("second", 4)
    engine.commit(plan)
    step = engine.step()
    assert step.tokens == {"second": 4}
    assert step.plan.shape.after_pause


def test_a_request_that_leaves_while_it_runs_is_computed_once_more(drive):
    """It leaves during step 1, whose token it never sees; step 2 was planned with it."""
    engine = drive(num_gpu_blocks=40, block_size=4, async_scheduling=True)
    engine.add("stays", 4, output_tokens=9)
    leaves = engine.add("leaves", 4, output_tokens=9)
    engine.step()
    plan = engine.plan(max_repeat=1)
    engine.now_fs += SECOND // 2
    assert engine.abort("leaves")
    engine.commit(plan)
    assert [ended.request_id for ended in engine.ended] == ["leaves"]
    assert engine.step().tokens == {"stays": 1, "leaves": 1}
    assert engine.step().tokens == {"stays": 1}
    assert (leaves.outcome, leaves.num_output_tokens, leaves.ended_fs) == (Outcome.ABORTED, 1, 3 * SECOND // 2)
    assert engine.core.discarded_tokens == 1
    assert not engine.abort("leaves")


def test_a_request_that_leaves_while_it_waits_may_be_started_in_vain(drive):
    """It waits for a slot, which is free for step 2; it leaves during step 1, when step 2 has been planned with it."""
    engine = drive(num_gpu_blocks=40, block_size=4, max_num_seqs=2, async_scheduling=True)
    engine.add("stays", 4, output_tokens=9)
    engine.add("short", 4, output_tokens=1, max_tokens=1)
    leaves = engine.add("leaves", 6, output_tokens=9)
    engine.step()
    plan = engine.plan(max_repeat=1)
    engine.now_fs += SECOND // 2
    assert engine.abort("leaves")
    engine.commit(plan)
    assert engine.step().tokens == {"stays": 1, "leaves": 6}
    assert engine.step().tokens == {"stays": 1}
    assert (leaves.outcome, leaves.scheduled_fs, leaves.num_output_tokens) == (Outcome.ABORTED, None, 0)
    assert engine.core.discarded_tokens == 6


def test_a_request_that_comes_and_leaves_during_one_step_is_never_seen(drive):
    engine = drive(num_gpu_blocks=40, block_size=4, async_scheduling=True)
    engine.add("stays", 4, output_tokens=5)
    plan = engine.plan()
    engine.now_fs += SECOND // 2
    engine.add("brief", 4)
    assert engine.abort("brief")
    assert engine.core.num_waiting == 0
    engine.commit(plan)
    assert {name for step in engine.run() for name in step.tokens} == {"stays"}


def test_nobody_gives_way_for_blocks_that_come_back_with_the_step_under_way(drive):
    """3 blocks. In step 1 the length of "ends" is reached; "needs" lacks a block in step 2, and it comes with the end of step 2
    (vLLM #49675 preempted, again and again). It waits one step and loses nothing."""
    engine = drive(num_gpu_blocks=3, block_size=4, async_scheduling=True)
    engine.add("ends", 5, output_tokens=2, max_tokens=2)
    needs = engine.add("needs", 3, output_tokens=6, max_tokens=6)
    assert engine.step().tokens == {"ends": 5, "needs": 3}
    assert engine.step().tokens == {"ends": 1, "needs": 1}
    step = engine.step()
    assert step.tokens == {"needs": 1}
    assert step.plan.preempted == ()
    engine.run()
    assert (needs.outcome, needs.num_preemptions) == (Outcome.FINISHED, 0)
    assert engine.core.discarded_tokens == 0


def test_a_prediction_is_made_when_an_arrival_is_queued_however_far_the_engine_leaps():
    """One slot. "first" decodes; its output of 12 tokens will be all that is known of outputs. "long" (cap 30) and "short" (cap 20) come
    meanwhile, when nothing is known, and stand by their caps. Judged when "first" had ended both would be predicted 12, "long" first.
    """
    config = roomy_engine(max_num_seqs=1, async_scheduling=True)
    requests = (
        request("first", 0.0, 4, 12, max_tokens=12),
        request("long", 3 * TICK_S, 4, 14, max_tokens=30),
        request("short", 4 * TICK_S, 4, 12, max_tokens=20),
    )
    for stepping in (True, False):
        record = run_world(
            config, FixedCost(TICK_S), requests, policy=Policy(queue=shortest_predicted_queue), stepping=stepping
        )
        started = sorted(record.requests, key=lambda each: each.scheduled_fs)
        assert [each.request_id for each in started] == ["first", "short", "long"], stepping


def test_late_output_of_a_request_that_stopped_is_ignored(drive):
    """The executor reports the stop of step 1, and for step 2, computed in vain, another one."""
    engine = drive(num_gpu_blocks=40, block_size=4, async_scheduling=True)
    stops = engine.add("stops", 4, output_tokens=50)
    engine.add("other", 4, output_tokens=5)
    engine.step()
    engine.commit(engine.plan(max_repeat=1), stopped=("stops",))
    engine.commit(engine.plan(max_repeat=1), stopped=("stops",))
    engine.run()
    assert (stops.outcome, stops.num_output_tokens, stops.finish_reason) == (Outcome.FINISHED, 2, "stop")
    assert [ended.request_id for ended in engine.ended].count("stops") == 1
    assert engine.core.discarded_tokens == 2  # "other" ended by a stop token too
    assert engine.pool.num_free == 40


# -- in a scenario ---------------------------------------------------------------------------------------------------------

SMALL = sim.Scenario(
    model="qwen3-0.6b",
    gpu="h100-sxm-80gb",
    workload={
        "workload": "uniform",
        "input_tokens": [8, 60],
        "output_tokens": [20, 60],
        "num_requests": 60,
        "rate": 200.0,
    }
    | {"ignore_eos": False},
    engine={"num_gpu_blocks_override": 200, "max_num_seqs": 16, "max_num_batched_tokens": 512},
)


def test_a_small_model_whose_steps_the_host_sets_is_served_faster():
    """Host and device alternate without it, and overlap with it; what is computed in vain is far less than that gains."""
    without, ahead = sim.simulate(SMALL).summary, sim.simulate(SMALL, async_scheduling=True).summary
    assert (without["finished"], ahead["finished"]) == (60, 60)
    assert without["discarded_tokens"] == 0
    assert 0 < ahead["discarded_tokens"] <= 60  # at most one a request
    assert ahead["tpot_s"]["mean"] < without["tpot_s"]["mean"]
    assert any("asynchronous scheduling: the host's" in sentence for sentence in ahead["warnings"])


def test_requests_that_end_at_their_cap_waste_nothing():
    summary = sim.simulate(SMALL, async_scheduling=True, ignore_eos=True, check=True).summary
    assert summary["finish_reason"] == {"length": 60}
    assert summary["discarded_tokens"] == 0


def test_the_flag_goes_both_ways_as_in_vllm(tmp_path, capsys):
    file = tmp_path / "ahead.toml"
    file.write_text(
        '[model]\nmodel = "qwen3-0.6b"\n[gpu]\ngpu = "h100-sxm-80gb"\n[engine]\nasync_scheduling = true\n[workload]\n'
        'workload = "uniform"\ninput_tokens = 8\noutput_tokens = 5\nnum_requests = 20\nignore_eos = false\n'
    )

    def run(*flags):
        assert main(["run", str(file), "--json", *flags]) == 0
        return json.loads(capsys.readouterr().out)

    ahead, without = run(), run("--no-async-scheduling")
    assert ahead["scenario"]["engine"]["async_scheduling"] is True
    assert without["scenario"]["engine"]["async_scheduling"] is False
    assert ahead["discarded_tokens"] == 20
    assert without["discarded_tokens"] == 0
