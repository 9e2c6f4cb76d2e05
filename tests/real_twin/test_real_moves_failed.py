"""Moves that had no memory: they are done by the next plan, and nobody gives back what it never got."""

from __future__ import annotations

import pytest
import torch

from gpu.pool import PagedKVPool
from sim.core.blocks import IntegrityError
from sim.core.plan import CpuMove, Untold
from tests.support.moving_device import Device, scheduled


@pytest.fixture
def device() -> Device:
    return Device()


def out_of_memory(device: Device, monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    """The next `failures` moves of blocks fail."""
    works, left = device.ops.move_blocks, [failures]

    def fails(*arguments: object) -> None:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB")
        works(*arguments)

    monkeypatch.setattr(device.ops, "move_blocks", fails)


def fail(device: Device, **decided: object) -> None:
    """A plan whose moves fail; its step is over."""
    with pytest.raises(torch.OutOfMemoryError):
        device.begin(**decided)
    device.pool.end_step()
    device.step += 1


@pytest.mark.parametrize("failures", [1, 3])
def test_moves_that_had_no_memory_are_done_by_the_next_plan(device, failures, monkeypatch):
    """The core takes the step back, so nobody has written in between: what was to be copied is still there."""
    device.owns("victim", [1, 2])
    device.owns("other", [3])
    out_of_memory(device, monkeypatch, failures)
    plan = {
        "swap_outs": (("victim", ((1, 1), (2, 2))),),
        "releases": (("victim", (1, 2)),),
        "copies": ((3, 1),),
        "preempted": ("victim",),
    }
    for attempt in range(failures):
        with pytest.raises(torch.OutOfMemoryError):
            device.begin(**(plan if attempt == 0 else {}))
        assert "victim" in device.moves.during
        device.moves.take_back([scheduled("other", [1], 2)])
        device.pool.end_step()
        device.step += 1
    device.begin()
    device.hold("other", [1], context=2)
    assert device.reads(1) == 13
    device.end()
    device.begin(swap_ins=(("victim", ((1, 5), (2, 6))),))
    device.hold("victim", [5, 6], context=8)
    assert [device.reads(block) for block in (5, 6)] == [11, 12]


def test_a_step_that_is_taken_back_gives_its_new_blocks_back(device):
    device.owns("a", [1, 2], context=5)
    device.begin()
    device.hold("a", [1, 2, 3], context=8)
    device.moves.take_back([scheduled("a", [1, 2, 3], context=8)])
    assert device.pool.tags.holders(3) == ()
    assert device.poisoned(3)
    assert device.reads(2) == 12


def shared(device: Device) -> None:
    """`parent` and `child` share blocks 1 and 2, the second half full."""
    device.owns("parent", [1, 2], context=6)
    device.begin(forks=(("child", "parent", (1, 2)),))
    device.end()


def test_a_copy_that_failed_explains_a_table_also_after_steps_of_others(device, monkeypatch):
    """Out of memory the engine goes on smaller: who was to get the copy may have to wait while others are computed."""
    shared(device)
    out_of_memory(device, monkeypatch, 1)
    fail(device, copies=((2, 3),))
    device.moves.take_back([scheduled("child", [1, 3], 6)])
    for _ in range(2):
        device.begin()
        device.hold("parent", [1, 2], context=6)
        device.end()
    device.begin()
    device.hold("child", [1, 3], context=6)
    assert device.reads(3) == 12
    assert device.pool.tags.holders(2) == ("parent",)
    assert device.pool.tags.holders(3) == ("child",)


@pytest.mark.parametrize("steps_between", [0, 1])
def test_who_ends_before_it_was_seen_with_its_copy_gives_back_what_it_has_instead(device, monkeypatch, steps_between):
    shared(device)
    out_of_memory(device, monkeypatch, 1)
    fail(device, copies=((2, 3),))
    device.moves.take_back([scheduled("child", [1, 3], 6)])
    for _ in range(steps_between):
        device.begin()
        device.hold("parent", [1, 2], context=6)
        device.end()
    device.begin(releases=(("child", (1, 3)),))
    device.end()
    assert device.pool.tags.holders(1) == device.pool.tags.holders(2) == ("parent",)
    assert device.pool.tags.num_held == 2
    device.owns("other", [3], context=4)
    assert device.pool.tags.holders(3) == ("other",)


def test_a_copy_does_not_explain_the_loss_of_another_block(device):
    shared(device)
    device.begin(copies=((2, 3),))
    with pytest.raises(IntegrityError, match=r"child no longer uses blocks \[1\] at step 2, and no plan released them"):
        device.hold("child", [4, 3], context=6)


def test_who_comes_back_in_a_step_that_failed_has_nothing_new_to_give_back(device, monkeypatch):
    """Swapped out, and in again, all of it undone when the core already gives back what slid out of the window it has then."""
    device.owns("a", [1, 2, 3], context=11)
    out_of_memory(device, monkeypatch, 2)
    fail(device, swap_outs=(("a", ((1, 1), (2, 2), (3, 3))),), releases=(("a", (1, 2, 3)),), preempted=("a",))
    fail(device, swap_ins=(("a", ((1, 4), (2, 5), (3, 6))),))
    device.moves.take_back([scheduled("a", [4, 5, 6], 11)])
    device.begin(slid=(("a", (4,)),), releases=(("a", (5,)),))
    device.hold("a", [0, 0, 6], context=11)
    assert device.reads(6) == 13
    assert device.pool.tags.num_held == 1


def test_who_comes_back_from_the_cpu_in_a_step_that_failed_gives_its_blocks_back(device):
    """It has not been in a step with them when it gives way; they are nobody's afterwards."""

    class Lane:
        def receive(self, move: CpuMove, pool: PagedKVPool) -> None: ...

        def give_back(self, move: CpuMove, pool: PagedKVPool) -> None:
            pool.assign(move.request_id, move.group_tables[0], move.computed_tokens)

    device.moves.cpu._lane = Lane()
    device.owns("a", [1, 2, 3], context=11)
    there = CpuMove(request_id="a", computed_tokens=11, most_tokens=16, group_tables=((1, 2, 3),))
    device.begin(swap_outs=(("a", ((1, 1), (2, 2), (3, 3))),), to_cpu=(there,), releases=(("a", (1, 2, 3)),))
    device.end()
    back = CpuMove(request_id="a", computed_tokens=12, most_tokens=12, group_tables=((4, 5, 6),))
    device.begin(swap_ins=(("a", ((1, 4), (2, 5), (3, 6))),), from_cpu=(back,))
    device.moves.take_back([scheduled("a", [4, 5, 6, 7], 12)])
    device.pool.end_step()
    assert device.pool.tags.num_held == 3
    device.begin(releases=(("a", (4, 5, 6)),), preempted=("a",))
    assert device.pool.tags.num_held == 0


def test_who_waits_to_come_back_may_have_lost_cpu_blocks_to_another(device):
    """On the CPU "a" had blocks 1 to 4, and waits with 1 to 3, which is all that its tokens need: the fourth is "b"'s from then on.
    Each is there until the plan says that it comes back, or has ended.
    """
    lane: list[str] = []

    class Lane:
        def receive(self, move: CpuMove, pool: PagedKVPool) -> None:
            lane.append(move.request_id)

        def give_back(self, move: CpuMove, pool: PagedKVPool) -> None:
            lane.remove(move.request_id)
            pool.assign(move.request_id, move.group_tables[0], move.computed_tokens)

        def drop(self, name: str) -> None:
            lane.remove(name)

    device.moves.cpu._lane = Lane()
    for name, blocks, pairs in (("a", (1, 2, 3), ((1, 1), (2, 2), (3, 3))), ("b", (4, 5), ((4, 4), (5, 5)))):
        device.owns(name, list(blocks), context=4 * len(blocks) - 1)
        there = CpuMove(request_id=name, computed_tokens=4 * len(blocks) - 1, most_tokens=16, group_tables=(blocks,))
        device.begin(swap_outs=((name, pairs),), to_cpu=(there,), releases=((name, blocks),))
        device.end()
    assert lane == ["a", "b"]
    back = CpuMove(request_id="a", computed_tokens=12, most_tokens=12, group_tables=((6, 7, 8),))
    device.begin(swap_ins=(("a", ((1, 6), (2, 7), (3, 8))),), from_cpu=(back,))
    device.end()
    device.begin(ended_on_cpu=("b",))
    device.end()
    assert lane == []


def test_a_prefix_that_was_to_be_written_in_the_failed_step_is_nobody_s(device):
    """`reader` was to read block 2 in the step in which `writer` was to write it: its context is only what was there before."""
    device.owns("reader", [1], context=4)
    device.begin()
    writer, reader = scheduled("writer", [1, 2, 3], 4), scheduled("reader", [1, 2, 4], 8)
    for share in (writer, reader):
        device.moves.hold(share)
    device.moves.take_back([writer, reader])
    device.pool.end_step()
    assert device.pool.tags.holders(1) == ("reader", "writer")
    assert device.pool.tags.num_held == 1
    device.begin(releases=(("reader", (1,)),))
    device.hold("writer", [1, 5], context=4)


def test_moves_that_fail_when_all_is_over_are_given_up(device, monkeypatch):
    """Nobody will read what they would have brought; what is held is given back all the same."""
    shared(device)
    out_of_memory(device, monkeypatch, 9)
    fail(device, copies=((2, 3),))
    device.moves.take_back([scheduled("child", [1, 3], 6)])
    device.moves.close(Untold(releases=(("child", (1, 3)), ("parent", (1, 2)))))
    assert device.pool.counters().free_blocks == 8
