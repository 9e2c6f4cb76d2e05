"""Sequences that fork: who shares which block, who copies, and who waits. Hand-worked first, then every load leaps as it steps.

row, rule                         test
B28  the parent leaves            test_b28_when_the_client_leaves_all_sequences_leave_and_every_block_is_back
beams on paper                    test_two_beams_on_paper
samples that fork                 test_samples_start_as_copies_of_the_first
no slot, no block                 test_a_child_without_a_slot_waits_and_comes_back_through_the_prefix_cache
I1-I6, I13, exact bills           test_forking_loads_leap_as_they_step_and_their_books_add_up
"""

from __future__ import annotations

import pytest

from sim.core import Forking, Outcome, RequestSpec, samples
from sim.core.durations import Durations
from sim.core.plan import StepResult

FS_PER_S = 10**15


def add_family(engine, name: str = "r", width: int = 2, *, change: float = 0.0, **fields):
    spec = RequestSpec(
        request_id=name, arrival_s=0.0, n=width, forking=Forking(width=width, change=change), **fields
    )  # fmt: skip
    return [engine.core.add(each, engine.now_fs).request for each in samples(spec)]


def commit(engine, plan, **said):
    """Commit a plan whose sampler had something to say."""
    engine.now_fs = plan.start_fs + plan.repeat * FS_PER_S
    engine.core.commit(plan, StepResult(durations=Durations.affine(plan.repeat, FS_PER_S, 0), **said), engine.now_fs)
    engine.ended += engine.core.take_ended()
    engine.core.check()


def refs(engine, *blocks: int) -> list[int]:
    return [engine.pool.ref_cnt(block) for block in blocks]


def test_two_beams_on_paper(drive):
    """Blocks of 4, a prompt of 6 tokens, 6 output tokens, two beams; the sampler swaps them around after steps 2 and 4.

    step  computes              tables after the step's copies     what happens then
    0     r#0: 6                r#0 [1 2]                          r#1 starts as a copy: [1 2], both with 2 holders
    1     token 6 of both       r#0 [1 2]  r#1 [1 3]               2 -> 3 copied; the first write is r#1's, r#0 keeps block 2
    2     token 7 of both       full: 8 tokens in 2 blocks         r#0 goes on as r#1: gives 1, 2 back, shares 1, 3
    3     token 8 of both       r#1 [1 3 4]  r#0 [1 3 5]           block 3 is full: nothing is copied
    4     token 9 of both       the same                           r#1 goes on as r#0: gives 1, 3, 4 back, shares 1, 3, 5
    5     token 10 of both      r#0 [1 3 5]  r#1 [1 3 6]           5 -> 6 copied; both have 6 tokens: the end, all is free
    """
    engine = drive(num_gpu_blocks=8, block_size=4)
    first, second = add_family(engine, input_tokens=6, output_tokens=6)
    assert [engine.core.num_running, engine.core.num_waiting, engine.core.num_unfinished] == [0, 2, 2]

    def step(**said):
        plan = engine.plan(max_repeat=1)
        tables = {share.request_id: share.block_table for share in plan.scheduled(0)}
        commit(engine, plan, **said)
        return plan, tables

    plan, tables = step()
    assert tables == {"r#0": (1, 2)}
    assert refs(engine, 1, 2) == [2, 2]
    assert (second.num_computed_tokens, second.num_tokens) == (6, 7)
    assert (second.scheduled_fs, second.first_token_fs) == (first.scheduled_fs, first.first_token_fs) == (0, FS_PER_S)

    plan, tables = step()
    assert plan.forks == (("r#1", "r#0", (1, 2)),)
    assert plan.admitted == ("r#1",)
    assert plan.copies == ((2, 3),)
    assert plan.shape.copied_blocks == 1
    assert tables == {"r#0": (1, 2), "r#1": (1, 3)}
    assert refs(engine, 1, 2, 3) == [2, 1, 1]

    plan, tables = step(forked={"r#0": "r#1"})
    assert plan.copies == ()
    assert refs(engine, 1, 2, 3) == [2, 0, 2]

    plan, tables = step()
    assert plan.forks == (("r#0", "r#1", (1, 3)),)
    assert plan.releases == (("r#0", (1, 2)),)
    assert plan.copies == ()
    assert tables == {"r#0": (1, 3, 5), "r#1": (1, 3, 4)}
    assert refs(engine, 1, 3, 4, 5) == [2, 2, 1, 1]

    step(forked={"r#1": "r#0"})
    assert refs(engine, 1, 3, 4, 5) == [2, 2, 0, 2]

    plan, tables = step()
    assert plan.copies == ((5, 6),)
    assert tables == {"r#0": (1, 3, 5), "r#1": (1, 3, 6)}
    assert [request.outcome for request in (first, second)] == [Outcome.FINISHED] * 2
    assert [request.num_output_tokens for request in (first, second)] == [6, 6]
    assert engine.pool.num_free == 8
    assert engine.step() is None


