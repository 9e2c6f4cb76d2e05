"""What a GPU would be told, seen without one: devices of all tensors, the order of copies and kernels, captures, what is compiled.

The runs are those of `kvtwin validate`, on `tests.support.fake_cuda`; each rule is also broken on purpose, so that it can fail.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from experiments.validation import SCENARIOS, run_for_real
from experiments.validation.worlds import preset
from gpu import real_engine
from gpu.batch import Sampling
from gpu.compile_check import launch_signature
from gpu.decode_graphs import CudaCapture
from gpu.decoder_config import DecoderConfig
from gpu.decoder_room import decode_splits
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from gpu.swap import BlockMover
from gpu.workspace import WorkspaceFullError
from sim.catalog.models import model_shape
from sim.core.config import EngineConfig
from sim.core.engine import EngineCore
from sim.core.plan import ScheduledRequest
from sim.core.request import RequestSpec
from tests.support.fake_cuda import FakeEvent, Log, fake_cuda

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


def run_on_fake(name: str, preset_name: str = "vllm-v1", **settings):
    """A small scenario on a CUDA device that is not there: its log, and what ran."""
    with fake_cuda() as log:
        run = run_for_real(SCENARIOS[name], preset(preset_name), device="cuda", **settings)
    return log, run


def made(log: Log, **changes):
    """An executor for small batches on the device of `log`, and the request that it may be given."""
    settings = RealSettings(**{"shape": model_shape("tiny-llama-test"), "device": "cuda", **changes})
    config = EngineConfig(
        num_gpu_blocks=40,
        block_size=16,
        max_model_len=256,
        max_num_seqs=24,
        max_num_batched_tokens=64,
        num_cpu_blocks=8,
    )
    spec = RequestSpec(request_id="r", arrival_s=0.0, input_tokens=200, output_tokens=9)
    return RealEngine(settings, [spec]).executor(EngineCore(config))


# -- devices ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "preset_name", "settings"),
    [
        ("swaps-0", "vllm-v0", {}),
        ("prefixes-0", "vllm-v1", {"checked": False, "sampling": Sampling(temperature=1.0, top_k=20, top_p=0.9)}),
        ("window-0", "vllm-v1", {"decode_graphs": False}),
        ("samples-0", "sglang", {"kv_cache_dtype": "fp8_per_token_head"}),
        ("pressure-1", "ladder", {"kv_cache_dtype": "fp8", "micro_batch_tokens": 4, "peak_step": 3}),
    ],
)
def test_everything_that_a_step_uses_is_on_the_device(name, preset_name, settings):
    """Operations between a tensor of the host and one of the device fail, and so do kernels that are given one of the host's."""
    log, run = run_on_fake(name, preset_name, **settings)
    assert run.leaked_blocks == 0
    assert run.fallbacks == 0
    assert {each for served in run.report["served"].values() for each in served} == {"triton"}
    assert log.of("launch")


@pytest.mark.parametrize("model", ["tiny-qwen2-test", "tiny-qwen3-test"])
def test_models_with_biases_and_normalised_queries_are_on_the_device_too(model):
    shape = replace(
        model_shape("tiny-llama-test"), qkv_bias=model == "tiny-qwen2-test", qk_norm=model == "tiny-qwen3-test"
    )
    with fake_cuda() as log:
        executor = made(log, shape=shape)
        executor.forward.run([ScheduledRequest("r", 40, 0, (1, 2, 3), samples=False)])
    assert log.of("replay", "launch")


def test_a_tensor_of_the_host_would_be_noticed():
    with fake_cuda() as log:
        executor = made(log)
        executor.forward.model.rope_table = torch.zeros(256, 16)
        with pytest.raises(Exception, match=r"must be on cuda:0|is on the cpu|two devices"):
            executor.forward.run([ScheduledRequest("r", 40, 0, (1, 2, 3), samples=False)])


