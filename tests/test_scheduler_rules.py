"""What the scheduler promises, rule by rule. Source of the rules: vLLM V1, engine-policies §1.1.2 to §1.1.5."""

from __future__ import annotations

import pytest

from sim.core.config import ConfigError, EngineConfig
from sim.core.need import skipped_blocks
from sim.core.request import Namespace, Outcome, RequestSpec


def content(*names, tokens):
    """A prompt whose content is named, `tokens` a name."""
    return {"content_ids": names, "content_block_tokens": tokens}


def tokens_of(steps):
    return [step.tokens for step in steps]


# -- order and budgets ------------------------------------------------------------------------------------------------------


def test_running_requests_come_first_and_a_waiting_prompt_gets_what_is_left(drive):
    """Budget 8: one decode token, then 7 of the prompt's 20; the running pass comes before the waiting pass in every step."""
    engine = drive(num_gpu_blocks=50, block_size=4, max_num_batched_tokens=8)
    engine.add("old", 8, output_tokens=5)
    assert engine.step().tokens == {"old": 8}
    engine.add("new", 20, output_tokens=2)
    assert tokens_of(engine.run()) == [
        {"old": 1, "new": 7},
        {"old": 1, "new": 7},
        {"old": 1, "new": 6},
        {"old": 1, "new": 1},
    ]


def test_a_prompt_under_way_is_finished_before_another_is_started(drive):
    """Budget 8, prompts of 12 and 12: 8 | 4 + 4 | 8."""
    engine = drive(num_gpu_blocks=50, block_size=4, max_num_batched_tokens=8)
    engine.add("A", 12)
    engine.add("B", 12)
    assert tokens_of(engine.run()) == [{"A": 8}, {"A": 4, "B": 4}, {"B": 8}]


def test_only_the_chunk_that_ends_a_prompt_samples(drive):
    engine = drive(num_gpu_blocks=50, block_size=4, max_num_batched_tokens=8)
    request = engine.add("A", 20)
    samples, first_tokens = [], []
    while (plan := engine.plan()) is not None:
        samples.append(plan.scheduled(0)[0].samples)
        assert plan.shape.sampled_seqs == samples[-1]
        engine.commit(plan)
        first_tokens.append(request.num_output_tokens)
    assert samples == [False, False, True]
    assert first_tokens == [0, 0, 1]


