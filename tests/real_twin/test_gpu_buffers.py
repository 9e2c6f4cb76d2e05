"""Buffers that outlive a scope: size classes, fences, leaks; and how a step's input gets to the device through them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu import SizeClassPool, allocation_meter
from gpu.batch import BatchBuffers, Sampling, Work, input_bytes
from gpu.packing import Packing
from gpu.staging import MAX_IDS, Staging
from sim.core.blocks import IntegrityError
from tests.support.real_driver import RealDriver, spec


class Gate:
    """A fence that passes when it is told to."""

    def __init__(self) -> None:
        self.open = False

    def passed(self) -> bool:
        return self.open


# -- the pool --------------------------------------------------------------------------------------------------------------


def test_leases_of_a_size_class_are_served_from_what_was_given_back():
    pool = SizeClassPool()
    first = pool.lease("logits", (3, 100), torch.float32)  # 1200 bytes: class 2048
    pool.give_back(first)
    second = pool.lease("tokens", (200,), torch.int64)  # 1600 bytes: the same class
    assert (pool.allocations, pool.reserved_bytes, pool.live) == (1, 2048, {"tokens": 1})
    assert second.address == first.address
    with pytest.raises(ValueError, match="buffer 'logits' is given back twice"):
        pool.give_back(first)
    pool.give_back(second)
    assert pool.live == {}


@pytest.mark.parametrize(
    ("wanted", "taken"), [(0, 512), (1, 512), (512, 512), (513, 1024), (1024, 1024), (5000, 8192), (1 << 20, 1 << 20)]
)
def test_a_lease_takes_the_next_power_of_two(wanted, taken):
    pool = SizeClassPool()
    pool.lease("any", (wanted,), torch.uint8)
    assert pool.reserved_bytes == taken


def test_a_buffer_behind_a_fence_is_not_leased_again_before_it_has_passed():
    """Nobody waits: there is another one. When the fence has passed there are two, and no third is ever made."""
    pool, gate = SizeClassPool(), Gate()
    first = pool.lease("input", (100,), torch.uint8)
    pool.give_back(first, gate)
    second = pool.lease("input", (100,), torch.uint8)
    assert second.address != first.address
    pool.give_back(second)
    third = pool.lease("input", (100,), torch.uint8)  # the oldest is still behind its fence
    assert third.address == second.address
    gate.open = True
    assert pool.lease("input", (100,), torch.uint8).address == first.address
    assert pool.allocations == 2


def test_a_reference_that_is_never_let_go_is_a_live_lease_and_named():
    # SGLang #20640: a closure kept each step's logits
    pool = SizeClassPool()
    for _ in range(5):
        pool.lease("logits", (10, 1000), torch.float32)
    assert pool.live == {"logits": 5}
    assert pool.allocations == 5
    with pytest.raises(IntegrityError, match=r"buffers on cpu were not given back by step 9: 5 of 'logits'"):
        pool.check_returned("step 9")


def test_a_warm_pool_allocates_no_more():
    pool = SizeClassPool()
    pool.warm(3000, count=2)
    assert pool.reserved_bytes == 2 * (512 + 1024 + 2048 + 4096)
    before = pool.allocations
    for size in (1, 600, 2000, 4096):
        for buffer in [pool.lease("any", (size,), torch.uint8) for _ in range(2)]:
            pool.give_back(buffer)
    pool.warm(3000, count=2)
    assert pool.allocations == before


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3)), max_size=40))
def test_leases_never_share_memory_and_nothing_is_lost(events):
    """Lease so many bytes, then give back one in so many leases: those that are out keep what was written into them."""
    pool, out = SizeClassPool(), []
    for number, (size, every) in enumerate(events):
        buffer = pool.lease("b", (size,), torch.uint8)
        buffer.tensor.fill_(number % 250)
        out.append((buffer, number % 250))
        if every and len(out) >= every:
            pool.give_back(out.pop(0)[0])
        assert all((held.tensor == value).all() for held, value in out)
    assert pool.live.get("b", 0) == len(out)
    for buffer, _ in out:
        pool.give_back(buffer)
    pool.check_returned("the end")
    assert pool.reserved_bytes == sum(size * len(free) for size, free in pool._free.items())


# -- packing ---------------------------------------------------------------------------------------------------------------


def test_parts_follow_each_other_at_multiples_of_256_bytes():
    packing = Packing()
    first, second, third = (packing.part(*each) for each in ((3, torch.int64), (100, torch.float32), (1, torch.int32)))
    assert packing.num_bytes == 256 + 512 + 256
    memory = torch.zeros(packing.num_bytes, dtype=torch.uint8)
    packing.open(memory.data_ptr())
    first.cells[:] = [1, -2, 3]
    second.cells[98:] = [0.5, 0.25]
    third.cells[0] = 7
    assert first.on(memory).tolist() == [1, -2, 3]
    assert second.on(memory).tolist() == [0.0] * 98 + [0.5, 0.25]
    assert third.on(memory).tolist() == [7]
    starts = [part.on(memory).data_ptr() - memory.data_ptr() for part in (first, second, third)]
    assert starts == [0, 256, 768]


def test_the_bytes_of_the_largest_step_are_those_of_its_numbers():
    """1000 tokens, 100 sequences, tables of 30 blocks, worked by hand, each part rounded up to 256 bytes."""
    ids, positions, slots = 8192, 8192, 8192  # 1000 x 8 = 8000
    starts, rows, four_of_sampling = 512, 1024, 4 * 512  # 101 x 4 = 404, 100 x 8 = 800, 100 x 4 = 400
    lengths, tables, tokens_out = 512, 12032, 1024  # 100 x 4, 3000 x 4 = 12000, 100 x 8
    one_group = slots + lengths + tables
    assert input_bytes(max_tokens=1000, max_seqs=100, max_blocks=30) == (
        ids + positions + starts + rows + four_of_sampling + one_group + tokens_out
    )
    more = input_bytes(max_tokens=1000, max_seqs=100, max_blocks=30, num_groups=3)
    assert more == input_bytes(max_tokens=1000, max_seqs=100, max_blocks=30) + 2 * one_group


def test_a_small_step_does_not_lease_the_widest_one_s_buffer(monkeypatch):
    staging, leased = Staging("cpu"), []
    buffers = BatchBuffers(max_tokens=8192, max_seqs=256, max_blocks=8192, device="cpu", staging=staging)
    lease = SizeClassPool.lease
    monkeypatch.setattr(
        SizeClassPool, "lease", lambda pool, *what: (leased.append(made := lease(pool, *what)), made)[1]
    )
    work = [
        Work(name=f"r{i}", token_ids=[7], context_tokens=20, block_table=(i + 1, i + 9), samples=True) for i in range(4)
    ]
    batch = buffers.fill(work, 16, Sampling())
    assert batch.groups[0].block_table.tolist() == [[1, 9], [2, 10], [3, 11], [4, 12]]
    assert [buffer.size_class for buffer in leased] == [
        4096
    ]  # eleven parts of 256 bytes, where the widest step has 8 MiB
    staging.check_returned("now")


# -- staging ---------------------------------------------------------------------------------------------------------------


def test_ids_arrive_and_every_lease_comes_back_also_after_an_error():
    staging = Staging("cpu")
    with staging.ids("first", range(5)) as first, staging.ids("second", [2**40, -1]) as second:
        assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3, 4], [2**40, -1])
        assert staging.on_device.live == {"first": 1, "second": 1}
    with pytest.raises(RuntimeError, match="lost"), staging.ids("third", [1]):
        raise RuntimeError("lost")
    with pytest.raises(RuntimeError, match="lost"), staging.sending("input", torch.zeros(8, dtype=torch.uint8)):
        raise RuntimeError("lost")
    assert staging.read("tokens", torch.tensor([3, 1, 2])) == [3, 1, 2]
    staging.check_returned("now")


def test_ids_of_any_number_up_to_the_most_take_no_allocation():
    staging = Staging("cpu")
    staging.warm(8 * MAX_IDS)
    meter = allocation_meter("cpu")
    with meter:
        for count in (1, 2, MAX_IDS):
            with staging.ids("one", range(count)), staging.ids("other", range(count)):
                pass
    assert meter.allocations == 0


# -- leaks -----------------------------------------------------------------------------------------------------------------


def test_a_buffer_that_a_step_keeps_ends_a_checked_run_with_its_name_and_the_step():
    driver = RealDriver([spec("a", 9, 6)], num_gpu_blocks=8, block_size=4)
    driver.add()
    driver.step()
    driver.executor.model.ops.staging.host.lease("forgotten logits", (3,), torch.int64)
    with pytest.raises(
        IntegrityError, match=r"buffers on cpu were not given back by the end of step 1: 1 of 'forgotten logits'"
    ):
        driver.step()


def test_a_buffer_that_was_never_given_back_ends_an_unchecked_run_at_its_end():
    driver = RealDriver([spec("a", 9, 6)], num_gpu_blocks=8, block_size=4, settings={"checked": False})
    driver.add()
    driver.serve()
    driver.executor.model.ops.staging.on_device.lease("forgotten ids", (3,), torch.int64)
    with pytest.raises(IntegrityError, match=r"not given back by the end of the run: 1 of 'forgotten ids'"):
        driver.executor.close(driver.core.untold)
