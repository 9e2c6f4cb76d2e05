"""Micro-batches: a step split into several forward passes computes the same, with less temporary memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.validation import SCENARIOS, reference_answers, replay, run_for_real
from experiments.validation.worlds import changed_answers, first_difference, preset
from gpu.batch import Work
from gpu.micro_batches import micro_batches


def work(*counts: int) -> list[Work]:
    """One sequence a count; its tokens say whose they are and where they stand."""
    return [
        Work(
            name=f"r{i}",
            token_ids=[100 * i + place for place in range(count)],
            context_tokens=3 * i,
            block_table=(i + 1,),
            samples=i % 2 == 0,
        )
        for i, count in enumerate(counts)
    ]


def test_a_long_chunk_is_cut_and_only_its_end_samples():
    first, second, third = micro_batches(work(7, 1), 3)
    assert [
        (part.name, list(part.token_ids), part.context_tokens, part.samples) for part in (*first, *second, *third)
    ] == [
        ("r0", [0, 1, 2], 0, False),
        ("r0", [3, 4, 5], 3, False),
        ("r0", [6], 6, True),
        ("r1", [100], 3, False),
    ]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 12))
def test_passes_are_even_in_order_and_leave_nothing_out(counts, parts):
    given_work = work(*counts)
    passes = micro_batches(given_work, parts)
    assert len(passes) == min(parts, sum(counts))
    sizes = [sum(item.num_tokens for item in part) for part in passes]
    assert max(sizes) - min(sizes) <= 1
    flat = [item for part in passes for item in part]
    assert [token for item in flat for token in item.token_ids] == [t for item in given_work for t in item.token_ids]
    for item in given_work:
        own = [part for part in flat if part.name == item.name]
        place = item.context_tokens
        for part in own:
            assert part.context_tokens == place
            place += part.num_tokens
        assert [part.samples for part in own] == [False] * (len(own) - 1) + [item.samples]


def test_a_step_of_no_parts_is_refused():
    with pytest.raises(ValueError, match="at least one pass, not in 0"):
        micro_batches(work(3), 0)


@pytest.mark.parametrize("most_tokens", [1, 2, 4])
@pytest.mark.parametrize(
    "name",
    ["pressure-0", "chunks-1", "prefixes-0", "conversations-1", "samples-0", "window-1", "hybrid-0", "hybrid-beams-1"],
)
@pytest.mark.usefixtures("steady_time")
def test_a_split_step_changes_no_answer(name, most_tokens):
    """Prefixes that are found in the very step that computes them are in an earlier pass, or in the same."""
    run = run_for_real(SCENARIOS[name], preset("vllm-v1"), micro_batch_tokens=most_tokens)
    assert run.report["split_steps"] > 0
    assert changed_answers(run, reference_answers(SCENARIOS[name])) == []
    assert run.leaked_blocks == 0
    assert first_difference(run.decisions, replay(SCENARIOS[name], preset("vllm-v1"), run.recording)) is None


@pytest.mark.usefixtures("steady_time")
def test_smaller_passes_need_a_smaller_workspace():
    whole = run_for_real(SCENARIOS["chunks-1"], preset("vllm-v1"), checked=False)
    split = run_for_real(SCENARIOS["chunks-1"], preset("vllm-v1"), checked=False, micro_batch_tokens=2)
    assert split.report["bytes"]["workspace_high_water"] < whole.report["bytes"]["workspace_high_water"]
    assert split.report["bytes"]["workspace"] < whole.report["bytes"]["workspace"]
    assert split.report["oom_steps"] == 0
    assert split.answers == whole.answers