@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 16, 23])
@pytest.mark.parametrize("output", [1, 2, 9])
def test_every_token_but_the_last_is_computed_exactly_once(drive, prompt, output):
    """Without pressure a request computes prompt + output - 1 tokens: the last sampled token is never fed back."""
    engine = drive(num_gpu_blocks=20, block_size=4, max_num_batched_tokens=8)
    request = engine.add("A", prompt, output_tokens=output)
    assert sum(step.tokens["A"] for step in engine.run()) == prompt + output - 1
    assert request.num_output_tokens == output
    assert request.peak_blocks == -(-(prompt + output - 1) // 4)


def test_the_head_of_the_queue_is_not_overtaken_when_blocks_are_short(drive):
    """6 blocks, 4 in use. The head needs 3; a request of 1 block behind it would fit, and waits."""
    engine = drive(num_gpu_blocks=6, block_size=4)
    engine.add("running", 13, output_tokens=3)
    engine.step()
    engine.add("head", 12)
    engine.add("small", 4)
    assert tokens_of(engine.run()) == [{"running": 1}, {"running": 1}, {"head": 12, "small": 4}]


def test_the_head_of_the_queue_is_not_overtaken_when_tokens_are_short(drive):
    """Without chunked prefill a prompt needs its whole length of the budget; of 32, 12 are left: neither the head's 16 tokens nor,
    behind it, 4 are started."""
    engine = drive(
        num_gpu_blocks=50, block_size=4, max_num_batched_tokens=32, max_model_len=32, enable_chunked_prefill=False
    )
    engine.add("first", 20)
    engine.add("head", 16)
    engine.add("small", 4)
    assert tokens_of(engine.run()) == [{"first": 20}, {"head": 16, "small": 4}]


def test_with_chunked_prefill_the_head_takes_what_is_left(drive):
    """The same three prompts with it: 20 + 12 of 16, then the last 4 and the 4 behind."""
    engine = drive(num_gpu_blocks=50, block_size=4, max_num_batched_tokens=32, max_model_len=32)
    engine.add("first", 20)
    engine.add("head", 16)
    engine.add("small", 4)
    assert tokens_of(engine.run()) == [{"first": 20, "head": 12}, {"head": 4, "small": 4}]


def test_without_chunked_prefill_a_prompt_longer_than_a_step_is_a_contradiction():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(64\) must be at least max_model_len \(65\)"):
        EngineConfig(
            num_gpu_blocks=10,
            max_num_batched_tokens=64,
            max_num_seqs=4,
            max_model_len=65,
            enable_chunked_prefill=False,
        )


def test_no_more_than_max_num_seqs_run(drive):
    """2 of 3 start; the third starts in the step after the first is done."""
    engine = drive(num_gpu_blocks=50, block_size=4, max_num_seqs=2)
    engine.add("A", 4, output_tokens=2)
    engine.add("B", 4, output_tokens=4)
    engine.add("C", 4)
    assert tokens_of(engine.run()) == [{"A": 4, "B": 4}, {"A": 1, "B": 1}, {"B": 1, "C": 4}, {"B": 1}]


@pytest.mark.parametrize(("prompt", "starts"), [(16, True), (17, False)])
def test_the_last_free_block_can_be_had(drive, prompt, starts):
    """8 blocks, 4 in use, 4 free: 16 tokens start, 17 do not."""
    engine = drive(num_gpu_blocks=8, block_size=4)
    engine.add("running", 13, output_tokens=2)
    engine.step()
    engine.add("new", prompt)
    assert ("new" in engine.step().tokens) is starts


@pytest.mark.parametrize(("reserve_full_prompt", "chunks"), [(True, [0, 0, 8, 8, 4]), (False, [7, 7, 6])])
def test_the_full_prompt_gate_asks_for_all_of_a_prompt_not_for_its_first_chunk(drive, reserve_full_prompt, chunks):
    """Budget 8, 6 blocks of 4, 2 in use: of a 20-token prompt (5 blocks) the chunks 7, 14 and 20 need 2, 4 and 5 blocks. The running
    request ends in the second step, so the third chunk finds room; the gate waits for that from the start."""
    engine = drive(num_gpu_blocks=6, block_size=4, max_num_batched_tokens=8, reserve_full_prompt=reserve_full_prompt)
    engine.add("running", 5, output_tokens=3)
    engine.step()
    engine.add("long", 20)
    assert [step.tokens.get("long", 0) for step in engine.run()] == chunks


@pytest.mark.parametrize(("prompt", "starts"), [(16, True), (17, False)])
def test_the_watermark_stays_free_for_running_requests(drive, prompt, starts):
    """20 blocks, watermark 0.25: 5 stay free. 11 in use, 9 free: a prompt of 4 blocks starts, one of 5 does not."""
    engine = drive(num_gpu_blocks=20, block_size=4, watermark=0.25)
    engine.add("running", 41, output_tokens=2)
    engine.step()
    engine.add("new", prompt)
    assert ("new" in engine.step().tokens) is starts


def test_the_watermark_is_waived_when_nothing_runs(drive):
    """20 blocks, watermark 0.25: the first prompt may have all 20; the second, no longer alone, waits until the first is done."""
    engine = drive(num_gpu_blocks=20, block_size=4, watermark=0.25)
    engine.add("whole pool", 80)
    engine.add("next", 4)
    assert tokens_of(engine.run()) == [{"whole pool": 80}, {"next": 4}]


def test_the_watermark_does_not_hold_running_requests_back(drive):
    """5 blocks, watermark 0.8: a request of 1 block grows to all 5."""
    engine = drive(num_gpu_blocks=5, block_size=4, watermark=0.8)
    request = engine.add("A", 4, output_tokens=17)
    engine.run()
    assert (request.outcome, request.peak_blocks, request.num_preemptions) == (Outcome.FINISHED, 5, 0)


def test_a_free_engine_has_nothing_to_plan(drive):
    engine = drive(num_gpu_blocks=5, block_size=4)
    assert engine.plan() is None
    engine.add("A", 4)
    engine.run()
    assert engine.plan() is None
    assert engine.core.steps == 1


# -- victims ----------------------------------------------------------------------------------------------------------------


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


# -- what can never be served -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("input_tokens", "max_tokens", "code", "numbers"),
    [
        (30, 11, "exceeds_max_model_len", "30 prompt + 11 output tokens = 41, but max_model_len is 40 tokens"),
        (40, None, "exceeds_max_model_len", "40 prompt + 1 output tokens = 41, but max_model_len is 40 tokens"),
        (
            30,
            4,
            "exceeds_kv_pool",
            "30 prompt + 4 output tokens need 9 KV blocks of 4 tokens, but the whole pool has 8 (32 tokens)",
        ),
        (
            33,
            None,
            "exceeds_kv_pool",
            "33 prompt + 1 output tokens need 9 KV blocks of 4 tokens, but the whole pool has 8 (32 tokens)",
        ),
    ],
)
def test_what_can_never_be_served_is_rejected_at_arrival_with_the_numbers(
    drive, input_tokens, max_tokens, code, numbers
):
    engine = drive(num_gpu_blocks=8, block_size=4, max_model_len=40)
    request = engine.add("never", input_tokens, output_tokens=20, max_tokens=max_tokens)
    assert request.outcome is Outcome.REJECTED
    assert (request.finish_reason, request.reason, request.retry_after_s) == (code, numbers, None)
    assert request.ended_fs == request.arrival_fs == 0
    assert engine.core.num_unfinished == 0
    engine.add("next", 4)
    engine.step()
    assert engine.log[0]["rejected"] == [("never", numbers)]