def test_the_bill_of_two_beams_on_paper(drive):
    """The run above, a second a step. Holders of each block, by step: 1, 2 alone in step 0; then

    step      1             2             3                 4                 5                  block-seconds
    r#0       1/2 + 1       1/2 + 1       1/2 + 1/2 + 1     1/2 + 1/2 + 1     1/2 + 1/2 + 1      2 + 9     = 11
    r#1       1/2 + 1       1/2 + 1       1/2 + 1/2 + 1     1/2 + 1/2 + 1     1/2 + 1/2 + 1      9

    together 20: 2 + 3 + 3 + 4 + 4 + 4 blocks were owned for a second each.
    """
    engine = drive(num_gpu_blocks=8, block_size=4)
    first, second = add_family(engine, input_tokens=6, output_tokens=6)
    owned = []
    for said in ({}, {}, {"forked": {"r#0": "r#1"}}, {}, {"forked": {"r#1": "r#0"}}, {}):
        plan = engine.plan(max_repeat=1)
        owned.append(engine.pool.num_owned)
        commit(engine, plan, **said)
    assert owned == [2, 3, 3, 4, 4, 4]

    def bill_s(request) -> float:
        shared = sum(time_fs for time_fs in request.shared_fs.values())
        parts = sum(time_fs / holders for holders, time_fs in request.shared_fs.items())
        return (request.kv_block_fs - shared + parts) / FS_PER_S

    assert bill_s(first) == pytest.approx(2 + 9)
    assert bill_s(second) == pytest.approx(9)


def test_samples_start_as_copies_of_the_first(drive):
    """Four samples of 10 + 5 tokens, blocks of 4: the prompt is computed once; of its 3 blocks the last, with 2 tokens, is copied three
    times; 2 + 4 x 2 blocks at the end. Without forks the three others compute the 2 tokens behind the full blocks again."""
    engine = drive(num_gpu_blocks=40, block_size=4)
    requests = add_family(engine, width=4, input_tokens=10, output_tokens=5)
    assert engine.step().tokens == {"r#0": 10}
    assert engine.pool.num_owned == 3
    step = engine.step()
    assert step.tokens == {f"r#{index}": 1 for index in range(4)}
    assert step.plan.copies == ((3, 4), (3, 5), (3, 6))
    assert engine.pool.num_owned == 2 + 4
    steps = engine.run()
    assert max(len(set().union(*step.tables.values())) for step in steps) == 2 + 4 * 2
    assert {request.outcome for request in requests} == {Outcome.FINISHED}
    assert {request.num_output_tokens for request in requests} == {5}
    assert {request.first_token_fs for request in requests} == {FS_PER_S}
    assert engine.pool.num_free == 40


def test_one_output_token_needs_no_block_of_its_own(drive):
    engine = drive(num_gpu_blocks=3, block_size=4)
    requests = add_family(engine, width=3, input_tokens=10, output_tokens=1)
    assert engine.step().tokens == {"r#0": 10}
    assert {request.outcome for request in requests} == {Outcome.FINISHED}
    assert engine.pool.num_free == 3


def test_at_a_block_boundary_nothing_is_copied(drive):
    """8 tokens fill two blocks of 4: each beam's next token opens a block of its own."""
    engine = drive(num_gpu_blocks=8, block_size=4)
    add_family(engine, width=3, input_tokens=8, output_tokens=3)
    engine.step()
    step = engine.step()
    assert step.plan.copies == ()
    assert step.tables == {"r#0": (1, 2, 3), "r#1": (1, 2, 4), "r#2": (1, 2, 5)}


def test_a_child_without_a_slot_waits_and_comes_back_through_the_prefix_cache(drive):
    """Two sequence slots, three samples of 9 + 3 tokens in blocks of 4: the third waits for the end of the first two, finds the 2 full
    blocks, and computes the prompt's last token and its own first one again."""
    engine = drive(num_gpu_blocks=20, block_size=4, max_num_seqs=2, max_num_batched_tokens=64)
    requests = add_family(engine, width=3, input_tokens=9, output_tokens=3)
    engine.step()
    assert [engine.core.num_running, engine.core.num_waiting] == [2, 1]
    assert engine.step().tokens == {"r#0": 1, "r#1": 1}
    assert engine.step().tokens == {"r#0": 1, "r#1": 1}
    assert engine.step().tokens == {"r#2": 2}
    engine.run()
    assert [request.num_output_tokens for request in requests] == [3, 3, 3]
    assert [request.recomputed_tokens for request in requests] == [0, 0, 1]
    assert requests[2].prefix_hit_tokens == 0  # what it finds is not a hit of its user's
    assert engine.pool.num_free == 20


