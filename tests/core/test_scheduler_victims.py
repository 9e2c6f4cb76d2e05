"""Who gives way when blocks are short, what a victim comes back with, and what the step it was in still computes.

Source: vLLM V1, engine-policies §1.1.2 to §1.1.5.
"""

from __future__ import annotations

from sim.core.request import Outcome
from tests.support.engine_driver import content, tokens_of


def test_the_victim_is_the_last_admitted_and_goes_before_newer_arrivals(drive):
    """4 blocks: A, B, C hold 1 each, D waits (max 3 sequences). A, B and C each need a second block; 1 is free, so C gives up its
    own. It comes back before D, and the queue starts in the order of arrival."""
    engine = drive(num_gpu_blocks=4, block_size=4, max_num_seqs=3)
    for name in "ABCD":
        engine.add(name, 4, output_tokens=3)
    assert engine.step().tokens == {"A": 4, "B": 4, "C": 4}
    step = engine.step()
    assert (step.tokens, step.plan.preempted) == ({"A": 1, "B": 1}, ("C",))
    assert step.plan.admitted == ()  # nobody is admitted in a step in which somebody gave way
    assert [request_id for step in engine.run() for request_id in step.plan.admitted] == ["C", "D"]


def test_a_victim_restarts_with_everything_it_knew(drive):
    """3 blocks, A and B hold 1 each. In the first decode step A takes the third; B, the last admitted, gives up its own and needs 2
    to come back: it waits for A's end. Then it computes its 5 known tokens, 4 of them for the second time, and goes on."""
    engine = drive(num_gpu_blocks=3, block_size=4, enable_prefix_caching=False)
    engine.add("A", 4, output_tokens=5)
    b = engine.add("B", 4, output_tokens=5)
    assert tokens_of(engine.run()) == [
        {"A": 4, "B": 4},
        *[{"A": 1}] * 4,
        {"B": 5},
        *[{"B": 1}] * 3,
    ]
    assert (b.outcome, b.num_output_tokens) == (Outcome.FINISHED, 5)
    assert (b.num_preemptions, b.recomputed_tokens) == (1, 4)


def test_what_a_victim_had_computed_is_found_again_by_itself_only(drive):
    """The same with a prefix cache: B finds its own full block, of content that nothing names, and computes 1 token instead of 5.
    C, of the same length and as nameless, finds nothing."""
    engine = drive(num_gpu_blocks=3, block_size=4)
    engine.add("A", 4, output_tokens=5)
    b = engine.add("B", 4, output_tokens=5)
    engine.add("C", 5)
    steps = engine.run()
    assert tokens_of(steps) == [{"A": 4, "B": 4}, *[{"A": 1}] * 4, {"B": 1}, *[{"B": 1}] * 3, {"C": 5}]
    assert b.recomputed_tokens == 0


def test_with_priorities_the_victim_is_the_least_important_and_of_equals_the_latest(drive):
    """6 blocks of 4, 1 each for five requests; the second block of the most important takes the last one, the next needs a victim."""
    engine = drive(num_gpu_blocks=6, block_size=4, scheduling_policy="priority")
    for name, priority in [("mid", 5), ("low early", 7), ("top", 0), ("low late", 7), ("mid late", 5)]:
        engine.add(name, 4, output_tokens=3, priority=priority)
    step = engine.step()
    assert list(step.tokens) == ["top", "mid", "mid late", "low early", "low late"]
    step = engine.step()
    # top takes the free block, mid that of "low late", mid late that of "low early"
    assert step.tokens == {"top": 1, "mid": 1, "mid late": 1}
    assert step.plan.preempted == ("low late", "low early")
    assert [name for step in engine.run() for name in step.plan.admitted] == ["low early", "low late"]


def test_nobody_is_admitted_in_a_step_in_which_somebody_had_to_give_way(drive):
    """3 blocks of 4, at most 2 sequences. "worst" holds 2 blocks and loses them to "top", which needs 1: a sequence and a block are
    left over, and "small" is at the head of the queue. It starts in the next step."""
    engine = drive(num_gpu_blocks=3, block_size=4, max_num_seqs=2, scheduling_policy="priority")
    engine.add("worst", 6, output_tokens=4, priority=9)
    engine.step()
    engine.add("top", 4, output_tokens=4, priority=0)
    engine.step()
    engine.add("small", 2, priority=5)
    step = engine.step()
    assert (step.tokens, step.plan.preempted) == ({"top": 1}, ("worst",))
    assert engine.step().tokens == {"top": 1, "small": 2}


def test_an_important_arrival_goes_first_in_the_queue_and_takes_nothing_from_who_runs(drive):
    engine = drive(num_gpu_blocks=10, block_size=4, scheduling_policy="priority", max_num_seqs=1)
    running = engine.add("running", 4, output_tokens=3, priority=9)
    engine.step()
    engine.add("low", 4, priority=5)
    engine.add("top", 4, priority=0)
    engine.add("low too", 4, priority=5)
    steps = engine.run()
    assert tokens_of(steps) == [{"running": 1}, {"running": 1}, {"top": 4}, {"low": 4}, {"low too": 4}]
    assert running.num_preemptions == 0