@pytest.mark.parametrize(("input_tokens", "max_tokens"), [(30, 3), (32, 1), (32, None), (1, 32)])
def test_what_just_fits_is_served(drive, input_tokens, max_tokens):
    """8 blocks of 4: prompt + output - 1 = 32 tokens are kept."""
    engine = drive(num_gpu_blocks=8, block_size=4, max_model_len=40)
    request = engine.add("fits", input_tokens, output_tokens=max_tokens or 1, max_tokens=max_tokens)
    engine.run()
    assert (request.outcome, request.peak_blocks) == (Outcome.FINISHED, 8)


def test_a_request_without_a_cap_ends_at_the_longest_sequence(drive):
    """max_model_len 40, prompt 30: 10 tokens, and the reason is length."""
    engine = drive(num_gpu_blocks=20, block_size=4, max_model_len=40)
    request = engine.add("long", 30, output_tokens=500)
    engine.run()
    assert (request.outcome, request.num_output_tokens, request.finish_reason) == (Outcome.FINISHED, 10, "length")


def test_a_request_that_outgrows_the_pool_fails_with_numbers_and_all_others_finish(drive):
    """10 blocks of 4. "endless" never stops; when it alone would need an 11th block, for its 41st token, it fails. Older requests are
    never touched; younger ones may have to wait or start again, and finish with every token they asked for."""
    engine = drive(num_gpu_blocks=10, block_size=4)
    older = engine.add("older", 4, output_tokens=12)
    endless = engine.add("endless", 8, output_tokens=1000)
    younger = [engine.add(f"younger {index}", 6, output_tokens=9) for index in range(5)]
    engine.run()
    assert endless.outcome is Outcome.FAILED
    assert endless.reason == "grew to 41 tokens, which need 11 KV blocks of a pool of 10"
    assert endless.num_output_tokens == 33  # 40 tokens are in the cache, the 41st is known
    assert (older.outcome, older.num_output_tokens, older.num_preemptions) == (Outcome.FINISHED, 12, 0)
    assert [(request.outcome, request.num_output_tokens) for request in younger] == [(Outcome.FINISHED, 9)] * 5
    assert engine.pool.num_free == 10