def test_a_second_gpu_is_made_the_current_one():
    """Triton and events work on the current device, whatever their tensors are on."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # as the environment of a container may ask for
    with fake_cuda() as log:
        executor = made(log, device="cuda:1")
        assert executor.pool.arena.device == torch.device("cuda:1")
        assert log.device == 1
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        log.device = 0
        with pytest.raises(AssertionError, match="launched on another device"):
            executor.forward.run([ScheduledRequest("r", 40, 0, (1, 2, 3), samples=False)])


# -- copies ----------------------------------------------------------------------------------------------------------------


def misordered_copies(log: Log) -> list[str]:
    """Copies between the pools that do not wait for the kernels before them, or that the kernels after them do not wait for."""
    found, waited, open_copies = [], False, False
    for what, stream, _ in log.entries:
        if stream == "main":
            if what in ("launch", "replay"):
                waited = False  # the copy stream knows nothing of this kernel yet
                if open_copies:
                    found.append("a kernel does not wait for a copy")
            elif what == "wait event":
                open_copies = False
        elif what == "wait stream":
            waited = True
        elif what in ("copy cuda to cpu", "copy cpu to cuda"):
            open_copies = True
            if not waited:
                found.append("a copy does not wait for the kernels before it")
    return found


class Hasty(BlockMover):
    """Its copies do not wait for the compute stream (vLLM #31341)."""

    def _order_after_compute(self) -> None:
        pass


def test_copies_wait_for_kernels_and_kernels_for_copies(monkeypatch):
    log, run = run_on_fake("swaps-0", "vllm-v0", checked=False)
    assert run.report["swapped_out_blocks"] > 0
    assert run.report["swapped_in_blocks"] > 0
    assert misordered_copies(log) == []
    monkeypatch.setattr(real_engine, "BlockMover", Hasty)
    log, _ = run_on_fake("swaps-0", "vllm-v0", checked=False)
    assert "a copy does not wait for the kernels before it" in misordered_copies(log)


def test_a_copy_whose_fence_nobody_orders_is_seen(monkeypatch):
    monkeypatch.setattr("gpu.cpu_moves.CpuMoves._await", lambda self, fence: None)
    log, _ = run_on_fake("swaps-0", "vllm-v0", checked=False)
    assert "a kernel does not wait for a copy" in misordered_copies(log)


def hasty_refills(log: Log) -> int:
    """Copies of what the host has written from memory from which an earlier one may still be under way: it was written over. Blocks that
    come back from the CPU pool are two-dimensional, and written by nobody.
    """
    found, under_way = 0, set()
    for what, _, detail in log.entries:
        if what == "copy cpu to cuda" and detail[1][1].dim() == 1:
            source = detail[1][1].untyped_storage()._cdata
            found += source in under_way
            under_way.add(source)
        elif what in ("synchronize event", "synchronize", "read"):
            under_way.clear()
    return found


def three_parts_of_a_prompt(log: Log) -> None:
    """A chunk that samples nothing, in three passes: nothing is read back between them."""
    executor = made(log)
    log.entries.clear()
    executor.forward.run([ScheduledRequest("r", 60, 0, (1, 2, 3, 4), samples=False)], 3)
    assert executor.forward.num_passes == 3


def test_the_next_micro_batch_is_written_elsewhere_while_the_last_one_is_sent(monkeypatch):
    """The device copies pinned memory when it comes to it: by then the next pass would have been written over it. Nobody waits for that."""
    with fake_cuda() as log:
        three_parts_of_a_prompt(log)
    assert len(log.of("copy cpu to cuda")) == 3  # and each is one copy
    assert hasty_refills(log) == 0
    assert log.of("synchronize event", "synchronize", "read") == []
    monkeypatch.setattr(FakeEvent, "query", lambda self: True)
    with fake_cuda() as log:
        three_parts_of_a_prompt(log)
    assert hasty_refills(log) == 2


@pytest.mark.parametrize(("name", "preset_name"), [("swaps-0", "vllm-v0"), ("beams-0", "vllm-v1")])
def test_no_buffer_is_leased_again_while_a_copy_reads_it(name, preset_name):
    """Over whole runs, ids of moved and copied blocks included."""
    log, run = run_on_fake(name, preset_name, checked=False)
    assert run.report["swapped_out_blocks"] + run.report["copied_blocks"] > 0
    assert hasty_refills(log) == 0


def test_what_was_sampled_is_read_through_pinned_memory_and_waited_for():
    with fake_cuda() as log:
        executor = made(log)
        log.entries.clear()
        executor.forward.run([ScheduledRequest("r", 40, 0, (1, 2, 3), samples=True)])
    kinds = [what for what, _, _ in log.of("launch", "copy cuda to cpu", "record", "synchronize event")]
    assert kinds[-4:] == ["launch", "copy cuda to cpu", "record", "synchronize event"]


# -- captures --------------------------------------------------------------------------------------------------------------


def variant(launch) -> str:
    """What of a launch decides whether it is compiled anew."""
    return f"{launch.kernel.fn.__name__}: {launch_signature(launch, 90)}"


def test_graphs_share_a_stream_and_a_pool_and_capture_only_kernels_that_are_compiled():
    with fake_cuda() as log:
        executor = made(log)
    captures = log.of("capture")
    assert [entry[0] for entry in log.of("capture", "captured")] == ["capture", "captured"] * len(captures)
    assert len(captures) == len(executor.forward.graphs.sizes) > 3
    assert len({(stream, pool) for _, stream, pool in captures}) == 1
    compiled: set[str] = set()
    inside = False
    for what, _, detail in log.entries:
        if what in ("capture", "captured"):
            inside = what == "capture"
        elif what == "launch":
            assert not inside or variant(detail) in compiled
            compiled.add(variant(detail))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda: torch.zeros(4, device="cuda"), "allocates"),
        (lambda: torch.zeros(4, device="cuda").copy_(torch.zeros(4)), "allocates"),
        (lambda: torch.cuda.synchronize(), "synchronize inside a capture"),
        (lambda: torch.cuda.Event().query(), "an event is asked"),
    ],
)
def test_what_a_capture_forbids_is_noticed(fault, says):
    with fake_cuda() as log:
        capture = CudaCapture(torch.device("cuda", 0))

        def step() -> None:
            if log.capturing:
                fault()

        with pytest.raises(AssertionError, match=says):
            capture(step)


