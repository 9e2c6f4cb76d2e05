"""Faults that real engines had, on the real pool: rows of the public-bugs reference that are marked P. One test a row, or more.

row  test
B02  test_b02_a_chunk_takes_the_blocks_that_were_predicted
B09  test_b09_nobody_starts_while_somebody_is_swapped_out_and_a_full_cpu_pool_kills_nobody
B10  test_b10_a_decode_without_room_ends_that_request_alone
B11  test_b11_a_prompt_of_whole_blocks_always_computes_something
B12  test_b12_after_a_resume_the_device_holds_what_the_length_needs
B15  test_b15_victims_are_taken_one_by_one_and_nobody_s_answer_changes
B20  test_b20_a_refused_admission_leaves_the_device_alone
B21  test_b21_what_slid_out_of_a_window_costs_nothing; …what_was_evicted_is_computed_again
B23  test_b23_an_aborted_load_keeps_its_blocks_until_it_has_arrived
B24  test_b24_the_late_output_of_an_aborted_request_is_dropped_and_its_blocks_return_once
B26  test_kernels_on_gpu: …a_copy_to_the_cpu_waits_for_the_kernel_that_writes_the_block, and without that wait (`gpu`)
B28  test_b28_all_samples_of_a_client_who_leaves_return_their_blocks
B29  test_b29_what_is_missing_is_counted_and_named
B33  test_b33_partial_results_of_splits_are_sized_before_the_pool; test_gpu_workspace: …are_counted_before_the_pool_is_sized
B34  test_b34_only_rows_that_are_sampled_have_logits; test_gpu_workspace: …sampling_needs_memory_for_one_row_however_many_there_are
B35  test_b35_the_sampler_has_its_memory_before_the_first_request
B37  test_b37_captures_come_after_the_pool_and_before_the_first_step; …take_what_the_ledger_says (`gpu`)
B38  test_b38_the_device_is_measured_once_before_anything_is_taken
B42  test_b42_a_prompt_twice_as_long_takes_twice_the_memory; test_gpu_workspace: …never_to_its_square
B43  test_b43_logits_of_steps_gone_by_are_not_kept
B44  test_kernels_blocks: test_blocks_beyond_two_to_the_31_elements_are_found
B45  test_b45_an_allocation_that_failed_beside_free_memory_is_made_again_once
B47  test_b47_namespaces_share_no_block
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from experiments import real_run
from gpu import device as device_module
from gpu import executor as executor_module
from gpu import real_engine
from gpu.cpu_pool import CpuBlockPool
from gpu.device import DeviceFacts
from gpu.fences import FenceError
from gpu.layout import KVLayout
from gpu.metering import StorageMeter
from gpu.op_timeline import OpTimeline
from gpu.ops import Ops
from gpu.owners import OwnerTags
from gpu.pool import PagedKVPool
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from gpu.swap import BlockMover
from sim.catalog.gpus import GPUS
from sim.catalog.models import model_shape
from sim.core.blocks import DoubleFreeError, IntegrityError
from sim.core.config import EngineConfig
from sim.core.engine import EngineCore
from sim.core.need import blocks_for
from sim.core.plan import ScheduledRequest, StepPlan
from sim.core.policies import PRESETS
from sim.core.request import Namespace, Outcome, Request, RequestSpec
from sim.memory.graphs import estimated_graph_bytes, graph_plan
from sim.memory.non_torch import context_bytes
from sim.resolve import resolve
from sim.scenario import Scenario

SHAPE = model_shape("tiny-llama-test")
MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.19 GiB of which 1.50 MiB is free."


def spec(name: str, input_tokens: int, output_tokens: int = 1, **fields: object) -> RequestSpec:
    return RequestSpec(request_id=name, arrival_s=0.0, input_tokens=input_tokens, output_tokens=output_tokens, **fields)


@dataclass(frozen=True, slots=True)
class Done:
    """One step that was planned, executed and committed."""

    plan: StepPlan
    shares: tuple[ScheduledRequest, ...]

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens computed by request."""
        return {share.request_id: share.num_tokens for share in self.shares}


