"""Decode batches by buckets: padding, static buffers, the record; what only a capture can show is marked `gpu`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from experiments.validation import SCENARIOS, reference_answers, replay, run_for_real
from experiments.validation.worlds import changed_answers, first_difference, preset
from gpu.batch import BatchBuffers, Sampling, Work
from gpu.decode_graphs import CallAgain, DecodeGraphs
from gpu.forward_pass import ForwardPass
from gpu.ops import Ops
from gpu.readings import StepReading
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from gpu.workspace import Workspace
from sim.core.clock import to_fs
from sim.core.config import EngineConfig
from sim.core.engine import EngineCore
from sim.core.request import RequestSpec
from sim.memory.graphs import graph_plan

GREEDY = Sampling()


def decode(name: str, context: int, *blocks: int, samples: bool = True) -> Work:
    return Work(name=name, token_ids=[7], context_tokens=context, block_table=blocks, samples=samples)


def graphs(*sizes: int) -> DecodeGraphs:
    return DecodeGraphs(sizes, Ops("cpu"), Workspace(1 << 12), CallAgain())


# -- padding ---------------------------------------------------------------------------------------------------------------


def test_rows_beyond_the_batch_write_nowhere_and_read_nothing():
    buffers = BatchBuffers(max_tokens=8, max_seqs=8, max_blocks=3, device="cpu")
    buffers.fill([decode(f"old{i}", 9, 5, 6, 7) for i in range(8)], 4, Sampling(temperature=1.0, top_k=3), [0.5] * 8)
    batch = buffers.fill([decode("a", 4, 1, 2), decode("b", 0, 3)], 4, GREEDY, pad_to=4)
    assert batch.sampled == ("a", "b")
    assert batch.num_decodes == 4
    table = batch.groups[0].block_table.tolist()
    assert (table[0][:2], table[1][:1], table[2:]) == (
        [1, 2],
        [3],
        [[0, 0, 0]] * 2,
    )  # beyond a sequence's end nothing is read
    assert batch.groups[0].seq_lens.tolist() == [5, 1, 0, 0]
    assert batch.groups[0].slots.tolist() == [8, 12, 0, 0]  # slot 0 is in NO_BLOCK
    assert batch.positions.tolist() == [4, 0, 0, 0]
    assert batch.sample_rows.tolist() == [0, 1, 2, 3]
    assert batch.temperature.tolist() == [0.0] * 4
    assert batch.top_k.tolist() == [0] * 4


def test_every_batch_of_a_bucket_lies_in_the_same_place():
    """What a captured graph has read once, it reads always."""
    buffers = BatchBuffers(max_tokens=8, max_seqs=8, max_blocks=3, device="cpu", num_groups=2)

    def both(*blocks: int) -> dict[str, tuple[int, ...]]:
        return {"block_table": blocks, "group_tables": (blocks, (0, *blocks[1:]))}

    batches = [
        buffers.fill([], 4, GREEDY, pad_to=4),
        buffers.fill([replace(decode("a", 4), **both(1, 2))], 4, GREEDY, pad_to=4),
        buffers.fill(
            [replace(decode("a", 9), **both(1, 2, 3)), replace(decode("b", 4), **both(3, 4))], 4, GREEDY, pad_to=4
        ),
    ]
    tensors = [
        {
            (part, name): (value.data_ptr(), value.shape, value.stride())
            for part, owner in enumerate((batch, *batch.groups))
            for name in owner.__slots__
            if isinstance(value := getattr(owner, name), torch.Tensor)
        }
        for batch in batches
    ]
    assert len(tensors[0]) == 9 + 2 * 3
    assert tensors[0] == tensors[1] == tensors[2]


@pytest.mark.parametrize(
    "work",
    [
        [Work(name="p", token_ids=[1, 2], context_tokens=0, block_table=(1,), samples=True)],
        [decode("a", 4, 1, 2, samples=False)],
        [decode(f"r{i}", 0, i + 1) for i in range(5)],
    ],
)
def test_what_is_no_decode_batch_of_the_bucket_is_refused(work):
    buffers = BatchBuffers(max_tokens=8, max_seqs=8, max_blocks=3, device="cpu")
    with pytest.raises(ValueError, match="no decode batch that could be padded to 4"):
        buffers.fill(work, 4, GREEDY, pad_to=4)


# -- buckets ---------------------------------------------------------------------------------------------------------------


def test_a_batch_gets_the_smallest_bucket_that_holds_it():
    made = graphs(4, 1, 2, 8)
    sizes = [made.choose([decode(f"r{i}", 0, i + 1) for i in range(count)]) for count in range(1, 9)]
    assert sizes == [1, 2, 4, 4, 8, 8, 8, 8]
    assert made.report()["eager_steps"] == {}


def test_what_goes_without_a_graph_is_on_record_with_its_reason():
    made = graphs(1, 2)
    prompt = Work(name="p", token_ids=[1, 2], context_tokens=0, block_table=(1,), samples=True)
    assert made.choose([decode("a", 0, 2), prompt]) is None
    assert made.choose([decode("a", 4, 1, 2, samples=False)]) is None
    assert made.choose([decode(f"r{i}", 0, i + 1) for i in range(3)]) is None
    assert made.choose([decode(f"r{i}", 0, i + 1) for i in range(3)]) is None
    assert made.report()["eager_steps"] == {
        "a prompt is computed": 1,
        "a sequence samples nothing": 1,
        "more than 2 sequences, the largest graph": 2,
    }


def test_the_buckets_are_those_that_the_ledger_counts():
    assert graph_plan(20, 64, enforce_eager=False).full_sizes == (1, 2, 4, 8, 16)


class Recorded:
    """A capture that plays back: it counts, and calls nothing, as a CUDA graph calls no Python."""

    held_bytes = 0

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, step):
        step()

        def replay() -> None:
            self.replays += 1

        return replay


def test_what_a_replay_does_is_on_record_as_if_it_were_called():
    ops, workspace, capture = Ops("cpu"), Workspace(1 << 12), Recorded()
    made = DecodeGraphs((1, 2), ops, workspace, capture)

    def step(size: int) -> None:
        with workspace.scope():
            x = workspace.take("x", (size, 8), torch.float32).fill_(1.0)
            for _ in range(3):
                ops.silu_mul(x, workspace.take("out", (size, 4), torch.float32))

    made.capture(lambda size: partial(step, size))
    assert ops.num_calls == 0  # warming up and capturing is not the run
    workspace.reset()
    made.replay(2)
    made.replay(2)
    made.replay(1)
    assert capture.replays == 3
    assert ops.report()["served"] == {"silu_mul": {"torch": 9}}
    assert made.report()["replays"] == {"1": 1, "2": 2}
    assert workspace.step_high_water_bytes == 4 * 256


def test_every_bucket_is_captured_over_rows_that_are_nobody_s(monkeypatch):
    """Buckets lie in the same memory, each packed for its size: what one is captured over must not be what another one left there."""
    config = EngineConfig(num_gpu_blocks=9, block_size=4, max_model_len=32, max_num_seqs=64, max_num_batched_tokens=64)
    seen: list[int] = []

    def looks(forward, batch) -> None:
        rows = batch.num_decodes
        assert (
            batch.groups[0].seq_lens.tolist()
            == batch.groups[0].slots.tolist()
            == batch.token_ids.tolist()
            == [0] * rows
        )
        assert batch.sample_rows.tolist() == list(range(rows))
        seen.append(rows)

    monkeypatch.setattr(ForwardPass, "_compute", looks)
    RealEngine(RealSettings(shape=SCENARIOS["pressure-0"].shape, decode_graphs=True), []).executor(EngineCore(config))
    assert set(seen) == set(graph_plan(64, 64, enforce_eager=False).full_sizes) > {1, 2, 64}


# -- whole runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["pressure-0", "swaps-1", "prefixes-2", "window-0", "samples-1", "leavers-1", "hybrid-swaps-1"]
)
@pytest.mark.usefixtures("steady_time")
def test_padded_buckets_change_no_answer(name):
    run = run_for_real(SCENARIOS[name], preset("vllm-v1"), decode_graphs=True)
    assert sum(run.report["graphs"]["replays"].values()) > 5
    assert changed_answers(run, reference_answers(SCENARIOS[name])) == []
    assert run.leaked_blocks == 0
    assert first_difference(run.decisions, replay(SCENARIOS[name], preset("vllm-v1"), run.recording)) is None


def test_a_batch_above_the_largest_bucket_runs_eagerly_and_says_so():
    """Nine sequences decode at once; the buckets end at eight until the engine's limit is a bucket too."""
    answers, report, readings = served("cpu", decode_graphs=True)
    assert report["graphs"]["sizes"] == [1, 2, 4, 8]
    assert report["graphs"]["eager_steps"]["more than 8 sequences, the largest graph"] > 0
    assert len(answers) == 9
    nine = [reading for reading in readings if reading.num_seqs == 9 and reading.phase == "decode"]
    assert {reading.served_by for reading in nine} == {"eager"}