def test_blocks_of_a_request_that_fails_are_released_in_the_log(drive):
    engine = drive(num_gpu_blocks=2, block_size=4)
    engine.add("endless", 8, output_tokens=1000)
    engine.add("next", 4)
    engine.run()
    assert engine.log[1]["released"] == [("endless", [1, 2])]
    assert engine.log[1]["admitted"] == ["next"]
    assert engine.log[1]["preempted"] == []


# -- prefix cache -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_size", "length"), [(b, n) for b in (1, 4, 16) for n in (1, 3, 4, 5, 15, 16, 17, 32, 33)]
)
def test_a_hit_leaves_at_least_the_last_token_to_compute(drive, block_size, length):
    """A prompt seen before hits floor((L - 1) / block_size) blocks."""
    engine = drive(num_gpu_blocks=200, block_size=block_size)
    prompt = content(*range(length), tokens=1)
    engine.add("first", length, **prompt)
    engine.step()
    again = engine.add("again", length, **prompt)
    hit = (length - 1) // block_size * block_size
    assert engine.step().tokens == {"again": length - hit}
    assert again.prefix_hit_tokens == engine.core.prefix_hit_tokens == hit
    assert engine.core.prefix_queried_tokens == 2 * length


def test_a_hit_ends_where_the_contents_part(drive):
    """Contents of 8 tokens a name, blocks of 4: two prompts that share one name share 2 blocks, whatever follows."""
    engine = drive(num_gpu_blocks=50, block_size=4)
    engine.add("first", 24, **content("system", "a", "b", tokens=8))
    engine.step()
    parted = engine.add("parted", 24, **content("system", "x", "b", tokens=8))
    engine.step()
    assert parted.prefix_hit_tokens == 8


def test_a_request_shares_what_an_earlier_one_of_the_same_step_computes(drive):
    """Full blocks can be found as soon as the step that fills them is decided: both run after one another on the same device."""
    engine = drive(num_gpu_blocks=50, block_size=4)
    prompt = content("a", "b", "c", tokens=4)
    engine.add("first", 12, **prompt)
    engine.add("second", 12, **prompt)
    step = engine.step()
    assert step.tokens == {"first": 12, "second": 4}
    assert step.tables == {"first": (1, 2, 3), "second": (1, 2, 4)}


def test_a_chunk_makes_only_its_full_blocks_findable(drive):
    """Budget 10, blocks of 4: after a first chunk of 10 tokens, 2 blocks of the prompt are full."""
    engine = drive(num_gpu_blocks=50, block_size=4, max_num_batched_tokens=10)
    engine.add("first", 16, **content("a", "b", "c", "d", tokens=4))
    engine.step()
    engine.abort("first")
    second = engine.add("second", 16, **content("a", "b", "c", "d", tokens=4))
    assert engine.step().tokens == {"second": 8}
    assert second.prefix_hit_tokens == 8


def test_without_prefix_caching_nothing_is_found(drive):
    engine = drive(num_gpu_blocks=50, block_size=4, enable_prefix_caching=False)
    prompt = content("a", "b", "c", tokens=4)
    for name in ("first", "second"):
        engine.add(name, 12, **prompt)
        assert engine.step().tokens == {name: 12}
    assert engine.pool.num_cached == 0


def test_content_of_another_namespace_is_not_found(drive):
    engine = drive(num_gpu_blocks=50, block_size=4)
    prompt = content("a", "b", "c", tokens=4)
    engine.add("lora X", 12, namespace=Namespace(lora="X"), **prompt)
    engine.step()
    engine.add("salt X", 12, namespace=Namespace(salt="X"), **prompt)
    assert engine.step().tokens == {"salt X": 12}


def test_names_of_different_spans_name_different_content(drive):
    """A name that stands for 16 tokens and the same name standing for 4 are not the same tokens (I7)."""
    engine = drive(num_gpu_blocks=50, block_size=4)
    engine.add("coarse", 16, **content("a", tokens=16))
    engine.step()
    fine = engine.add("fine", 16, **content("a", "b", "c", "d", tokens=4))
    engine.step()
    assert fine.prefix_hit_tokens == 0