def test_steps_of_any_size_are_compiled_once():
    """Two to thirty rows, prompts behind decodes, tables of any width: each kernel is compiled once for each of its constants."""
    with fake_cuda() as log:
        executor = made(log, decode_graphs=False)
        warm = {variant(launch) for _, _, launch in log.of("launch")}
        log.entries.clear()
        for decodes, tokens, width in (
            (0, 2, 1),
            (1, 7, 2),
            (3, 30, 2),
            (4, 16, 16),
            (16, 17, 3),
            (23, 33, 5),
            (24, 0, 4),
        ):
            rows = [ScheduledRequest("r", 1, 12, (5 + row,), samples=True) for row in range(decodes)]
            prompt = [ScheduledRequest("r", tokens, 0, tuple(range(1, width + 1)), samples=False)] if tokens else []
            executor.workspace.reset()
            executor.forward.run([*rows, *prompt])
    assert {variant(launch) for _, _, launch in log.of("launch")} <= warm
    by_kernel = [name.partition(":")[0] for name in warm]
    assert by_kernel.count("prefill_attention_kernel") == 1
    assert by_kernel.count("decode_attention_kernel") == len({splits > 1 for splits in executor.model.splits})
    assert by_kernel.count("merge_splits_kernel") == 1
    assert by_kernel.count("rms_norm_kernel") == 2  # with and without a residual


def test_the_splits_of_a_graph_are_those_of_its_size():
    with fake_cuda() as log:
        executor = made(log)
    splits = executor.model.splits
    assert splits == (2,) * 24  # 256 tokens at most, of which a split has 128 or more
    grids = {launch.grid for _, _, launch in log.of("launch") if launch.kernel.fn.__name__ == "decode_attention_kernel"}
    heads = executor.model.config.shape.num_kv_heads
    assert grids == {(heads, size, splits[size - 1]) for size in executor.forward.graphs.sizes}


def test_one_sequence_alone_is_spread_over_the_device_and_a_large_batch_is_not_split():
    """Llama-3.1-8B on 132 multiprocessors: 8 programs would leave 124 of them idle."""
    with fake_cuda():
        engine = EngineConfig(
            num_gpu_blocks=9, block_size=16, max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=8192
        )
        config = DecoderConfig.of(model_shape("llama-3.1-8b"))
        splits = {count: decode_splits(config, engine, "cuda", count) for count in (1, 4, 16, 64, 128, 256)}
    # Three programs a multiprocessor keep its memory busy, five run at once: 64 x 8 and more of one program each need no split
    # (the graph of 256 is for sequences of 8192 tokens: 2048 programs, 68 of which would run alone at the end).
    assert splits == {1: 52, 4: 12, 16: 3, 64: 1, 128: 1, 256: 2}
    assert all(count * 8 * each >= 3 * 132 * 0.9 for count, each in splits.items())


def test_a_warm_up_that_fails_is_waited_for():
    """A batch too large for the workspace: its first kernels run on the stream of captures, beside which no step may run."""
    with fake_cuda() as log:
        executor = made(log, workspace_bytes=1500)
        assert executor.forward.graphs.sizes == ()
        captures = next(stream for what, stream, _ in log.entries if what == "launch" and stream != "main")
        with pytest.raises(WorkspaceFullError):
            executor.forward.run([ScheduledRequest("r", 1, 0, (1,), samples=True)])
    waited, inside = True, False
    for what, stream, detail in log.entries:
        if what in ("capture", "captured"):
            inside = what == "capture"
        elif what == "launch" and stream == captures:
            waited &= inside  # what is captured does not run
        elif what == "wait stream" and (stream, detail) == ("main", captures):
            waited = True
        elif what == "launch":
            assert waited
