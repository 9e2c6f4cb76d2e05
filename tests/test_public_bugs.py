"""Faults that real engines had, tables A and B of the public-bugs reference: the right answer first, one test a row (or more).

Which tests give which row its right answer, here and elsewhere, is in `test_public_bugs_table.py`.
"""

from __future__ import annotations

import pytest

from sim.core.blocks import BlockPool, DoubleFreeError, IntegrityError
from sim.core.forking import Forking
from sim.core.need import admission_blocks, blocks_for
from sim.core.policies import PRESETS
from sim.core.policy import Batching, Policy
from sim.core.request import Namespace, Outcome, RequestSpec, samples
from sim.core.tables import BlockTable, BlockTables


def content(*names, tokens):
    """A prompt whose content is named, `tokens` a name."""
    return {"content_ids": names, "content_block_tokens": tokens}


def test_b01_a_prompt_that_can_never_fit_is_rejected_and_the_next_one_runs(drive):
    """10 blocks of 16; 161 tokens need 11: rejected at once, not to be retried; the 16-token prompt runs in the next step."""
    engine = drive(num_gpu_blocks=10, block_size=16)
    first = engine.add("161", 161)
    second = engine.add("16", 16)
    assert first.outcome is Outcome.REJECTED
    assert first.finish_reason == "exceeds_kv_pool"
    assert "161 prompt + 1 output tokens need 11 KV blocks of 16 tokens" in first.reason
    assert "the whole pool has 10 (160 tokens)" in first.reason
    assert first.retry_after_s is None
    assert engine.step().tokens == {"16": 16}
    assert second.outcome is Outcome.FINISHED


def test_b01_a_prompt_that_just_fits_is_served(drive):
    """160 tokens fill the 10 blocks, and the only output token is never fed back."""
    engine = drive(num_gpu_blocks=10, block_size=16)
    request = engine.add("160", 160)
    engine.run()
    assert request.outcome is Outcome.FINISHED


@pytest.mark.parametrize(
    ("blocks", "block_size", "prompt"), [(4790, 16, 76_641), (4790, 16, 100_000), (8209, 1, 8_210)]
)
def test_b01_the_pools_of_the_reports_say_never_at_once(drive, blocks, block_size, prompt):
    """76,640 tokens under a context of 262,144 (vLLM #39734); 8,209 pages of one token (FreeToken #111). A short one is served after."""
    engine = drive(num_gpu_blocks=blocks, block_size=block_size, max_model_len=262_144)
    first = engine.add("long", prompt)
    second = engine.add("short", 100)
    assert (first.outcome, first.finish_reason, first.retry_after_s) == (Outcome.REJECTED, "exceeds_kv_pool", None)
    assert f"the whole pool has {blocks} ({blocks * block_size} tokens)" in first.reason
    engine.step()
    assert second.outcome is Outcome.FINISHED


@pytest.mark.parametrize("preset", PRESETS)
def test_b01_no_preset_waits_for_what_can_never_fit(drive, preset):
    """Orca's piece is its context, so there the context says no; elsewhere the pool does."""
    longest = 160 if preset == "orca" else 320
    engine = drive(num_gpu_blocks=10, block_size=16, preset=preset, max_model_len=longest, max_num_batched_tokens=320)
    never = engine.add("161", 161, max_tokens=1)
    fits = engine.add("16", 16, max_tokens=1)
    assert never.outcome is Outcome.REJECTED
    assert never.finish_reason == ("exceeds_max_model_len" if preset == "orca" else "exceeds_kv_pool")
    assert engine.step().tokens == {"16": 16}
    assert fits.outcome is Outcome.FINISHED


@pytest.mark.parametrize("watermark", [0.0, 0.5, 0.99])
def test_b01_no_watermark_makes_it_wait_for_ever(drive, watermark):
    """The watermark is waived when nothing runs: whatever may be admitted at all is admitted to an empty engine."""
    engine = drive(num_gpu_blocks=10, block_size=16, watermark=watermark)
    request = engine.add("160", 160)
    assert engine.step().tokens == {"160": 160}
    assert request.outcome is Outcome.FINISHED