class RealDriver:
    """A decision core and a checked pool, driven step by step."""

    def __init__(
        self,
        specs: list[RequestSpec],
        *,
        num_gpu_blocks: int,
        block_size: int,
        window: int | None = None,
        preset: str = "vllm-v1",
        settings: dict[str, object] | None = None,
        **engine: object,
    ) -> None:
        torch.set_num_threads(1)
        longest = max(item.input_tokens + item.output_tokens for item in specs)
        engine.setdefault("max_num_batched_tokens", 2048)
        engine.setdefault("max_num_seqs", min(256, engine["max_num_batched_tokens"]))
        config = EngineConfig(
            num_gpu_blocks=num_gpu_blocks,
            block_size=block_size,
            max_model_len=max(longest, block_size),
            sliding_window=window,
            **engine,
        )
        made = PRESETS[preset](config)
        policy = replace(made.policy, swap=True) if config.num_cpu_blocks else made.policy
        shape = SHAPE
        if window is not None:
            kinds = tuple(replace(kind, window=window) for kind in SHAPE.attention)
            shape = replace(SHAPE, architecture="mistral", attention=kinds)
        self.specs = {item.request_id: item for item in specs}
        self.core = EngineCore(made.configure(config), policy=policy)
        settings = {"shape": shape, "checked": True, **(settings or {})}
        self.engine = RealEngine(RealSettings(**settings), specs)
        self.executor = self.engine.executor(self.core)
        self.requests: dict[str, Request] = {}
        self.now_fs = 0

    def add(self, *names: str) -> Request:
        """These requests (all, when none is named) arrive now; returns the last."""
        for name in names or self.specs:
            self.requests[name] = self.core.add(self.specs[name], self.now_fs).request
        return self.requests[name]

    def step(self) -> Done | None:
        """Plan, execute and commit one step; None when there is nothing to do."""
        plan = self.core.plan(self.now_fs, 1)
        if plan is None:
            return None
        done = Done(plan, plan.scheduled(0))
        result = self.executor.execute(plan)
        self.now_fs = plan.start_fs + result.durations.total_fs
        self.core.commit(plan, result, self.now_fs)
        return done
        return plan

    def serve(self) -> list[Done]:
        """Step until nobody is left; what the last step released is told by the next plan."""
        steps = []
        while self.core.num_unfinished:
            done = self.step()
            assert done is not None
            steps.append(done)
        return steps

    def run(self) -> list[Done]:
        """The same, and then the run is over: nothing may be left on the device or in the core."""
        steps = self.serve()
        self.executor.close(self.core.pending_releases)
        assert self.executor.leaked_blocks == 0
        assert self.core.pool.num_owned == self.core.pool.num_quarantined == 0
        return steps

    def answer(self, name: str) -> list[int]:
        return self.engine.tokens.answer(name, self.requests[name].num_output_tokens)

    def undisturbed(self, name: str) -> list[int]:
        """The same request's answer, alone in a pool with room to spare, as far as it got here."""
        own = replace(self.specs[name], max_tokens=None, cancel_after_s=None)
        length = own.input_tokens + own.output_tokens
        window = self.core.config.sliding_window
        alone = RealDriver(
            [own], num_gpu_blocks=length + 2, block_size=8, window=window, enable_prefix_caching=False,
            max_num_batched_tokens=length, max_num_seqs=1,
        )  # fmt: skip
        alone.add()
        alone.run()
        return alone.answer(name)[: len(self.answer(name))]

    def right_answers(self, *names: str) -> bool:
        return all(self.answer(name) == self.undisturbed(name) for name in names or self.requests)


# -- A. admission and preemption -------------------------------------------------------------------------------------------


def test_b02_a_chunk_takes_the_blocks_that_were_predicted():
    """bs 2, W 8: at lengths 4, 8, 12 and 16 two new blocks each, and the answer is that of a whole prompt."""
    driver = RealDriver(
        [spec("r", 16, 3)], num_gpu_blocks=12, block_size=2, window=8, max_num_batched_tokens=4, max_num_seqs=2
    )
    driver.add()
    seen: set[int] = set()
    for _ in range(4):
        (share,) = driver.step().shares
        table = set(share.block_table) - {0}
        assert len(table - seen) == 2
        seen |= table
        assert driver.executor.pool.tags.num_held == len(table)
    driver.run()
    assert driver.right_answers()


