"""Faults that real engines had in admission and preemption, table A of the public-bugs reference: one test a row, or more.

Which tests give which row its right answer, here and elsewhere, is in `test_public_bugs_table.py`.
"""

from __future__ import annotations

import pytest

from sim.core.blocks import BlockPool
from sim.core.forking import Forking
from sim.core.need import admission_blocks, blocks_for
from sim.core.policies import PRESETS
from sim.core.policy import Batching, Policy
from sim.core.request import Outcome, RequestSpec, samples
from sim.core.tables import BlockTable, BlockTables
from tests.support.engine_driver import content


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
    assert engine.core._scheduler.swapping.cpu_pool.num_free == 8


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