def test_without_graphs_the_report_says_that_there_are_none():
    assert run_for_real(SCENARIOS["pressure-0"], preset("vllm-v1")).report["graphs"] is None


@pytest.mark.usefixtures("steady_time")
def test_sampling_with_temperature_in_buckets_draws_each_request_s_own_numbers():
    sampling = Sampling(temperature=1.0, top_k=40, top_p=0.9)
    scenario = SCENARIOS["pressure-1"]
    run = run_for_real(scenario, preset("vllm-v1"), decode_graphs=True, sampling=sampling)
    assert changed_answers(run, reference_answers(scenario, sampling=sampling)) == []


# -- on a GPU --------------------------------------------------------------------------------------------------------------


def served(device: str, decode_graphs: bool) -> tuple[dict[str, list[int]], dict, list[StepReading]]:
    """Nine requests of unequal lengths that decode together, to the end."""
    requests = [
        RequestSpec(request_id=f"r{i}", arrival_s=0.0, input_tokens=5 + 3 * i, output_tokens=20 + i) for i in range(9)
    ]
    config = EngineConfig(
        num_gpu_blocks=200, block_size=16, max_model_len=96, max_num_seqs=9, max_num_batched_tokens=64
    )
    core, readings = EngineCore(config), []
    settings = RealSettings(shape=SCENARIOS["pressure-0"].shape, device=device, decode_graphs=decode_graphs)
    engine = RealEngine(settings, requests, on_step=readings.append)
    executor = engine.executor(core)
    for spec in requests:
        core.add(spec, 0)
    now_s = 0.0
    while core.num_unfinished:
        plan = core.plan(to_fs(now_s), 1)
        result = executor.execute(plan)
        now_s += 1.0
        core.commit(plan, result, to_fs(now_s))
    return {spec.request_id: engine.tokens.answer(spec.request_id) for spec in requests}, executor.report(), readings