def test_b09_nobody_starts_while_somebody_is_swapped_out_and_a_full_cpu_pool_kills_nobody():
    specs = [spec(f"r{i}", 10 + i, 24) for i in range(8)]
    driver = RealDriver(
        specs, num_gpu_blocks=14, block_size=4, preset="vllm-v0", num_cpu_blocks=6, max_num_seqs=6, max_num_batched_tokens=64,
        enable_prefix_caching=False,
    )  # fmt: skip
    driver.add()
    away: set[str] = set()
    preempted: set[str] = set()
    swaps = recomputed = 0
    while driver.core.num_unfinished:
        plan = driver.step().plan
        away -= {name for name, _ in plan.swap_ins}
        starting = set(plan.admitted) - {name for name, _ in plan.swap_ins}
        assert not (away and starting), f"{starting} start while {away} are swapped out"
        saved = {name for name, _ in plan.swap_outs}
        swaps += len(saved)
        recomputed += len(set(plan.preempted) - saved)
        preempted |= set(plan.preempted)
        away |= saved
    driver.executor.close(driver.core.pending_releases)
    assert swaps and recomputed, "the CPU pool is to be used, and to be too small"
    assert {request.outcome for request in driver.requests.values()} == {Outcome.FINISHED}
    assert driver.executor.leaked_blocks == 0
    assert driver.right_answers(*preempted)


def test_b10_a_decode_without_room_ends_that_request_alone():
    """2 blocks of 256, a prompt that fills both: the first decode needs a third."""
    driver = RealDriver([spec("r", 512, 2), spec("other", 500, 3)], num_gpu_blocks=2, block_size=256)
    first = driver.add("r")
    driver.step()
    driver.add("other")
    driver.run()
    assert first.outcome is Outcome.FAILED
    assert "3 KV blocks of a pool of 2" in first.reason
    assert driver.requests["other"].outcome is Outcome.FINISHED
    assert driver.right_answers()


def test_b11_a_prompt_of_whole_blocks_always_computes_something():
    """bs 256, a prompt of 512 twice: the second finds 256 tokens and computes 256. No kernel is launched for no tokens."""
    named = {"content_ids": ("p", "q"), "content_block_tokens": 256}
    driver = RealDriver(
        [spec("first", 512, 2, **named), spec("second", 512, 2, **named)], num_gpu_blocks=8, block_size=256
    )
    driver.add("first")
    driver.serve()
    second = driver.add("second")
    assert driver.step().tokens == {"second": 256}
    driver.run()
    assert second.prefix_hit_tokens == 256
    assert driver.answer("first") == driver.answer("second") == driver.undisturbed("second")


def test_b11_many_copies_of_a_prompt_of_one_block():
    """The real row has 513 copies of 256 tokens; here 33 of 16."""
    specs = [spec(f"copy {i}", 16, 1, content_ids=("p",), content_block_tokens=16) for i in range(33)]
    driver = RealDriver(specs, num_gpu_blocks=40, block_size=16)
    driver.add()
    steps = driver.run()
    assert [count for step in steps for count in step.tokens.values()] == [16] * 33
    assert len({tuple(driver.answer(name)) for name in driver.requests}) == 1
    assert driver.answer("copy 0") == driver.undisturbed("copy 0")


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_b12_after_a_resume_the_device_holds_what_the_length_needs(enable_prefix_caching):
    """bs 256, 5 blocks: the younger is preempted with 257 tokens computed, and resumes with 258 to compute."""
    driver = RealDriver(
        [spec("older", 761, 20), spec("younger", 250, 15)],
        num_gpu_blocks=5, block_size=256, enable_prefix_caching=enable_prefix_caching,
    )  # fmt: skip
    driver.add()
    resumed = False
    while driver.core.num_unfinished:
        step = driver.step()
        resumed |= "younger" in step.plan.admitted and step.plan.step > 0
        for share in step.shares:
            assert len(share.block_table) == blocks_for(share.context_tokens + share.num_tokens, 256)
    driver.executor.close(driver.core.pending_releases)
    assert resumed
    assert driver.requests["younger"].num_preemptions == 1
    assert driver.executor.leaked_blocks == 0
    assert driver.right_answers()