def test_a_child_without_a_block_waits_too(drive):
    """3 blocks of 4 hold the prompt of 10 tokens; a copy of the third would be a fourth. The child starts when the first has ended."""
    engine = drive(num_gpu_blocks=3, block_size=4)
    first, second = add_family(engine, input_tokens=10, output_tokens=3)
    engine.step()
    assert [engine.core.num_running, engine.core.num_waiting] == [1, 1]
    engine.run()
    assert [request.outcome for request in (first, second)] == [Outcome.FINISHED] * 2
    assert engine.pool.num_free == 3


def test_what_a_copy_would_find_again_after_a_preemption_is_its_source_history(drive):
    """Two beams with 8 prompt tokens; at 12 tokens the second goes on as the first; preempted at 16 it finds the three blocks
    that it shares with the first, and its own fourth."""
    engine = drive(num_gpu_blocks=12, block_size=4)
    first, second = add_family(engine, input_tokens=8, output_tokens=20)
    for _ in range(4):
        engine.step()
    plan = engine.plan(max_repeat=1)
    commit(engine, plan, forked={"r#1": "r#0"})  # 12 tokens computed
    for _ in range(5):
        engine.step()
    assert first.keys.keys(0, 3) == second.keys.keys(0, 3)
    assert first.keys.key(3) != second.keys.key(3)
    assert len({*first.keys.keys(0, 6), *second.keys.keys(0, 6)}) == 9


@pytest.mark.parametrize("when", ["held", "running", "in a step"])
def test_b28_when_the_client_leaves_all_sequences_leave_and_every_block_is_back(drive, when):
    """vLLM PR #14326: n = 4, shared prompt blocks with four holders; the parent's name stands for all. Each ends as aborted."""
    engine = drive(num_gpu_blocks=20, block_size=4)
    requests = add_family(engine, width=4, input_tokens=10, output_tokens=9)
    other = engine.add("other", 3, output_tokens=6)
    plan = None
    if when != "held":
        for _ in range(3):
            engine.step()
        assert refs(engine, 1, 2) == [4, 4]
    if when == "in a step":
        plan = engine.plan(max_repeat=1)
    assert engine.abort("r")
    if plan is not None:
        commit(engine, plan)
    assert [request.outcome for request in requests] == [Outcome.ABORTED] * 4
    assert not engine.abort("r")
    engine.run()
    assert other.outcome is Outcome.FINISHED
    assert engine.pool.num_free == 20


def test_when_the_first_leaves_alone_the_next_computes_the_prompt(drive):
    engine = drive(num_gpu_blocks=20, block_size=4)
    requests = add_family(engine, width=3, input_tokens=10, output_tokens=3)
    engine.abort("r#0")
    assert engine.step().tokens == {"r#1": 10}
    assert engine.step().tokens == {"r#1": 1, "r#2": 1}
    engine.run()
    assert [request.outcome for request in requests] == [Outcome.ABORTED, Outcome.FINISHED, Outcome.FINISHED]
    assert engine.pool.num_free == 20


def test_a_sampler_that_copies_a_copy_or_a_stranger_is_told_so(drive):
    engine = drive(num_gpu_blocks=20, block_size=4)
    add_family(engine, "r", width=3, input_tokens=5, output_tokens=9)
    add_family(engine, "q", width=2, input_tokens=5, output_tokens=9)
    engine.step()
    for forked in ({"r#1": "q#0"}, {"r#1": "r#1"}, {"r#1": "r#0", "r#2": "r#1"}):
        plan = engine.plan(max_repeat=1)
        with pytest.raises(ValueError, match="must be two sequences of one request"):
            commit(engine, plan, forked=forked)
        engine = drive(num_gpu_blocks=20, block_size=4)
        add_family(engine, "r", width=3, input_tokens=5, output_tokens=9)
        add_family(engine, "q", width=2, input_tokens=5, output_tokens=9)
        engine.step()


@pytest.mark.parametrize(("width", "change"), [(0, 0.0), (2, 1.0), (2, -0.1)])
def test_a_family_that_makes_no_sense_is_refused(width, change):
    with pytest.raises(ValueError, match="must"):
        Forking(width=width, change=change)


def test_fate_replaces_as_often_as_it_is_told_and_never_everybody():
    """4 beams, 0.3: about 0.3 x 4 = 1.2 replaced a token, less what is left out when all four would be (0.3^4 x 4 = 0.03)."""
    forking = Forking(width=4, change=0.3, seed=7)
    pairs = [forking.replaced("r", tokens) for tokens in range(4000)]
    assert sum(map(len, pairs)) / 4000 == pytest.approx(4 * 0.3 - 4 * 0.3**4, abs=0.06)
    for replaced in pairs:
        children, sources = {child for child, _ in replaced}, {source for _, source in replaced}
        assert not children & sources
        assert len(children) < 4
    assert pairs == [forking.replaced("r", tokens) for tokens in range(4000)]
    assert pairs != [forking.replaced("q", tokens) for tokens in range(4000)]
    assert Forking(width=4).replaced("r", 5) == Forking(width=1, change=0.5).replaced("r", 5) == ()
