"""A request that moves to another device, or to the CPU and back, gets the same answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.validation import SCENARIOS
from gpu.batch import Sampling
from gpu.cpu_lane import CpuLane
from gpu.handover import HandoverError, hand_over
from gpu.layout import KVLayout
from gpu.pool import PagedKVPool
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from sim.core.batch_shape import BatchShape
from sim.core.config import EngineConfig
from sim.core.engine import EngineCore
from sim.core.plan import CpuMove, ScheduledRequest, StepPlan, Untold
from sim.core.request import RequestSpec


def move(computed_tokens: int, *tables: tuple[int, ...], most_tokens: int = 0) -> CpuMove:
    """Of "r" to the CPU, or from it."""
    return CpuMove(
        request_id="r", computed_tokens=computed_tokens, most_tokens=most_tokens or computed_tokens, group_tables=tables
    )


def handed_over(target_device: str, moved_after: int) -> list[list[int]]:
    """A request that starts on the CPU's pool and goes on in another, decoding by hand; and the same without the move."""
    spec = RequestSpec(request_id="r", arrival_s=0.0, input_tokens=9, output_tokens=12)
    config = EngineConfig(num_gpu_blocks=12, block_size=4, max_model_len=24, max_num_seqs=2, max_num_batched_tokens=24)
    shape = SCENARIOS["pressure-0"].shape
    answers = []
    for places in (("cpu", target_device), ("cpu", "cpu")):
        moves = len(answers) == 0
        engines = [
            RealEngine(RealSettings(shape=shape, device=place, checked=True, dtype="float32"), [spec])
            for place in places
        ]
        passes = [engine.executor(EngineCore(config)).forward for engine in engines]
        passes[1].tokens = passes[0].tokens
        here, table, context, count = passes[0], (1, 2, 3, 4, 5, 6), 0, 9
        for step in range(12):
            if moves and step == moved_after:
                there = (12, 3, 7, 1, 9, 2)
                hand_over("r", passes[0].pool, table, passes[1].pool, there, context)
                assert passes[0].pool.tags.num_held == 0
                here, table = passes[1], there
            here.pool.begin_step(step)
            here.workspace.reset()
            here.pool.assign("r", table, context)
            share = ScheduledRequest("r", count, context, table, True)
            token = here.run([share])["r"]
            here.tokens.record("r", context + count, token)
            here.pool.end_step()
            context, count = context + count, 1
        answers.append(passes[0].tokens.answer("r"))
    return answers


@pytest.mark.parametrize("moved_after", [1, 5])
def test_a_request_that_moves_to_another_pool_goes_on_where_it_was(moved_after):
    moved, stayed = handed_over("cpu", moved_after)
    assert moved == stayed
    assert len(set(stayed)) > 3


@pytest.mark.gpu
def test_a_request_that_moves_to_the_gpu_goes_on_where_it_was(cuda_device):
    moved, stayed = handed_over(cuda_device, 4)
    assert moved == stayed


def test_plans_move_a_request_to_the_cpu_and_back():
    """By the executor, as the core would tell it: saved with the swap-outs, released, and swapped in when the rung is off."""
    alone = handed_over("cpu", 1)[1]
    spec = RequestSpec(request_id="r", arrival_s=0.0, input_tokens=9, output_tokens=12)
    config = EngineConfig(
        num_gpu_blocks=12, block_size=4, max_model_len=24, max_num_seqs=2, max_num_batched_tokens=24, num_cpu_blocks=8
    )
    engine = RealEngine(RealSettings(shape=SCENARIOS["pressure-0"].shape, checked=True), [spec])
    executor = engine.executor(EngineCore(config))

    def run(step: int, table: tuple[int, ...], context: int, count: int = 1, **decided: object) -> None:
        share = ScheduledRequest("r", count, context, table, True)
        shape = BatchShape(decode_seqs=count, sampled_seqs=1)
        plan = StepPlan(
            step=step, repeat=1, start_fs=0, shape=shape, scheduled=lambda ahead: (share,) if table else (), **decided
        )
        executor.execute(plan)

    run(0, (1, 2, 3), 0, 9)
    for step in (1, 2, 3, 4):
        run(step, (1, 2, 3, 4), 8 + step)
    pairs = ((1, 3), (2, 4), (3, 5), (4, 6))
    to_cpu = (move(13, (1, 2, 3, 4), most_tokens=20),)
    run(5, (), 0, 0, swap_outs=(("r", pairs),), to_cpu=to_cpu, releases=(("r", (1, 2, 3, 4)),))
    assert executor.pool.tags.num_held == 0
    assert executor.report()["moved_to_cpu"] == 1
    assert engine.tokens.answer("r") == alone
    back = (move(15, (5, 6, 7, 8)),)
    run(6, (5, 6, 7, 8), 15, swap_ins=(("r", ((3, 5), (4, 6), (5, 7), (6, 8))),), from_cpu=back)
    for step in (7, 8, 9, 10):
        run(step, (5, 6, 7, 8, 9), 9 + step)
    assert engine.tokens.answer("r") == alone
    executor.close(Untold(releases=(("r", (5, 6, 7, 8, 9)),)))
    assert executor.leaked_blocks == 0


