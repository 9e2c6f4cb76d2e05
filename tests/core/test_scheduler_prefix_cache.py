"""What a prompt finds in the prefix cache, and what nobody can find.

Source: vLLM V1, engine-policies §1.1.2 to §1.1.5.
"""

from __future__ import annotations

import pytest

from sim.core.request import Namespace
from tests.support.engine_driver import content


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