def test_buckets_give_what_eager_steps_give_on_the_cpu():
    eager, graphed = served("cpu", False), served("cpu", True)
    assert graphed[0] == eager[0]
    assert graphed[1]["served"] == eager[1]["served"]
    assert {reading.served_by for reading in graphed[2]} >= {"graph of 8", "graph of 4", "eager"}
    assert {reading.served_by for reading in eager[2]} == {"eager"}


@pytest.mark.gpu
def test_captured_graphs_give_what_eager_steps_give(cuda_device):
    eager, graphed = served(cuda_device, False), served(cuda_device, True)
    assert graphed[0] == eager[0]
    assert graphed[1]["served"] == eager[1]["served"]
    assert graphed[1]["fallbacks"] == []
    assert graphed[1]["graphs"]["replays"]


@pytest.mark.gpu
def test_a_replayed_step_makes_no_allocator_call(cuda_device):
    from gpu.metering import allocation_meter

    requests = [RequestSpec(request_id=f"r{i}", arrival_s=0.0, input_tokens=9, output_tokens=60) for i in range(4)]
    config = EngineConfig(num_gpu_blocks=80, block_size=16, max_model_len=96, max_num_seqs=4, max_num_batched_tokens=64)
    core = EngineCore(config)
    executor = RealEngine(RealSettings(shape=SCENARIOS["pressure-0"].shape, device=cuda_device), requests).executor(
        core
    )
    for spec in requests:
        core.add(spec, 0)
    meter = allocation_meter(cuda_device)
    for index in range(30):
        plan = core.plan(to_fs(float(index)), 1)
        with meter:
            result = executor.execute(plan)
        if index < 4:
            meter.allocations = 0
        core.commit(plan, result, to_fs(float(index + 1)))
    assert executor.report()["graphs"]["replays"]["4"] >= 20
    assert meter.allocations == 0