@pytest.mark.parametrize("back_after", [0, 2, None])
def test_a_request_that_goes_on_on_the_cpu_gets_the_same_answer(back_after):
    """Five tokens on the device, then on the CPU; back after some more of them, or never."""
    spec = RequestSpec(request_id="r", arrival_s=0.0, input_tokens=9, output_tokens=12)
    config = EngineConfig(num_gpu_blocks=12, block_size=4, max_model_len=24, max_num_seqs=2, max_num_batched_tokens=24)
    alone = handed_over("cpu", 1)[1]
    engine = RealEngine(RealSettings(shape=SCENARIOS["pressure-0"].shape, checked=True), [spec])
    forward = engine.executor(EngineCore(config)).forward
    lane = CpuLane(forward.model, forward.pool.layout, engine.tokens, sampling=Sampling(), max_model_len=24)

    def steps(table: tuple[int, ...], context: int, count: int, number: int) -> int:
        for step in range(number):
            forward.pool.begin_step(step)
            forward.workspace.reset()
            forward.pool.assign("r", table, context)
            token = forward.run([ScheduledRequest("r", count, context, table, True)])["r"]
            engine.tokens.record("r", context + count, token)
            forward.pool.end_step()
            context, count = context + count, 1
        return context

    context = steps((1, 2, 3, 4, 5, 6), 0, 9, 5)
    assert context == 13
    lane.receive(move(13, (1, 2, 3, 4), most_tokens=20), forward.pool)
    lane.catch_up()
    forward.pool.release("r", (1, 2, 3, 4, 5, 6))
    assert lane.guests == ("r",)
    assert lane.computed_tokens == 12 - 5
    assert engine.tokens.answer("r") == alone
    if back_after is None:
        lane.drop("r")
    else:
        lane.give_back(move(13 + back_after, (9, 8, 7, 6)), forward.pool)
        steps((9, 8, 7, 6, 5, 4), context + back_after, 1, 12 - 5 - back_after)
    assert lane.guests == ()
    assert engine.tokens.answer("r") == alone


def test_nobody_is_on_the_cpu_twice():
    spec = RequestSpec(request_id="r", arrival_s=0.0, input_tokens=3, output_tokens=2)
    config = EngineConfig(num_gpu_blocks=4, block_size=4, max_model_len=8, max_num_seqs=1, max_num_batched_tokens=8)
    engine = RealEngine(RealSettings(shape=SCENARIOS["pressure-0"].shape), [spec])
    forward = engine.executor(EngineCore(config)).forward
    lane = CpuLane(forward.model, forward.pool.layout, engine.tokens, sampling=Sampling(), max_model_len=8)
    forward.pool.assign("r", (1,), 0)
    assert len(engine.tokens.tokens("r", 0, 3)) == 3
    engine.tokens.record("r", 3, 5)
    lane.receive(move(3, (1,), most_tokens=4), forward.pool)
    with pytest.raises(ValueError, match="r is on the CPU already"):
        lane.receive(move(3, (1,), most_tokens=4), forward.pool)
    lane.drop("r")
    with pytest.raises(KeyError):
        lane.drop("r")


def test_a_move_between_pools_that_differ_is_refused():
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, block_size=4, dtype="float32")
    source, target = PagedKVPool(layout, 4), PagedKVPool(replace(layout, block_size=8), 4)
    source.assign("r", [1, 2], 8)
    with pytest.raises(
        HandoverError, match="block_size is 4 in the pool a request leaves and 8 in the one it comes to"
    ):
        hand_over("r", source, [1, 2], target, [1], 8)
    with pytest.raises(HandoverError, match=r"8 tokens are 2 blocks, but the tables are \[1, 2\] and \[3\]"):
        hand_over("r", source, [1, 2], PagedKVPool(layout, 4), [3], 8)
    assert source.tags.num_held == 2