def test_b15_victims_are_taken_one_by_one_and_nobody_s_answer_changes():
    """Pages of 8, 37 requests at a page boundary, 8 free: a deficit of 29. Each victim lowers the need by 1 and frees 1, so 15 go."""
    specs = [spec(f"r{i}", 8, 2) for i in range(37)]
    driver = RealDriver(specs, num_gpu_blocks=37 + 8, block_size=8, enable_prefix_caching=False)
    driver.add()
    driver.step()
    assert driver.core.pool.num_free == 8
    step = driver.step()
    names = [item.request_id for item in specs]
    assert list(step.plan.preempted) == names[:21:-1]
    assert list(step.tokens) == names[:22]
    driver.run()
    assert {request.outcome for request in driver.requests.values()} == {Outcome.FINISHED}
    assert driver.right_answers("r0", "r21", "r22", "r36")


# -- B. references, leaks, aborts ------------------------------------------------------------------------------------------


def test_b20_a_refused_admission_leaves_the_device_alone():
    """bs 16, 10 blocks: R3 hits six blocks and needs six more of five free. While it waits the device's book does not change for it,
    and what it hits in the end is what R1 wrote."""

    def content(*names: str) -> dict[str, object]:
        return {"content_ids": names, "content_block_tokens": 16}

    specs = [
        spec("R0", 48, 16, **content("a", "b", "c")),
        spec("R1", 96, **content(*"abcdef")),
        spec("R2", 16, 5),
        spec("R3", 144, 4, **content(*"abcdef")),
    ]
    driver = RealDriver(specs, num_gpu_blocks=10, block_size=16)
    for name in ("R0", "R1", "R2"):
        driver.add(name)
        driver.step()
    assert driver.core.pool.num_free == 5
    r3 = driver.add("R3")
    for _ in range(4):
        assert "R3" not in driver.step().tokens
        assert not any("R3" in driver.executor.pool.tags.holders(block) for block in range(1, 11))
    driver.run()
    assert (r3.outcome, r3.prefix_hit_tokens) == (Outcome.FINISHED, 96)
    assert driver.right_answers()


def test_b21_what_slid_out_of_a_window_costs_nothing():
    """A long decode in a window of 8 holds a bounded number of blocks, on the device too, and null blocks are never read."""
    driver = RealDriver([spec("r", 12, 60)], num_gpu_blocks=40, block_size=4, window=8)
    driver.add()
    held = []
    while driver.core.num_unfinished:
        driver.step()
        held.append(driver.executor.pool.tags.num_held)
    driver.executor.close(driver.core.pending_releases)
    assert max(held[5:]) <= 8 // 4 + 2
    assert driver.right_answers()


def test_b21_what_was_evicted_is_computed_again():
    named = {"content_ids": ("a", "b"), "content_block_tokens": 8}
    specs = [spec("first", 16, 2, **named), spec("filler", 40, 2), spec("again", 16, 2, **named)]
    driver = RealDriver(specs, num_gpu_blocks=6, block_size=8)
    for name in ("first", "filler", "again"):
        driver.add(name)
        driver.serve()
    driver.run()
    assert driver.requests["again"].prefix_hit_tokens == 0
    assert driver.answer("again") == driver.answer("first") == driver.undisturbed("first")