def test_b02_gate_and_sizer_share_one_cap_and_the_predictor_is_the_allocator():
    """bs 16, W 64, batched 128: cap 13 (golden trace T5). The per-step need is not capped: a table that holds no slid block yet,
    computing 512 tokens at once, takes 32 (golden trace T7 has the rest)."""
    cap = {"window": 64, "max_num_batched_tokens": 128, "max_model_len": 1024}
    assert [admission_blocks(tokens, 16, **cap) for tokens in (16, 191, 208, 209, 1024)] == [1, 12, 13, 13, 13]
    tables = BlockTables(BlockPool(40), block_size=16, window=64)
    table = BlockTable("R")
    assert tables.need(table, 0, 512) == 32
    assert len(tables.grow(table, 0, 512).new_blocks) == 32


B07 = {"num_gpu_blocks": 20, "block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 8}


def start_b07(drive, **settings):
    """20 blocks of 16, budget 64: the first request holds 15 blocks and decodes; then a 160-token prompt (10 blocks) arrives."""
    engine = drive(**B07, **settings)
    engine.add("running", 230, output_tokens=50)
    for _ in range(4):  # 230 tokens in chunks of 64
        engine.step()
    assert engine.pool.num_owned == 15
    return engine, engine.add("long", 160, output_tokens=8)


def test_b07_without_the_full_prompt_gate_the_long_prompt_thrashes(drive):
    """Its first chunk (63 tokens, 4 blocks) fits the 5 free blocks; the second (8 blocks in all) does not: preempted, again and
    again, at least once every third step until the running request has taken the fourth block; more than a prompt is recomputed."""
    engine, long = start_b07(drive, reserve_full_prompt=False, enable_prefix_caching=False)
    steps = [engine.step() for _ in range(18)]
    assert [step.tokens["running"] for step in steps] == [1] * 18
    assert long.num_preemptions >= 18 // 3
    assert long.recomputed_tokens > 160
    engine.run()
    assert long.outcome is Outcome.FINISHED
    assert engine.pool.num_free == 20


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_b07_with_the_full_prompt_gate_it_waits(drive, enable_prefix_caching):
    """10 > 5 blocks: it starts once the running request is gone, is never preempted, and recomputes nothing."""
    engine, long = start_b07(drive, enable_prefix_caching=enable_prefix_caching)
    steps = engine.run()
    assert [list(step.tokens) for step in steps[:49]] == [["running"]] * 49
    assert [step.tokens for step in steps[49:52]] == [{"long": 64}, {"long": 64}, {"long": 32}]
    assert (long.num_preemptions, long.recomputed_tokens) == (0, 0)
    assert long.outcome is Outcome.FINISHED


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("batching", Batching)
def test_b09_nobody_starts_while_somebody_is_swapped_out_and_a_full_cpu_pool_ends_nobody(drive, batching, forks):
    """vLLM #5578, scaled down: sequences in pairs, a CPU pool that holds few of them. Whoever is swapped out comes back before anybody
    starts; when the CPU pool is full a victim is recomputed instead; every request is served."""
    engine = drive(
        num_gpu_blocks=24,
        block_size=4,
        max_num_batched_tokens=64,
        max_num_seqs=12,
        num_cpu_blocks=8,
        enable_prefix_caching=False,
        policy=Policy(swap=True, batching=batching),
    )
    for index in range(8):
        spec = RequestSpec(
            request_id=f"r{index}",
            arrival_s=0.0,
            input_tokens=9 + index,
            output_tokens=24,
            n=2,
            forking=Forking(width=2) if forks else None,
        )
        for sample in samples(spec):
            engine.core.add(sample, engine.now_fs)
    away: set[str] = set()
    swaps = recomputed = 0
    for step in engine.run():
        plan = step.plan
        back, saved = ({name for name, _ in moved} for moved in (plan.swap_ins, plan.swap_outs))
        away -= back
        copies = {child for child, _, table in plan.forks if table}  # a copy starts beside its source, from no queue
        starting = set(plan.admitted) - back - copies
        assert not (away and starting), f"{starting} start while {away} are swapped out"
        swaps += len(saved)
        recomputed += len(set(plan.preempted) - saved)
        away |= saved
    assert swaps
    assert recomputed
    assert [request.outcome for request in engine.ended] == [Outcome.FINISHED] * 16
    assert engine.pool.num_free == 24
    assert engine.core._scheduler.cpu_pool.num_free == 8


def test_b10_a_decode_that_needs_a_third_of_two_blocks_is_refused_at_arrival(drive):
    """2 blocks of 256, prompt 512, 2 output tokens: 513 tokens to keep, "needs 3 of 2 blocks"."""
    engine = drive(num_gpu_blocks=2, block_size=256)
    request = engine.add("r", 512, output_tokens=2, max_tokens=2)
    assert request.outcome is Outcome.REJECTED
    assert "need 3 KV blocks of 256 tokens, but the whole pool has 2" in request.reason


def test_b10_without_a_stated_output_it_fails_alone(drive):
    """It cannot be foreseen; the request ends with its numbers in the step that needs the third block, and the engine goes on."""
    engine = drive(num_gpu_blocks=2, block_size=256)
    request = engine.add("r", 512, output_tokens=2)
    engine.step()
    other = engine.add("other", 500, output_tokens=3)
    assert engine.step().tokens == {"other": 500}
    assert request.outcome is Outcome.FAILED
    assert "513 tokens" in request.reason
    assert "3 KV blocks of a pool of 2" in request.reason
    engine.run()
    assert other.outcome is Outcome.FINISHED


def test_b11_a_prompt_of_exactly_two_blocks_computes_its_last_block_again(drive):
    """bs 256, 512 tokens twice: hit floor(511 / 256) x 256 = 256, computed 256."""
    engine = drive(num_gpu_blocks=8, block_size=256)
    prompt = content("p", "q", tokens=256)
    engine.add("first", 512, **prompt)
    assert engine.step().tokens == {"first": 512}
    second = engine.add("second", 512, **prompt)
    assert engine.step().tokens == {"second": 256}
    assert second.prefix_hit_tokens == 256


def test_b11_many_copies_of_a_prompt_of_one_block_all_compute_something(drive):
    """513 copies of 256 tokens: floor(255 / 256) = 0 blocks hit; every one computes 256 tokens in its step."""
    engine = drive(num_gpu_blocks=600, block_size=256)
    for index in range(513):
        engine.add(f"copy {index}", 256, **content("p", tokens=256))
    steps = engine.run()
    assert [tokens for step in steps for tokens in step.tokens.values()] == [256] * 513
    assert {request.prefix_hit_tokens for request in engine.ended} == {0}
    assert {request.outcome for request in engine.ended} == {Outcome.FINISHED}


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_b12_after_a_resume_length_and_table_agree(drive, enable_prefix_caching):
    """bs 256, 5 blocks. The older request has 761 tokens in 3 blocks, the younger 250 in 1. In decode step 7 the younger's 257th
    takes the fifth block; in step 8 the older's 769th needs one: the younger is preempted with 257 tokens computed.

    When the older is gone it resumes with 258 known tokens: 2 blocks; without a cache it computes all 258 again, 257 of them for the
    second time; with its own first block still cached, 2 of them, 1 for the second time. In every step its table has
    ceil(length / 256) blocks.
    """
    engine = drive(num_gpu_blocks=5, block_size=256, enable_prefix_caching=enable_prefix_caching)
    engine.add("older", 761, output_tokens=20)
    younger = engine.add("younger", 250, output_tokens=15)
    before = [engine.step() for _ in range(8)]
    assert len(before[-1].tables["younger"]) == 2
    step = engine.step()
    assert step.plan.preempted == ("younger",)
    assert step.tokens == {"older": 1}
    assert younger.computed_high == 257

    resumed = [step for step in engine.run() if "younger" in step.tokens]
    assert resumed[0].tokens["younger"] == (258 if not enable_prefix_caching else 2)
    assert younger.recomputed_tokens == (257 if not enable_prefix_caching else 1)
    lengths = [258 + index for index in range(len(resumed))]
    assert [len(step.tables["younger"]) for step in resumed] == [blocks_for(length, 256) for length in lengths]
    assert (younger.outcome, younger.num_output_tokens, younger.num_preemptions) == (Outcome.FINISHED, 15, 1)


def test_b14_a_request_that_outgrows_the_pool_ends_alone(drive):
    """Pool of 1,000 tokens, prompt 600, 1,000 more wanted: with max_tokens it is refused; without, it ends when token 1,001 would
    have to be kept, with 401 tokens delivered; a waiting request is then served."""
    engine = drive(num_gpu_blocks=100, block_size=10, max_num_batched_tokens=600)
    refused = engine.add("capped", 600, output_tokens=1000, max_tokens=1000)
    assert refused.outcome is Outcome.REJECTED
    assert "need 160 KV blocks" in refused.reason

    request = engine.add("uncapped", 600, output_tokens=1000)
    waiting = engine.add("waiting", 500, output_tokens=7)
    engine.run()
    assert request.outcome is Outcome.FAILED
    assert request.reason == "grew to 1001 tokens, which need 101 KV blocks of a pool of 100"
    assert (request.num_output_tokens, request.num_preemptions) == (401, 0)
    assert (waiting.outcome, waiting.num_preemptions) == (Outcome.FINISHED, 0)
    assert engine.pool.num_free == 100


def test_b15_victims_are_taken_one_by_one_until_the_rest_fits(drive):
    """Pages of 64, 148 requests at a page boundary, 32 pages free: 148 > 32, a deficit of 116. Each victim lowers the need by 1 and
    frees its 1 page, so 116 / 2 = 58 of them are taken, the last admitted, and 90 go on."""
    engine = drive(num_gpu_blocks=148 + 32, block_size=64, max_num_batched_tokens=148 * 64)
    names = [f"r{index}" for index in range(148)]
    for name in names:
        engine.add(name, 64, output_tokens=2)
    assert len(engine.step().tokens) == 148
    assert engine.pool.num_free == 32
    step = engine.step()
    assert list(step.tokens) == names[:90]
    assert list(step.plan.preempted) == names[:89:-1]
    engine.run()
    assert {request.outcome for request in engine.ended} == {Outcome.FINISHED}
    assert engine.pool.num_free == 180


def test_b18_a_hit_evicted_in_the_same_step_is_not_counted_on(drive):
    """Budget 128, 12 blocks of 16. 64 tokens of R2's prompt are cached at the front of the queue; R1, first in line, takes those
    blocks for 64 new tokens. R2's 128 tokens are then all to compute: 64 in this step (never 64 + 128 = 192), the rest in the next.
    """
    engine = drive(num_gpu_blocks=12, block_size=16, max_num_batched_tokens=128)
    engine.add("cached", 64, **content(*"abcd", tokens=16))
    engine.step()
    engine.add("filler", 128)
    engine.step()
    assert engine.pool.peek(12)[:4] == [4, 3, 2, 1]
    engine.add("R1", 64)
    r2 = engine.add("R2", 128, **content(*"abcd", tokens=16))
    assert [step.tokens for step in engine.run()] == [{"R1": 64, "R2": 64}, {"R2": 64}]
    assert r2.prefix_hit_tokens == 0


def test_b19_preemptions_per_request_stay_few(drive):
    """A real engine preempted nobody more than 4 times on a trace on which a simulator retried one request 173,622 times.

    200 requests of 256 + 100 tokens on 115 blocks of 16: 7 can start (16 blocks each), 5 can end together (23 blocks each). A victim
    is the youngest that runs and goes to the head of the queue; what it gave up is one block short of what it needs, so only the
    end of an older request brings it back. It starts with at most 6 older ones and is safe with 4: at most 2 preemptions each.
    """
    engine = drive(num_gpu_blocks=115, block_size=16, max_num_batched_tokens=2048, max_num_seqs=128)
    requests = [engine.add(f"r{index}", 256, output_tokens=100) for index in range(200)]
    steps = engine.run()
    assert {request.outcome for request in requests} == {Outcome.FINISHED}
    assert all(sum(step.tokens.values()) for step in steps)  # no step without progress
    assert 1 <= max(request.num_preemptions for request in requests) <= 2
    assert engine.pool.num_free == 115


def test_b20_a_refused_admission_leaves_its_hits_alone(drive):
    """The engine's view of golden trace T4. bs 16, 10 blocks: R0 (48 tokens) runs; R1 (R0's 48 + 48) came and went; R2 (32) runs: 5
    free. R3 (R1's 96 + 48) needs 3 new + 3 revived = 6 > 5, so it waits, and waiting costs nothing: references stay {1,1,1}, {0,0,0}.
    """
    engine = drive(num_gpu_blocks=10, block_size=16)
    pool = engine.pool
    engine.add("R0", 48, output_tokens=16, **content("a", "b", "c", tokens=16))
    engine.step()
    engine.add("R1", 96, **content(*"abcdef", tokens=16))
    step = engine.step()
    assert step.tokens == {"R0": 1, "R1": 48}
    assert step.tables["R1"] == (1, 2, 3, 5, 6, 7)  # block 4 is R0's next
    engine.add("R2", 16, output_tokens=5)
    engine.step()
    assert pool.num_free == 5
    r3 = engine.add("R3", 144, **content(*"abcdef", tokens=16))
    for _ in range(4):
        assert "R3" not in engine.step().tokens
        assert [pool.ref_cnt(block) for block in (1, 2, 3, 5, 6, 7)] == [1, 1, 1, 0, 0, 0]
    engine.run()
    assert (r3.outcome, r3.prefix_hit_tokens) == (Outcome.FINISHED, 96)
    assert pool.num_free == 10


def test_b21_what_was_evicted_is_not_found():
    """A block that is allocated again has lost its old content for good; the rest of the chain behind it is out of reach."""
    tables = BlockTables(BlockPool(4), block_size=4)
    pool = tables.pool
    table = BlockTable("A")
    tables.grow(table, 0, 16)
    pool.index.add(table.blocks, [101, 102, 103, 104])
    pool.release(table.blocks[::-1], "A finished")  # head first, to evict the head before the tail
    assert pool.allocate(1) == [1]
    assert pool.find([101]) == []
    assert pool.find([101, 102, 103, 104]) == []
    assert pool.index.key_of(1) is None
    assert (pool.num_free, pool.num_cached) == (3, 3)
    assert pool.find([102]) == [2]


def test_b21_a_twin_takes_the_place_of_an_evicted_block():
    """Blocks of equal content: the first registered is found; when it is evicted, the next one is; when all are gone, none."""
    pool = BlockPool(3)
    twins = pool.allocate(3)
    pool.index.add(twins, [101, 101, 101])
    for block in twins:
        assert pool.find([101]) == [block]
        pool.release([block], "somebody")
        assert pool.find([101]) == [block]  # released is not evicted
        assert pool.allocate(1) == [block]
    assert pool.find([101]) == []
    assert len(pool.index) == 0


def test_b24_late_output_of_an_aborted_request_is_ignored_and_its_blocks_return_once(drive):
    """Aborted while its step is out: the blocks stay until the step is done, the late end-of-sequence is ignored, they return
    once, and to release them again would raise with both names (I10)."""
    engine = drive(num_gpu_blocks=8, block_size=4)
    request = engine.add("r", 8, output_tokens=10)
    engine.step()
    plan = engine.plan(max_repeat=1)
    blocks = plan.scheduled(0)[0].block_table
    assert engine.abort("r")
    assert engine.pool.num_owned == len(blocks) == 3
    engine.commit(plan, stopped=("r",))
    assert (request.outcome, request.num_output_tokens) == (Outcome.ABORTED, 1)
    assert engine.pool.num_free == 8
    assert [ended.request_id for ended in engine.ended] == ["r"]
    assert not engine.abort("r")
    with pytest.raises(DoubleFreeError, match=r"first by r \(aborted\), now by a late connector"):
        engine.pool.release(blocks, "a late connector")
    assert engine.pool.num_free == 8


def test_b24_aborted_after_the_next_step_was_planned_it_is_freed_once_and_late(drive):
    """The row's own case: two steps in flight. Aborted in step 1, when step 2 has been planned with it: its client hears at once, its
    blocks return once, when step 2, which still writes them, is done; both outputs that come for it are dropped."""
    engine = drive(num_gpu_blocks=8, block_size=4, async_scheduling=True)
    request = engine.add("r", 8, output_tokens=10)
    engine.add("other", 4, output_tokens=10)
    engine.step()
    plan = engine.plan(max_repeat=1)
    engine.now_fs += 1
    assert engine.abort("r")
    engine.commit(plan, stopped=("r",))
    assert [ended.request_id for ended in engine.ended] == ["r"]
    late = engine.plan(max_repeat=1)
    assert {share.request_id for share in late.scheduled(0)} == {"r", "other"}
    assert engine.pool.num_owned == 3 + 2
    engine.commit(late, stopped=("r",))
    assert engine.pool.num_owned == 2
    engine.run()
    assert [name for entry in engine.log for name, _ in entry["released"]].count("r") == 1
    assert (request.outcome, request.num_output_tokens) == (Outcome.ABORTED, 1)
    assert engine.pool.num_free == 8


def test_b25_aborted_in_their_last_step_they_count_as_aborted_and_free_at_once(drive):
    """10 requests of 10 % of the pool each, all cancelled while their last token is computed: aborted, usage 0 % right after."""
    engine = drive(num_gpu_blocks=100, block_size=16)
    requests = [engine.add(f"r{index}", 160) for index in range(10)]
    plan = engine.plan()
    assert engine.pool.num_owned == 100
    for request in requests:
        assert engine.abort(request.request_id)
    engine.commit(plan)
    assert engine.pool.num_owned == engine.pool.num_quarantined == 0
    assert [request.outcome for request in engine.ended] == [Outcome.ABORTED] * 10
    assert engine.step() is None


def test_b28_all_sequences_that_share_a_prompt_return_it():
    """n = 4 over one prompt block, reference count 4; each has a block of its own; the parent leaves at step 3, then the children."""
    tables = BlockTables(BlockPool(8), block_size=4)
    pool = tables.pool
    parent = BlockTable("parent")
    tables.grow(parent, 0, 4)
    family = [parent, *(tables.fork(parent, f"child {index}") for index in range(3))]
    assert pool.ref_cnt(1) == 4
    for step in range(3):
        for table in family:
            tables.grow(table, 4 + step, 1)
    assert pool.num_owned == 1 + 4
    for table in family:
        tables.release(table, f"{table.owner} (aborted)")
        pool.check([(member.owner, member.blocks) for member in family])
    assert pool.ref_cnt(1) == 0
    assert pool.num_free == 8


def test_b29_the_books_name_what_is_missing():
    """59 blocks lost on the way: the check says 59, names blocks, and who had them last."""
    pool = BlockPool(1000)
    lost = pool.allocate(59)
    pool.release(lost, "the request before")
    lost = pool.allocate(1000)[-59:]
    table = [block for block in range(1, 1001) if block not in lost]
    with pytest.raises(IntegrityError, match="59 faults in a pool of 1000 blocks") as caught:
        pool.check([("R", table)])
    assert f"block {min(lost)} is missing: its reference count is 1, held by nobody" in str(caught.value)
    assert "last released by the request before" in str(caught.value)


@pytest.mark.parametrize("scheduling_policy", ["fcfs", "priority"])
def test_b31_what_has_finished_is_no_victim(drive, scheduling_policy):
    """3 blocks of 4, one each. The last admitted, and least important, finishes in step 0. In step 1 two blocks are needed and one is
    free: the victim is "worse", the next after it, and the blocks of what has finished are released once."""
    engine = drive(num_gpu_blocks=3, block_size=4, scheduling_policy=scheduling_policy)
    best = engine.add("best", 4, output_tokens=4, priority=0)
    worse = engine.add("worse", 4, output_tokens=4, priority=5)
    gone = engine.add("gone", 4, output_tokens=1, priority=9)
    assert list(engine.step().tokens) == ["best", "worse", "gone"]
    assert gone.outcome is Outcome.FINISHED
    step = engine.step()
    assert step.tokens == {"best": 1}
    assert step.plan.preempted == ("worse",)
    assert [request_id for request_id, _ in step.plan.releases] == ["gone", "worse"]
    engine.run()
    assert [ended.request_id for ended in engine.ended] == ["gone", "best", "worse"]
    assert (best.num_preemptions, worse.num_preemptions, gone.num_preemptions) == (0, 1, 0)
    assert engine.pool.num_free == 3


def test_b47_a_lora_and_a_salt_of_one_name_share_nothing(drive):
    """The same tokens in the base model, with LoRA "X", with salt "X", and in a model called "X": no hit across, full hit within."""
    engine = drive(num_gpu_blocks=64, block_size=4)
    prompt = content("a", "b", "c", tokens=4)
    spaces = [
        Namespace(),
        Namespace(lora="X"),
        Namespace(salt="X"),
        Namespace(model="X"),
        Namespace(lora="X", salt="X"),
    ]
    strangers = [engine.add(f"stranger {i}", 12, namespace=space, **prompt) for i, space in enumerate(spaces)]
    engine.run()
    assert [request.prefix_hit_tokens for request in strangers] == [0] * 5
    returning = [engine.add(f"returning {i}", 12, namespace=space, **prompt) for i, space in enumerate(spaces)]
    engine.run()
    assert [request.prefix_hit_tokens for request in returning] == [8] * 5