def test_a_victim_that_already_had_its_share_of_the_step_is_taken_out_of_it(drive):
    """3 blocks of 4. "victim" (least important, admitted first) holds 2 and has room for its 8th token, so it is served first; "top"
    then needs a block: the victim's share is undone. The step computes 1 token, the victim gets none and loses both blocks,
    of which "top" takes the tail (block 2)."""
    engine = drive(num_gpu_blocks=3, block_size=4, scheduling_policy="priority")
    victim = engine.add("victim", 6, output_tokens=4, priority=9)
    engine.step()
    engine.add("top", 4, output_tokens=4, priority=0)
    assert engine.step().tokens == {"victim": 1, "top": 4}
    assert victim.table.blocks == [1, 2]

    plan = engine.plan()
    assert plan.shape.num_tokens == plan.shape.decode_seqs == 1
    assert [(share.request_id, share.block_table) for share in plan.scheduled(0)] == [("top", (3, 2))]
    assert plan.preempted == ("victim",)
    assert engine.log[-1]["scheduled"] == [("top", 1, [2])]
    assert engine.log[-1]["released"] == [("victim", [1, 2])]
    assert (engine.pool.num_owned, engine.pool.num_free) == (2, 1)
    engine.commit(plan)
    assert victim.num_output_tokens == 2
    engine.run()
    assert (victim.outcome, victim.num_output_tokens) == (Outcome.FINISHED, 4)
    assert engine.pool.num_free == 3


def start_of_a_roll_back(drive, num_gpu_blocks):
    """Budget 8, blocks of 4: "victim" (least important) computes 22 tokens and then decodes; 2 more tokens fit its 6th block."""
    engine = drive(
        num_gpu_blocks=num_gpu_blocks,
        block_size=4,
        max_num_batched_tokens=8,
        scheduling_policy="priority",
        reserve_full_prompt=False,
    )
    engine.add("victim", 22, output_tokens=10, priority=9)
    assert [engine.step().tokens["victim"] for _ in range(3)] == [8, 8, 6]
    return engine


def test_the_tokens_of_a_victim_taken_out_of_the_step_return_to_the_budget(drive):
    """8 blocks: the victim's 6, "top" 1, "prompt" 1. The victim is served (1 of 8 tokens), "top" needs a block, the victim goes. "top"
    has 1 token and "prompt" the other 7 of the budget, not 6."""
    engine = start_of_a_roll_back(drive, 8)
    engine.add("top", 4, output_tokens=4)
    engine.add("prompt", 30)
    assert engine.step().tokens == {"victim": 1, "top": 4, "prompt": 3}
    step = engine.step()
    assert step.plan.preempted == ("victim",)
    assert step.tokens == {"top": 1, "prompt": 7}


def test_what_a_request_asks_for_is_settled_before_victims_are_looked_for(drive):
    """8 blocks: the victim's 6, "prompt" 2 for 7 tokens. The victim is served (1 token), so "prompt" asks for the other 7; it needs a
    block, the victim goes, and the request for 7 tokens is tried again. (vLLM clamps by the budget, then allocates in a loop:
    §1.1.2, 1a to 1c. The token that came back is for whoever comes next.)"""
    engine = start_of_a_roll_back(drive, 8)
    engine.add("prompt", 30)
    assert engine.step().tokens == {"victim": 1, "prompt": 7}
    step = engine.step()
    assert step.plan.preempted == ("victim",)
    assert step.tokens == {"prompt": 7}


def test_what_a_victim_was_going_to_compute_in_the_step_cannot_be_found(drive):
    """Blocks that will be full after a step can be found at once, and must be forgotten if the step does not compute them.

    Window of 1000 tokens, so that every share is an ordinary one; blocks of 2, budget 16, 12 blocks. "victim" names its tokens, output
    included: in step 2 its 6th token fills block 3 of its table. "other" takes the last free block. "prompt" then needs 5 more
    blocks; the victim's 3 are not enough, so it gives way too. "visitor" brings the victim's 7 tokens: 4 of them were computed
    in full blocks, the 6th never was.
    """
    engine = drive(
        num_gpu_blocks=12,
        block_size=2,
        max_num_batched_tokens=16,
        sliding_window=1000,
        scheduling_policy="priority",
        reserve_full_prompt=False,
    )
    named = content(*range(7), tokens=1)
    victim = engine.add("victim", 4, output_tokens=10, priority=9, **named)
    engine.step()
    engine.add("other", 2, output_tokens=20, priority=0)
    engine.add("prompt", 24, priority=5)
    assert engine.step().tokens == {"victim": 1, "other": 2, "prompt": 13}
    third_block = victim.table.blocks[2]

    plan = engine.plan()
    assert plan.preempted == ("victim", "prompt")
    assert [share.request_id for share in plan.scheduled(0)] == ["other"]
    assert engine.pool.ref_cnt(third_block) == 0
    assert third_block not in engine.pool.index
    engine.commit(plan)
    visitor = engine.add("visitor", 7, priority=-1, **named)
    assert engine.step().tokens["visitor"] == 7 - 4
    assert visitor.prefix_hit_tokens == 4