def test_b23_an_aborted_load_keeps_its_blocks_until_it_has_arrived():
    """A loads four blocks over a slow bus and is aborted; B may not have them before the copy is done, and keeps what it writes."""
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=8, dtype="float32")
    pool = PagedKVPool(layout, 8, checked=True)
    mover = BlockMover(pool, CpuBlockPool(layout, 8, pinned=False), Ops("cpu"))
    pool.begin_step(0)
    pool.assign("A", [1, 2, 3, 4], 32)
    pool.rows.strided[1:5].fill_(1)
    mover.swap_out("A", [1, 2, 3, 4])
    pool.release("A", [1, 2, 3, 4])
    mover.latency_steps = 2
    pool.assign("A", [5, 6, 7, 8], 32)
    load = mover.swap_in("A", [5, 6, 7, 8])
    pool.release("A", [5, 6, 7, 8], fence=load.fence)  # aborted with the copy under way
    with pytest.raises(
        FenceError, match=r"block 5 was given to B at step 0 before the fence of its release by A at step 0"
    ):
        pool.assign("B", [5], 0)
    for step in (0, 1):
        pool.begin_step(step)
        pool.end_step()
        mover.poll()
    pool.begin_step(2)
    pool.assign("B", [5, 6, 7, 8], 0)
    pool.rows.strided[5:9].fill_(2)
    mover.poll()
    assert (pool.rows.strided[5:9] == 2).all()


def test_b24_the_late_output_of_an_aborted_request_is_dropped_and_its_blocks_return_once():
    """Aborted with its step on the device: the step computes, its token counts for nobody, and the blocks come back once."""
    driver = RealDriver([spec("r", 8, 10), spec("other", 8, 10)], num_gpu_blocks=12, block_size=4)
    driver.add()
    driver.step()
    plan = driver.core.plan(driver.now_fs, 1)
    result = driver.executor.execute(plan)
    blocks = plan.scheduled(0)[0].block_table
    assert driver.core.abort("r", driver.now_fs, Outcome.ABORTED)
    driver.now_fs += result.durations.total_fs
    driver.core.commit(plan, result, driver.now_fs)
    driver.run()
    request = driver.requests["r"]
    assert (request.outcome, request.num_output_tokens) == (Outcome.ABORTED, 1)
    assert driver.right_answers()
    with pytest.raises(
        DoubleFreeError, match=r"block \d+ is released twice: first by r at step \d+, now by r at step \d+"
    ):
        driver.executor.pool.release("r", blocks)


def test_b28_all_samples_of_a_client_who_leaves_return_their_blocks():
    from sim.core.request import samples

    made = list(samples(replace(spec("r", 10, 9), n=4)))
    driver = RealDriver(made, num_gpu_blocks=40, block_size=4)
    driver.add()
    for _ in range(3):
        driver.step()
    held = driver.executor.pool.tags
    assert held.num_held == 2 + 4 * 1  # two whole prompt blocks shared, one more block each
    assert any(len(held.holders(block)) == 4 for block in range(1, 41))
    for sample in made:
        assert driver.core.abort(sample.request_id, driver.now_fs, Outcome.ABORTED)
    driver.run()
    assert driver.core.pool.num_free == 40
    assert held.num_held == 0


def test_b29_what_is_missing_is_counted_and_named():
    """A pool of 270,331: at idle 59 are missing. The report's count, and who had them."""
    tags = OwnerTags(270_331)
    tags.hold("a", range(1, 60), 7)
    tags.hold("b", range(100, 400), 8)
    tags.release("b", range(100, 400), 9)
    assert tags.num_held == 59
    with pytest.raises(
        IntegrityError, match=r"^59 blocks differ: block 1 is held by a on the device and by nobody in the tables"
    ):
        tags.compare([])


# -- C. peaks --------------------------------------------------------------------------------------------------------------


def test_b33_partial_results_of_splits_are_sized_before_the_pool(monkeypatch):
    """With four programs a sequence the workspace is larger by rows x heads x splits x (head_dim + 1) x 4 bytes, and suffices."""
    specs = [spec(f"r{i}", 6, 8) for i in range(4)]
    sizes = {}
    for splits in (1, 4):
        monkeypatch.setattr(real_engine, "decode_splits", lambda *given, splits=splits: splits)
        driver = RealDriver(specs, num_gpu_blocks=40, block_size=4, max_num_seqs=64, max_num_batched_tokens=64)
        driver.add()
        driver.run()
        assert driver.executor.oom_events == 0
        assert driver.right_answers()
        sizes[splits] = driver.executor.workspace.num_bytes
    partials = 64 * SHAPE.num_attention_heads * 4 * (SHAPE.head_dim + 1) * 4
    assert sizes[4] - sizes[1] <= partials + 512
    assert sizes[4] > sizes[1]


