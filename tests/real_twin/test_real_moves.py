"""What a plan does to blocks before anything is computed: order, what may be poisoned when, and moves that are tried again."""

from __future__ import annotations

import pytest

from experiments.validation import SCENARIOS
from gpu.cpu_moves import CpuMoves
from gpu.cpu_pool import CpuBlockPool
from gpu.plan_moves import PlanMoves
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from gpu.swap import BlockMover
from sim.core.batch_shape import BatchShape
from sim.core.blocks import DoubleFreeError, IntegrityError
from sim.core.config import EngineConfig
from sim.core.engine import EngineCore
from sim.core.plan import CpuMove, StepPlan, Untold
from sim.core.request import RequestSpec
from tests.support.moving_device import LAYOUT, Device


@pytest.fixture
def device() -> Device:
    return Device()


def test_what_is_given_back_is_poisoned_unless_it_may_be_found_again(device):
    device.owns("a", [1, 2, 3])
    device.cached.add(2)
    device.begin(releases=(("a", (1, 2, 3)),))
    assert [device.poisoned(block) for block in (1, 2, 3)] == [True, False, True]
    assert device.pool.tags.num_held == 0


def test_a_block_is_saved_before_its_next_holder_gets_it(device):
    """Swapped out, released, copied into and held anew, all in one plan."""
    device.owns("victim", [1, 2])
    device.owns("other", [3])
    device.begin(
        swap_outs=(("victim", ((1, 4), (2, 2))),),
        releases=(("victim", (1, 2)),),
        copies=((3, 1),),
        preempted=("victim",),
    )
    device.hold("other", [1], context=2)
    assert device.reads(1) == 13
    assert device.poisoned(2)
    device.end()
    device.begin(swap_ins=(("victim", ((4, 5), (2, 6))),))
    device.hold("victim", [5, 6], context=8)
    assert [device.reads(block) for block in (5, 6)] == [11, 12]


def test_what_is_still_to_be_copied_from_is_not_poisoned(device):
    """The last other holder leaves in the very plan that copies on write."""
    device.owns("parent", [1])
    device.owns("child", [1], context=4)
    device.begin(releases=(("parent", (1,)),), copies=((1, 2),), preempted=("parent",))
    device.hold("child", [2], context=2)
    assert device.reads(2) == 11
    assert device.pool.tags.holders(1) == ()
    assert device.pool.tags.holders(2) == ("child",)


def test_a_victim_may_give_back_what_it_never_used(device):
    """It was served, then picked as a victim, all while the plan was made."""
    device.owns("victim", [1])
    device.begin(releases=(("victim", (1, 2)),), preempted=("victim",))
    device.begin(releases=(("newcomer", (3,)),), preempted=("newcomer",))
    assert device.pool.tags.num_held == 0


def test_a_victim_gives_back_the_block_that_a_copy_was_to_replace(device: Device):
    """It shares its last block with a copy of itself, got another one to write into, and lost everything, all in one plan."""
    device.owns("a", [1, 2], 8)
    device.begin(forks=(("b", "a", (1, 2)),), preempted=("b", "a"), releases=(("b", (1, 2)), ("a", (1, 3))), copies=())
    assert device.pool.tags.num_held == 0
    device.hold("a", [5, 6])
    assert device.pool.tags.holders(5) == ("a",)


def test_nobody_else_may(device):
    device.owns("a", [1])
    with pytest.raises(
        DoubleFreeError, match=r"block 2 is released twice: first by nobody \(it never held it\), now by a at step 1"
    ):
        device.begin(releases=(("a", (1, 2)),))


def test_slots_of_a_request_that_ended_while_it_was_away_are_used_again(device):
    """The device is not told of it; the core gives its slots to others."""
    device.owns("gone", [1, 2, 3])
    device.begin(swap_outs=(("gone", ((1, 1), (2, 2), (3, 3))),), releases=(("gone", (1, 2, 3)),), preempted=("gone",))
    device.end()
    device.owns("next", [4, 5])
    device.begin(swap_outs=(("next", ((4, 3), (5, 4))),), releases=(("next", (4, 5)),), preempted=("next",))
    device.end()
    device.begin(swap_ins=(("next", ((3, 1), (4, 2))),))
    assert [device.reads(block) for block in (1, 2)] == [14, 15]


def test_a_swap_without_a_cpu_pool_is_refused(device):
    moves = PlanMoves(device.pool, device.ops, CpuMoves(device.pool, device.ops), is_cached=lambda block: False)
    plan = StepPlan(
        step=0,
        repeat=1,
        start_fs=0,
        shape=BatchShape(),
        scheduled=lambda ahead: (),
        swap_outs=(("a", ((1, 1),)),),
    )
    with pytest.raises(IntegrityError, match="the plan swaps a, but the executor was made without a CPU pool"):
        moves.begin(plan)


def test_the_last_releases_are_those_that_no_plan_has_told(device):
    device.owns("a", [1, 2])
    device.moves.close(Untold(releases=(("a", (1, 2)),)))
    assert device.pool.counters().free_blocks == 8


def test_a_fork_after_the_last_plan_holds_what_it_shares_until_it_gives_it_back(device):
    """One child starts and ends by its fork, the other one leaves blocks of its own for its parent's; they outlast their parent."""
    device.owns("parent", [1, 2])
    device.owns("late", [3])
    forks = (("new", "parent", (1, 2)), ("late", "parent", (1, 2)))
    shared = tuple((name, (1, 2)) for name in ("parent", "new", "late"))
    device.moves.close(Untold(forks=forks, releases=(("late", (3,)), *shared[:2])))
    assert device.pool.tags.holders(1) == device.pool.tags.holders(2) == ("late",)
    assert device.pool.tags.holders(3) == ()
    device.moves.close(Untold(releases=shared[2:]))
    assert device.pool.counters().free_blocks == 8