def test_what_a_request_finds_of_its_own_after_a_preemption_is_no_user_hit(drive):
    """3 blocks: B is preempted with one full block and finds it again. The users asked for 4 + 4 tokens and hit none of them."""
    engine = drive(num_gpu_blocks=3, block_size=4)
    engine.add("A", 4, output_tokens=5)
    b = engine.add("B", 4, output_tokens=5)
    restart = next(step for step in engine.run() if step.plan.step and "B" in step.plan.admitted)
    assert restart.tokens == {"B": 5 - 4}
    assert (b.num_preemptions, b.prefix_hit_tokens) == (1, 0)
    assert (engine.core.prefix_queried_tokens, engine.core.prefix_hit_tokens) == (8, 0)


@pytest.mark.parametrize(("names", "cached"), [((), 0), (("a",), 1), (("a", "b"), 2), (("a", "b", "c", "d"), 4)])
def test_after_its_end_only_what_others_may_share_of_a_request_is_cached(drive, names, cached):
    """Prompt 10, output 7, so 16 tokens in 4 blocks of 4. A name stands for 4 tokens; the third, were it the last, for 2 of the prompt;
    the fourth names output too. What has no name cannot be asked for by anybody else."""
    engine = drive(num_gpu_blocks=8, block_size=4)
    engine.add("A", 10, output_tokens=7, **content(*names, tokens=4))
    engine.run()
    assert engine.pool.num_cached == cached


def test_blocks_behind_a_fence_are_not_found(drive):
    """Somebody may still write into them. When the fence has passed they are found again."""
    engine = drive(num_gpu_blocks=50, block_size=4)
    prompt = content("a", "b", "c", tokens=4)
    engine.add("first", 12, output_tokens=2, **prompt)
    engine.step()
    release = engine.core.tables.release
    engine.core.tables.release = lambda table, by, **_: release(table, by, fence=7)
    engine.step()
    engine.core.tables.release = release
    assert engine.pool.num_quarantined == 4
    engine.add("too early", 12, **content("a", "x", "y", tokens=4))
    assert engine.step().tokens == {"too early": 12}
    engine.pool.pass_fence(7)
    engine.add("in time", 12, **prompt)
    assert engine.step().tokens == {"in time": 4}


def test_blocks_that_nobody_can_find_any_more_do_not_count_as_cached(drive):
    """Content that nothing names can be found by its own request only, so after its end it is not cached (`BlockPool.num_cached`:
    "free blocks whose content can still be found")."""
    engine = drive(num_gpu_blocks=3, block_size=4)
    engine.add("A", 4, output_tokens=5)
    b = engine.add("B", 4, output_tokens=5)
    engine.run()
    assert b.num_preemptions == 1
    assert engine.pool.num_cached == 0