def followed(driver: RealDriver, step: int) -> OpTimeline:
    driver.executor.timeline = timeline = OpTimeline(step)
    driver.add()
    driver.run()
    return timeline


def test_b34_only_rows_that_are_sampled_have_logits():
    """A prompt of 600 tokens has one row of logits, not 600: none of [tokens, vocabulary] is ever made."""
    driver = RealDriver([spec("r", 600)], num_gpu_blocks=60, block_size=16)
    timeline = followed(driver, 0)
    (logits,) = {size for event in timeline.events for name, size in event.live if name == "logits"}
    row = SHAPE.vocab_size * torch.empty(0, dtype=driver.executor.model.dtype).element_size()
    assert logits == -(-row // 256) * 256
    assert max(event.allocated_bytes for event in timeline.events) < 600 * row


def test_b35_the_sampler_has_its_memory_before_the_first_request():
    """The very first step that samples takes nothing from the allocator: its memory is in the workspace, sized before the pool."""
    from gpu.batch import Sampling

    driver = RealDriver(
        [spec(f"r{i}", 5 + i, 3) for i in range(8)],
        num_gpu_blocks=40,
        block_size=4,
        settings={"checked": False, "sampling": Sampling(temperature=0.8, top_k=20, top_p=0.9)},
    )
    driver.add()
    plan = driver.core.plan(driver.now_fs, 1)
    meter = StorageMeter()
    with meter:
        result = driver.executor.execute(plan)
    assert len(result.tokens) == 8
    assert meter.by_operation == {}
    assert driver.executor.workspace.high_water_bytes <= driver.executor.workspace.num_bytes


def test_b37_captures_come_after_the_pool_and_before_the_first_step(monkeypatch):
    """An estimate made with a small pool is too small. Here graphs are captured over the pool that serves, and what they took is
    known before the first request."""
    trace: list[str] = []

    class Traced(PagedKVPool):
        def __init__(self, *given, **named):
            trace.append("pool")
            super().__init__(*given, **named)

    capture = real_engine.ForwardPass.capture
    monkeypatch.setattr(real_engine, "PagedKVPool", Traced)
    monkeypatch.setattr(
        real_engine.ForwardPass, "capture", lambda self, *given: (trace.append("graphs"), capture(self, *given))
    )
    driver = RealDriver([spec("r", 6, 3)], num_gpu_blocks=8, block_size=4, settings={"decode_graphs": True})
    trace.append("serving")
    driver.add()
    driver.run()
    assert trace == ["pool", "graphs", "serving"]


@pytest.mark.gpu
def test_b37_captures_take_no_more_than_the_ledger_says(cuda_device):
    shape = model_shape("llama-3.2-1b")
    config = EngineConfig(
        num_gpu_blocks=2000, block_size=16, max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=2048
    )
    engine = RealEngine(RealSettings(shape=shape, device=cuda_device), [spec("r", 6, 3)])
    executor = engine.executor(EngineCore(config))
    plan = graph_plan(64, 2048, enforce_eager=False)
    estimate = estimated_graph_bytes(replace(plan, piecewise_sizes=()), shape.num_layers, executor.workspace.num_bytes)
    assert 0 < executor.report()["graphs"]["captured_bytes"] <= estimate


def test_b38_the_device_is_measured_once_before_anything_is_taken(monkeypatch):
    """What is free is read with this process's context loaded and before its first tensor; who else is there counts as others."""
    gpu, trace = GPUS["h100-sxm-80gb"], []
    taken = 11 << 30

    def facts(device):
        trace.append("measure")
        return DeviceFacts(
            name="NVIDIA H100 80GB HBM3",
            compute_capability=gpu.compute_capability,
            sm_count=gpu.sm_count,
            total_bytes=gpu.total_bytes,
            free_bytes=gpu.total_bytes - context_bytes(gpu) - taken,
        )

    class Stop(Exception):
        pass

    seen = {}

    class Engine:
        def __init__(self, settings, requests, **named):
            trace.append("weights")
            seen["others"] = settings.others_bytes
            raise Stop

    monkeypatch.setattr(device_module, "find_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(device_module, "device_facts", facts)
    monkeypatch.setattr(real_engine, "RealEngine", Engine)
    monkeypatch.setattr(
        real_run.sim,
        "simulate",
        lambda scenario, **given: given["real"](seen.setdefault("resolved", resolve(scenario)), []),
    )
    scenario = Scenario(
        model="llama-3.1-8b",
        engine={"gpu_memory_utilization": 0.8},
        workload={"workload": "uniform", "num_requests": 2},
        run={"executor": "torch", "device": "cuda"},
    )
    with pytest.raises(Stop):
        real_run.run_scenario(scenario)
    assert trace == ["measure", "weights"]
    assert seen["others"] == taken
    resolved = seen["resolved"]
    assert resolved["gpu"]["gpu"] == "h100-sxm-80gb"
    assert resolved["engine"]["other_processes_bytes"] == taken
    assert resolved.ledger.line("other_processes").bytes == taken


def test_b42_a_prompt_twice_as_long_takes_twice_the_memory():
    """Grouped-query attention over a whole prompt: the scores of every pair of tokens would grow fourfold."""
    peaks = {}
    for length in (400, 800, 1600):
        driver = RealDriver([spec("r", length)], num_gpu_blocks=120, block_size=16)
        timeline = followed(driver, 0)
        peaks[length] = max(event.live_bytes for event in timeline.events if event.operation == "prefill_attention")
    assert peaks[1600] - peaks[800] == pytest.approx(2 * (peaks[800] - peaks[400]), rel=0.02)


def test_b43_logits_of_steps_gone_by_are_not_kept():
    """256 x 151,936 x 4 B a step were once kept alive by closures. After 5 steps and after 40 the same is live."""
    driver = RealDriver(
        [spec(f"r{i}", 5, 60) for i in range(4)], num_gpu_blocks=80, block_size=4, settings={"checked": False}
    )
    driver.add()
    meter, live = StorageMeter(), []
    for _ in range(40):
        with meter:
            driver.step()
        live.append(meter.live_bytes)
    assert live[5] == live[-1]


# -- D. allocator, namespaces ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fits", "failures"), [(True, 1), (False, 1), (True, 2)])
def test_b45_an_allocation_that_failed_beside_free_memory_is_made_again_once(fits, failures, monkeypatch):
    """Where memory had just come free the same step is tried once more, and only once; else it is taken back at once."""
    monkeypatch.setattr(executor_module, "freed_but_pending", lambda error, device: fits)
    driver = RealDriver([spec("r", 9, 6)], num_gpu_blocks=8, block_size=4)
    works, calls = driver.executor.model.ops.decode_attention, []

    def fails_first(call):
        calls.append(call)
        if len(calls) <= failures:
            raise torch.OutOfMemoryError(MESSAGE)
        return works(call)

    driver.executor.model.ops.decode_attention = fails_first
    driver.add()
    driver.run()
    report = driver.executor.report()
    again = fits and failures == 1
    assert report["oom_steps"] == (0 if again else 1)
    assert report["retried_steps"] == (1 if fits else 0)
    assert driver.right_answers()


def test_b47_namespaces_share_no_block():
    """The same tokens in the base model, with LoRA "X" and with salt "X": no hit across, and three copies in the pool."""
    named = {"content_ids": ("a", "b", "c"), "content_block_tokens": 4}
    spaces = {"base": Namespace(), "lora": Namespace(lora="X"), "salt": Namespace(salt="X")}
    specs = [
        spec(f"{name}{turn}", 12, 2, namespace=space, **named) for turn in (1, 2) for name, space in spaces.items()
    ]
    driver = RealDriver(specs, num_gpu_blocks=64, block_size=4)
    for turn in (1, 2):
        for name in spaces:
            driver.add(f"{name}{turn}")
            driver.serve()
    driver.run()
    assert [driver.requests[f"{name}1"].prefix_hit_tokens for name in spaces] == [0, 0, 0]
    assert [driver.requests[f"{name}2"].prefix_hit_tokens for name in spaces] == [8, 8, 8]
    assert driver.right_answers()
