"""The ledger: lines that add up, identities of the engine, and what happens when it does not fit."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.catalog.gpus import GPUS
from sim.catalog.models import MODELS
from sim.core.config import ConfigError
from sim.memory import build_ledger
from sim.memory.graphs import graph_plan
from sim.memory.rounding import MIB, allocated_bytes

GIB = 1 << 30


@given(
    model=st.sampled_from(
        ["llama-3.1-8b", "qwen2.5-7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite", "tiny-llama-test"]
    ),
    gpu=st.sampled_from(sorted(GPUS)),
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    utilization=st.floats(0.85, 0.95),
    block_size=st.sampled_from([1, 16, 32]),
    kv=st.sampled_from(["auto", "fp8", "nvfp4"]),
    version=st.sampled_from(["0.6.4", "0.7", "0.8", "0.15", "0.19", "0.29", "sglang-0.5"]),
)
def test_the_lines_add_up_to_the_physical_total_and_less_than_a_block_is_lost(
    model: str, gpu: str, tp: int, pp: int, utilization: float, block_size: int, kv: str, version: str
) -> None:
    try:
        ledger = build_ledger(
            model, gpu, tensor_parallel_size=tp, pipeline_parallel_size=pp, gpu_memory_utilization=utilization,
            block_size=block_size, kv_cache_dtype=kv, engine_version=version,
        )  # fmt: skip
    except ConfigError as error:
        if "no memory is left" not in str(error):
            raise
        return
    assert sum(line.bytes for line in ledger.lines) == ledger.total_bytes
    assert sum(line.bytes for line in ledger.lines if line.inside_budget) == ledger.budget_bytes
    assert 0 <= ledger.line("unused").bytes < ledger.block_bytes
    assert ledger.line("kv_pool").bytes == ledger.num_gpu_blocks * ledger.block_bytes
    if not ledger.layout.is_hybrid:
        assert ledger.block_bytes == block_size * ledger.kv_bytes_per_token
        assert ledger.kv_tokens == ledger.num_gpu_blocks * block_size
    for line in ledger.lines:
        assert not line.ops or sum(op.allocated_bytes for op in line.ops) == line.bytes
        assert all(op.requested_bytes <= op.allocated_bytes <= op.reserved_bytes for op in line.ops if op.is_tensor)
    peak = max(phase.bytes for phase in ledger.phases if phase.profiled)
    assert ledger.line("peak_activation").bytes == peak
    assert all(line.formula and line.numbers for line in ledger.lines)


def test_concurrency_counts_whole_blocks_of_the_longest_request() -> None:
    ledger = build_ledger("llama-3.1-8b", "h100", num_gpu_blocks_override=3852, max_model_len=40_000)
    # vLLM 0.6.4 printed 1.54x for 3,852 blocks and 40,000 tokens.
    assert round(ledger.max_concurrency, 2) == 1.54


def test_the_estimated_longest_sequence_is_the_pool_in_tokens() -> None:
    # vLLM: 0.51 GiB of KV for Qwen3-0.6B is an estimated maximum length of 4,800 tokens, and 40,960 tokens need 4.38 GiB.
    ledger = build_ledger("qwen3-0.6b", "h100", kv_cache_memory_bytes=round(0.5127 * GIB))
    assert ledger.max_model_len_that_fits == 4_800
    assert ledger.max_model_len == 4_800
    assert any("4.38 GiB" in warning for warning in ledger.warnings)


def test_fp8_kv_holds_twice_the_tokens_in_the_same_bytes() -> None:
    wide, narrow = (build_ledger("llama-3.1-8b", "h100", kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    assert narrow.kv_tokens // 32 == wide.kv_tokens // 16


def test_the_poorest_pipeline_stage_sizes_every_stage() -> None:
    ledger = build_ledger("llama-3.1-8b", "l4", pipeline_parallel_size=2, engine_version="0.19", max_model_len=8192)
    assert ledger.kv_bytes_per_token == 65_536
    # The last stage samples, so its peak is the larger one; the first would have had room for more.
    assert ledger.line("peak_activation").numbers.startswith("sampler")


def test_latent_attention_gains_no_kv_room_per_token_from_more_ranks() -> None:
    assert build_ledger("deepseek-v3", "h200", tensor_parallel_size=8).kv_bytes_per_token == 70_272


def test_without_chunked_prefill_the_profile_runs_whole_prompts() -> None:
    chunked, whole = (
        build_ledger("llama-3.1-8b", "a100", max_model_len=32_768, enable_chunked_prefill=chunk)
        for chunk in (True, False)
    )
    assert (chunked.max_num_batched_tokens, whole.max_num_batched_tokens) == (2048, 32_768)
    assert whole.num_gpu_blocks < chunked.num_gpu_blocks


def test_defaults_follow_the_gpu() -> None:
    assert build_ledger("llama-3.1-8b", "h100").max_num_seqs == 1024
    assert build_ledger("llama-3.1-8b", "a100").max_num_seqs == 256
    assert build_ledger("llama-3.1-8b", "h100", max_num_batched_tokens=512).max_num_seqs == 512


def test_graphs_come_off_the_pool_from_release_0_21_on_and_lie_outside_before() -> None:
    old, new = (build_ledger("llama-3.1-8b", "h100", engine_version=version) for version in ("0.19", "0.21"))
    assert not old.line("cuda_graphs").inside_budget
    assert new.line("cuda_graphs").inside_budget
    assert build_ledger("llama-3.1-8b", "h100", enforce_eager=True).line("cuda_graphs").bytes == 0


def test_captured_sizes_are_those_an_engine_lists() -> None:
    # The recorded vLLM 0.19 run with 256 sequences: 1, 2, 4, every 8th below 256, every 16th up to 512.
    plan = graph_plan(256, 2048, enforce_eager=False)
    assert plan.piecewise_sizes[:5] == (1, 2, 4, 8, 16)
    assert len(plan.piecewise_sizes) == 51
    assert plan.piecewise_sizes[-1] == 512
    assert plan.full_sizes[-1] == 256
    assert graph_plan(256, 2048, enforce_eager=True).count == 0


@pytest.mark.parametrize(
    ("requested", "allocated"),
    [
        (1, 512),
        (512, 512),
        (5 * MIB + 1, 5 * MIB + 512),
        (int(31.5 * MIB), 32 * MIB),
        (int(24.5 * MIB), int(24.5 * MIB)),
        (48 * MIB, 48 * MIB),
    ],
)
def test_the_allocator_keeps_a_remainder_of_up_to_one_mib(requested: int, allocated: int) -> None:
    assert allocated_bytes(requested) == allocated


def test_a_model_that_does_not_fit_is_refused_with_the_numbers_and_a_way_out() -> None:
    with pytest.raises(ConfigError) as error:
        build_ledger("llama-3.1-70b", "h100")
    message = str(error.value)
    for words in ("weights 131.4", "exceed 0.92 x 79.19 GiB", "no memory is left for KV", "--tensor-parallel-size 4"):
        assert words in message
    assert build_ledger("llama-3.1-70b", "h100", tensor_parallel_size=4).kv_tokens >= 8192


def test_a_length_that_does_not_fit_is_refused_when_asked_for_and_lowered_when_not() -> None:
    ledger = build_ledger("llama-3.1-8b", "rtx-4090")
    assert ledger.max_model_len == ledger.kv_tokens < 131_072
    assert any("lowered" in warning for warning in ledger.warnings)
    with pytest.raises(ConfigError, match=f"--max-model-len {ledger.kv_tokens} or less.*--tensor-parallel-size 2"):
        build_ledger("llama-3.1-8b", "rtx-4090", max_model_len=131_072)


def test_an_override_sets_the_pool_and_keeps_the_length() -> None:
    ledger = build_ledger("llama-3.1-8b", "h100", num_gpu_blocks_override=200)
    assert (ledger.num_gpu_blocks, ledger.kv_tokens, ledger.max_model_len) == (200, 3200, 131_072)
    assert any("rejected when they arrive" in warning for warning in ledger.warnings)


def test_an_override_beyond_the_budget_warns_and_beyond_the_device_is_called_a_what_if() -> None:
    fits = build_ledger("llama-3.1-8b", "h100").num_gpu_blocks
    assert any(
        "out-of-memory" in w for w in build_ledger("llama-3.1-8b", "h100", num_gpu_blocks_override=fits + 1).warnings
    )
    beyond = build_ledger("llama-3.1-8b", "h100", num_gpu_blocks_override=100_000)
    assert beyond.num_gpu_blocks == 100_000
    assert any("what-if" in w and f"{fits} blocks fit the budget" in w for w in beyond.warnings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization is 1.1"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_model_len": 200_000}, "131072"),
        ({"tensor_parallel_size": 3}, "sizes that do: 1, 2, 4, 8, 16"),
        ({"pipeline_parallel_size": 33}, "32 layers"),
        ({"kv_cache_dtype": "fp7"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "latent"),
        ({"quantization": "awk"}, "awq"),
        ({"dtype": "int3"}, "dtype"),
        ({"engine_version": "latest"}, "0.29"),
        ({"engine_version": "0.2"}, "older than 0.6"),
        ({"kv_cache_memory_bytes": 1}, "less than one block"),
        ({"kv_cache_memory_bytes": 80 << 30}, "more than the 79.19 GiB"),
        ({"engine_version": "sglang-0.2"}, "older than SGLang 0.4"),
        ({"engine_version": "0.19-v0"}, "V0 engine from 0.6.5 to 0.10"),
        ({"watermark": 1.0}, "watermark is 1.0"),
        ({"max_loras": -1}, "max_loras is -1"),
        ({"encoder_tokens": -1}, "encoder_tokens is -1"),
        ({"speculative_model": "llama-3.2-1b"}, "num_speculative_tokens 0"),
        ({"speculative_model": "qwen3-0.6b", "num_speculative_tokens": 3}, "151936"),
        ({"speculative_model": "llama-3.2-1b", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}, "is 2"),
        ({"other_processes_bytes": 20 << 30}, "use --gpu-memory-utilization 0.74 or less"),
        ({"other_processes_bytes": 200 << 30}, "nothing is left for this engine"),
    ],
)
def test_bad_settings_are_one_message(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_ledger("llama-3.1-8b", "h100", **settings)  # type: ignore[arg-type]
    assert words in str(error.value)


def test_defaults_follow_the_release() -> None:
    assert build_ledger("llama-3.1-8b", "h100", engine_version="0.19").gpu_memory_utilization == 0.9
    assert build_ledger("llama-3.1-8b", "h100").gpu_memory_utilization == 0.92
    # V0 ran whole prompts up to 32,768 tokens, and chunks of 2,048 above.
    assert (
        build_ledger("llama-3.1-8b", "h100", engine_version="0.7", max_model_len=16384).max_num_batched_tokens == 16384
    )
    assert build_ledger("llama-3.1-8b", "h100", engine_version="0.7").max_num_batched_tokens == 2048
    # SGLang: 10 GiB at least are set aside above 60 GiB, here 512 + 1.5 * 8192 + 128 + 2 * 256 MB.
    sglang = build_ledger("llama-3.1-8b", "h100", engine_version="sglang-0.5")
    assert sglang.gpu_memory_utilization == round(1 - (512 + 1.5 * 8192 + 128 + 512) / (79.19 * 1024), 3)


def test_what_counts_as_the_engine_s_changed_with_the_release() -> None:
    old, new = (build_ledger("llama-3.1-8b", "h100", engine_version=version) for version in ("0.8.5", "0.12"))
    assert old.line("context").inside_budget
    assert not new.line("context").inside_budget
    # B38: the same buffers, counted or not by when the base line is taken.
    counted, before = (
        build_ledger("llama-3.1-8b", "h100", tensor_parallel_size=2, engine_version=version)
        for version in ("0.10.2", "0.12")
    )
    assert counted.line("communication").gib - before.line("communication").gib > 1.2


def test_a_v1_release_falls_back_to_v0_on_an_old_gpu() -> None:
    # DeepSeek-R1-0528-Qwen3-8B on four RTX 2080 Ti, vLLM 0.8.5: the sampler sorts, 1.45 GiB.
    ledger = build_ledger(
        "deepseek-r1-0528-qwen3-8b", "rtx-2080-ti", tensor_parallel_size=4, engine_version="0.8.5",
        max_num_batched_tokens=8192, max_model_len=65536, gpu_memory_utilization=0.93, enforce_eager=True,
    )  # fmt: skip
    assert ledger.line("peak_activation").gib == pytest.approx(1.45, abs=0.01)
    assert ledger.line("kv_pool").ops[1].name == "safety watermark"


def test_the_draft_model_is_on_the_ledger_of_the_rank_that_holds_it() -> None:
    # B39: 70B over four ranks, 8B on the first: 81,920 + 131,072 bytes a token there, and 14.96 GiB of weights more.
    ledger = build_ledger(
        "llama-3.1-70b", "h100", tensor_parallel_size=4, speculative_model="llama-3.1-8b", num_speculative_tokens=4,
    )  # fmt: skip
    assert ledger.kv_bytes_per_token == 212_992
    assert ledger.line("draft_weights").ops[0].requested_bytes == 8_030_261_248 * 2
    alone = build_ledger("llama-3.1-70b", "h100", tensor_parallel_size=4)
    assert ledger.num_gpu_blocks < alone.num_gpu_blocks * 81_920 / 212_992


def test_adapter_slots_are_thin_matrices_beside_every_matrix() -> None:
    ledger = build_ledger("llama-3.1-8b", "h100", max_loras=4, max_lora_rank=16)
    # A layer: QKV 3 x 4096 + 6144, output 8192, gate and up 2 x (4096 + 14336), down 14336 + 4096; 32 layers, 4 slots, rank 16, bf16.
    numbers = 3 * 4096 + 6144 + 8192 + 2 * (4096 + 14336) + 14336 + 4096
    assert ledger.line("lora").ops[0].requested_bytes == 4 * 16 * 32 * numbers * 2
    with pytest.raises(ConfigError, match="experts"):
        build_ledger("mixtral-8x7b", "h200", max_loras=1)


def test_other_processes_shrink_what_is_free_and_not_the_budget() -> None:
    alone, shared = (
        build_ledger("llama-3.1-8b", "h100", gpu_memory_utilization=0.5, other_processes_bytes=size)
        for size in (0, 20 << 30)
    )
    assert shared.num_gpu_blocks == alone.num_gpu_blocks
    assert shared.line("other_processes").bytes == 20 << 30
    assert not shared.line("other_processes").inside_budget


def test_a_missing_line_names_those_there_are() -> None:
    with pytest.raises(KeyError, match="kv_pool"):
        build_ledger("llama-3.1-8b", "h100").line("kv")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_has_a_ledger_somewhere_that_can_be_pickled(name: str) -> None:
    # A trillion parameters in fp8 fill eight of the largest cards; the tiny model's four heads divide over one.
    ranks = 1 if name == "tiny-llama-test" else 8
    try:
        ledger = build_ledger(name, "mi300x", tensor_parallel_size=ranks)
    except ConfigError:
        ledger = build_ledger(name, "mi300x", tensor_parallel_size=2)
    assert ledger.num_gpu_blocks > 0
    assert pickle.loads(pickle.dumps(ledger)) == ledger