def test_what_slid_in_the_last_stretch_is_given_back_when_the_run_is_over(device):
    device.owns("a", [1, 2, 3])
    device.moves.close(Untold(slid=(("a", (1,)),), releases=(("a", (2, 3)),)))
    assert device.pool.counters().free_blocks == 8


# -- the prefix tier ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tiered() -> Device:
    """A device with a prefix tier of four blocks."""
    device = Device()
    device.tier = BlockMover(device.pool, CpuBlockPool(LAYOUT, 4), device.ops)
    cpu = CpuMoves(device.pool, device.ops, tier=device.tier)
    device.moves = PlanMoves(device.pool, device.ops, cpu, is_cached=device.cached.__contains__)
    return device


def test_a_prefix_is_saved_evicted_and_loaded_for_another_request(tiered):
    """The core numbers the tier's blocks from 1. Who loads holds its blocks before it is in a step."""
    tiered.owns("a", [1, 2], 8)
    tiered.cached.update((1, 2))
    tiered.begin(saves=((-1, ((1, 4), (2, 1))),))
    tiered.end()
    tiered.begin(releases=(("a", (1, 2)),))
    tiered.end()
    tiered.cached.clear()
    tiered.owns("b", [1, 2], 8)
    tiered.begin(loads=(("c", -2, ((4, 5), (1, 6))),))
    tiered.end()
    assert (tiered.reads(5), tiered.reads(6)) == (11.0, 12.0)
    assert tiered.pool.tags.holders(5) == ("c",)
    tiered.begin()
    tiered.hold("c", [5, 6, 7], 8)
    assert (tiered.reads(5), tiered.reads(6)) == (11.0, 12.0)
    assert tiered.poisoned(7)
    tiered.end()
    assert (tiered.moves.cpu.saved_blocks, tiered.moves.cpu.loaded_blocks) == (2, 2)
    tiered.begin(releases=(("c", (5, 6, 7)), ("b", (1, 2))))
    assert tiered.pool.counters().free_blocks == 8


def test_who_leaves_while_it_loads_gives_back_what_it_holds_and_no_more(tiered):
    """The core gave it a block for the tokens to compute, too, which the device has not heard of."""
    tiered.owns("a", [1], 4)
    tiered.begin(saves=((-1, ((1, 1),)),))
    tiered.end()
    tiered.begin(loads=(("c", -2, ((1, 5),)),))
    tiered.end()
    tiered.begin(releases=(("c", (5, 6)),))
    assert tiered.pool.tags.holders(5) == ()
    assert tiered.poisoned(5)


def test_a_plan_that_only_copies_takes_no_time():
    spec = RequestSpec(request_id="r", arrival_s=0.0, input_tokens=3, output_tokens=2)
    config = EngineConfig(num_gpu_blocks=4, block_size=4, max_model_len=8, max_num_seqs=1, max_num_batched_tokens=8)
    executor = RealEngine(RealSettings(shape=SCENARIOS["pressure-0"].shape), [spec]).executor(EngineCore(config))
    executor.moves.cpu._tier = BlockMover(executor.pool, CpuBlockPool(executor.pool.layout, 2), executor.model.ops)
    plan = StepPlan(
        step=3, repeat=1, start_fs=7, shape=BatchShape(), saves=((-1, ((1, 2),)),), scheduled=lambda ahead: ()
    )
    result = executor.execute(plan)
    assert (result.durations.total_fs, result.steps, result.oom) == (0, 1, None)
    assert executor.report()["saved_prefix_blocks"] == 1


def test_what_the_executor_lacks_is_refused(device):
    with pytest.raises(IntegrityError, match="made without a CPU prefix tier"):
        device.begin(saves=((-1, ((1, 1),)),))
    other = Device()
    move = CpuMove(request_id="r", computed_tokens=4, most_tokens=8, group_tables=((1,),))
    with pytest.raises(IntegrityError, match="moves r to the CPU, or from it, but the executor was made without one"):
        other.begin(swap_outs=(("r", ((1, 1),)),), to_cpu=(move,))


@pytest.mark.parametrize("whole", [True, False])
def test_a_block_that_its_owner_gave_back_is_not_its_context_though_a_cache_keeps_it(device, whole):
    """With the rest, in the very step; or by itself, a step before, which leaves a gap in the table."""
    device.owns("a", [1, 2, 3], context=9)
    device.cached.update((1, 2))
    device.begin(releases=(("a", (1, 2, 3) if whole else (2,)),))
    if not whole:
        device.end()
        device.begin()
    with pytest.raises(IntegrityError, match=r"a uses block (1|2) at step (1|2), after it was released by a at step 1"):
        device.hold("a", [1, 2, 3], context=9)


def test_a_block_that_its_owner_gave_back_may_be_the_copy_that_it_gets():
    """A beam goes on as a copy of the other, and the copy it must make before it writes goes where its own block was."""
    device = Device()
    device.owns("parent", [2], context=3)
    device.owns("child", [1], context=3)
    device.cached.add(1)
    device.begin(releases=(("child", (1,)),), forks=(("child", "parent", (2,)),), copies=((2, 1),))
    device.hold("child", [1], context=3)
    assert device.reads(1) == 12
    assert device.pool.tags.holders(2) == ("parent",)


def test_who_was_preempted_may_come_back_in_the_same_step_to_what_the_cache_kept(device):
    device.owns("a", [1, 2, 3], context=9)
    device.cached.update((1, 2))
    device.begin(releases=(("a", (1, 2, 3)),), preempted=("a",))
    device.hold("a", [1, 2, 4], context=8)
    assert device.reads(2) == 12
    assert device.poisoned(4)