# -- sliding window -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 100])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_block_is_skipped_when_no_later_token_attends_to_any_of_its_tokens(window, block_size):
    """The token at position p attends to (p - window, p]; with C tokens computed the next one is at position C."""
    for computed in range(60):
        seen_from = max(computed - window + 1, 0)
        skipped = sum(
            all(token < seen_from for token in range(block * block_size, (block + 1) * block_size))
            for block in range(60 // block_size)
        )
        assert skipped_blocks(computed, block_size, window) == skipped
        assert skipped_blocks(computed, block_size, None) == 0


def test_hits_that_are_out_of_the_window_are_not_taken(drive):
    """Window 8, blocks of 4: of 4 hit blocks (16 tokens), (16 - 8 + 1) // 4 = 2 are out of sight: no block stands in their place."""
    engine = drive(num_gpu_blocks=20, block_size=4, sliding_window=8, max_num_batched_tokens=32)
    prompt = content("a", "b", "c", "d", "e", tokens=4)
    engine.add("first", 20, **prompt)
    assert engine.step().tables == {"first": (1, 2, 3, 4, 5)}
    again = engine.add("again", 20, **prompt)
    step = engine.step()
    assert step.tokens == {"again": 4}
    assert step.tables == {"again": (0, 0, 3, 4, 6)}
    assert again.prefix_hit_tokens == 16


def test_a_window_gives_blocks_back_while_the_request_runs(drive):
    """Window 8, blocks of 4: with C tokens computed, (C - 7) // 4 blocks have slid out, so 3 are enough for any decode."""
    engine = drive(num_gpu_blocks=20, block_size=4, sliding_window=8, max_num_batched_tokens=4)
    request = engine.add("A", 4, output_tokens=60)
    held = []
    while (step := engine.step()) is not None:
        held.append(sum(1 for block in step.tables["A"] if block))
    assert max(held) == 3
    assert (request.peak_blocks, request.num_output_tokens) == (3, 60)
    assert engine.pool.num_free == 20


def test_a_preemption_does_not_fail_a_windowed_request_that_the_pool_can_hold(drive):
    """Window 8, blocks of 2, budget 4: decoding holds at most 5 blocks, a restart in chunks of 4 at most 6, and 6 are there. The cap of
    the gate, ceil(11 / 2) + 1 = 7, is a bound, not a need: it may turn the request away at arrival, not kill it on the way."""
    engine = drive(
        num_gpu_blocks=6,
        block_size=2,
        sliding_window=8,
        max_num_batched_tokens=4,
        scheduling_policy="priority",
        enable_prefix_caching=False,
    )
    request = engine.add("low", 4, output_tokens=40, priority=9)
    for _ in range(20):
        engine.step()
    engine.add("top", 1, output_tokens=20, priority=0)
    engine.run()
    assert request.outcome in (Outcome.FINISHED, Outcome.REJECTED)


def test_the_log_shows_the_blocks_that_slid_out_of_the_window_as_released(drive):
    """A block is given to nobody who reads the log before the log says that its holder gave it back."""
    engine = drive(
        num_gpu_blocks=4, block_size=4, sliding_window=8, max_num_batched_tokens=4, enable_prefix_caching=False
    )
    engine.add("A", 4, output_tokens=30)
    engine.run()
    held = set()
    for entry in engine.log:
        held.difference_update(block for _, blocks in entry["released"] for block in blocks)
        for _request_id, _num_tokens, blocks in entry["scheduled"]:
            assert held.isdisjoint(blocks)
            held.update(blocks)


def test_tokens_that_slid_out_of_the_window_do_not_fill_slots(drive):
    """Slots in block tables and the tokens in them are counted for fragmentation: never more tokens than slots."""
    engine = drive(num_gpu_blocks=20, block_size=4, sliding_window=8, max_num_batched_tokens=4)
    engine.add("A", 4, output_tokens=20)
    while (plan := engine.plan()) is not None:
        committed = engine.commit(plan)
        assert 0 < committed.written_tokens <= committed.table_slots[0]


# -- stretches ----------------------------------------------------------------------------------------------------------------


def test_a_stretch_lasts_until_the_next_completion(drive):
    """Prompts of 4; after their first tokens, 4 and 9 are left: 4 equal steps, then 5."""
    engine = drive(num_gpu_blocks=20, block_size=4)
    engine.add("short", 4, output_tokens=5)
    engine.add("long", 4, output_tokens=10)
    repeats = []
    while (plan := engine.plan()) is not None:
        repeats.append(plan.repeat)
        engine.commit(plan)
    assert repeats == [1, 4, 5]


def test_a_stretch_lasts_while_blocks_do(drive):
    """5 blocks of 4, two requests with 4 tokens: they take blocks 3 and 4 in the first step, and of the two more that they need
    in the fifth one is there. So 4 equal steps; then the younger gives way; then the older leaps to its end."""
    engine = drive(num_gpu_blocks=5, block_size=4)
    engine.add("older", 4, output_tokens=10)
    engine.add("younger", 4, output_tokens=10)
    repeats, preempted = [], []
    while (plan := engine.plan()) is not None:
        repeats.append(plan.repeat)
        preempted.append(plan.preempted)
        engine.commit(plan)
    assert repeats[:4] == [1, 4, 1, 4]
    assert preempted[:4] == [(), (), ("younger",), ()]


def test_a_stretch_may_use_the_last_block(drive):
    """3 blocks of 4 hold the 12 tokens of the whole request: its 8 decode steps are one stretch."""
    engine = drive(num_gpu_blocks=3, block_size=4)
    engine.add("A", 4, output_tokens=9)
    engine.commit(engine.plan())
    plan = engine.plan()
    assert plan.repeat == 8
    engine.commit(plan)
    assert engine.core.num_unfinished == 0


def test_a_prompt_under_way_is_not_leapt_over(drive):
    engine = drive(num_gpu_blocks=20, block_size=4, max_num_batched_tokens=4)
    engine.add("A", 4, output_tokens=9)
    engine.commit(engine.plan())
    engine.add("B", 9)
    for _ in range(3):
        plan = engine.plan()
        assert plan.repeat == 1
        engine.commit(plan)
    assert engine.plan().repeat == 5


def arrives(engine, request_id, input_tokens, priority=0):
    """Whether an arrival may change what is under way."""
    spec = RequestSpec(
        request_id=request_id, arrival_s=0.0, input_tokens=input_tokens, output_tokens=1, priority=priority
    )
    return engine.core.add(spec, engine.now_fs).may_change_plan


def test_an_arrival_matters_to_a_stretch_only_if_it_changes_the_head_of_the_queue(drive):
    """Behind others it changes no decision. A rejection does: it belongs in the log of the step."""
    engine = drive(num_gpu_blocks=4, block_size=4)
    engine.add("A", 4, output_tokens=9)
    engine.commit(engine.plan())
    assert engine.plan().repeat == 8
    assert arrives(engine, "head", 8)
    assert not arrives(engine, "behind", 1)
    assert arrives(engine, "never", 100)


def test_with_priorities_it_matters_if_it_goes_to_the_front(drive):
    engine = drive(num_gpu_blocks=4, block_size=4, scheduling_policy="priority")
    engine.add("A", 4, output_tokens=9)
    engine.commit(engine.plan())
    engine.plan()
    assert arrives(engine, "head", 8, priority=5)
    assert not arrives(engine, "behind", 1, priority=6)
    assert arrives(engine, "new head", 8, priority=4)


def test_an_arrival_does_not_matter_while_the_batch_is_full(drive):
    engine = drive(num_gpu_blocks=4, block_size=4, max_num_seqs=1)
    engine.add("A", 4, output_tokens=9)
    engine.commit(engine.plan())
    engine.plan()
    assert not arrives(engine, "head", 1)


@pytest.mark.parametrize("done", [1, 2, 5, 8])
def test_the_tables_of_future_steps_are_the_ones_that_are_then_allocated(drive, done):
    """A stretch of 8 steps of three requests that need blocks in different steps, on fresh blocks first and freed ones after: what
    `scheduled(i)` shows before is what is there after i + 1 steps, and what the log says was given."""
    engine = drive(num_gpu_blocks=13, block_size=4)
    engine.add("gone", 12)
    engine.step()
    requests = [engine.add(name, length, output_tokens=9) for name, length in (("A", 4), ("B", 5), ("C", 7))]
    engine.step()
    plan = engine.plan()
    assert plan.repeat == 8
    future = [plan.scheduled(index) for index in range(8)]
    free = engine.pool.num_free
    assert [plan.scheduled(index) for index in range(8)] == future  # looking changes nothing
    assert engine.pool.num_free == free
    for index, step in enumerate(future):
        assert [share.context_tokens for share in step] == [4 + index, 5 + index, 7 + index]

    logged = len(engine.log) - 1  # the plan's first step is logged already
    engine.commit(plan, steps=done)
    if done < 8:
        assert [tuple(request.table.blocks) for request in requests] == [
            share.block_table for share in future[done - 1]
        ]
    assert len(engine.log) - logged == done
    tables = {request.request_id: [] for request in requests}
    for entry in engine.log[1:]:
        for request_id, _num_tokens, blocks in entry["scheduled"]:
            tables[request_id] += blocks
    assert tables == {share.request_id: list(share.block_table) for share in future[done - 1]}
