"""Temporary memory by phase and operator: published sizes that name their cause."""

from __future__ import annotations

import pytest

from sim.catalog.gpus import gpu
from sim.catalog.layers import AttentionShape
from sim.memory import Ledger, Op, Peak, build_ledger
from sim.memory.activation import plain_attention_ops
from sim.memory.rounding import reserved_bytes
from sim.memory.workspaces import FLASHINFER_BUFFER_BYTES, flashinfer_request_bytes, split_kv_partials

GIB = 1 << 30
MIB = 1 << 20


def phase(ledger: Ledger, name: str) -> Peak:
    (found,) = (one for one in ledger.phases if one.phase == name)
    return found


def op(peak: Peak, name: str) -> Op:
    (found,) = (one for one in peak.ops if one.name == name)
    return found


def test_prompt_logprobs_cost_six_bytes_for_every_position_and_vocabulary_entry() -> None:
    # B34: 8,192 x 151,936 x (2 + 4) B = 6.96 GiB.
    peak = phase(build_ledger("qwen3-8b", "h100"), "prompt_logprobs")
    assert sum(one.requested_bytes for one in peak.ops) == 8192 * 151_936 * 6
    assert peak.bytes / GIB == pytest.approx(6.96, abs=0.01)
    assert not peak.profiled


def test_verification_rows_are_what_the_rejection_sampler_added() -> None:
    # vLLM issue 48037: seven draft tokens, 1,024 sequences: 1024 x 7 x 151,936 x 4 B = 4.06 GiB.
    ledger = build_ledger("qwen3-8b", "h100", num_speculative_tokens=7, max_num_seqs=1024)
    peak = phase(ledger, "verification")
    assert op(peak, "draft rows in fp32").requested_bytes == 1024 * 7 * 151_936 * 4
    assert op(peak, "target logits").requested_bytes == 1024 * 8 * 151_936 * 2
    assert any("verification" in warning for warning in ledger.warnings)


@pytest.mark.parametrize(
    ("rows", "vocabulary_bytes", "message_mib"), [(1024, 154_880 * 2, 304), (1024, 201_088 * 4, 786)]
)
def test_a_message_states_the_segment_and_not_the_tensor(rows: int, vocabulary_bytes: int, message_mib: int) -> None:
    assert reserved_bytes(rows * vocabulary_bytes) == message_mib * MIB


def test_the_fp32_copy_of_the_sampler_is_the_size_that_servers_fail_to_allocate() -> None:
    # 786 MiB = 1,024 rows x 201,088 x 4 B, gpt-oss on one H100 (vLLM issue 27508); B35: 501 MiB for Llama's vocabulary.
    assert op(phase(build_ledger("gpt-oss-20b", "h100"), "sampler"), "fp32 copy").reserved_bytes == 786 * MIB
    assert op(phase(build_ledger("llama-3.1-8b", "h100"), "sampler"), "fp32 copy").requested_bytes == 501 * MIB


@pytest.mark.parametrize(("heads", "tokens", "size"), [(32, 32_768, 137_438_953_472), (16, 27_671, 16 * 4 * 27_671**2)])
def test_plain_attention_writes_out_every_pair_of_tokens(heads: int, tokens: int, size: int) -> None:
    kind = AttentionShape(num_heads=heads, num_kv_heads=heads // 4, head_dim=128)
    assert plain_attention_ops(kind, tokens, 1, 2)[0].requested_bytes == size


def test_plain_attention_is_an_option_that_the_profile_pays_for() -> None:
    flash, plain = (
        build_ledger("llama-3.1-8b", "h100", plain_attention=option, max_model_len=8192) for option in (False, True)
    )
    assert flash.line("peak_activation").numbers.startswith("sampler")
    assert any(one.name == "attention mask" for one in plain.line("peak_activation").ops)
    assert plain.num_gpu_blocks < flash.num_gpu_blocks


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "card", "rows", "size"),
    [
        (32, 2, 256, "b200", 512, 536_346_624),  # B33: more than the 413,138,944 B that vLLM gives
        (32, 8, 128, "l40s", 8192, None),
    ],
)
def test_flashinfer_asks_for_its_workspace_by_formula(
    heads: int, kv_heads: int, head_dim: int, card: str, rows: int, size: int | None
) -> None:
    kind = AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    wanted = flashinfer_request_bytes(kind, gpu(card), rows, 512 if size else 1)
    if size is None:
        assert wanted > 64 * MIB  # an engine that gave it 64 MiB overflowed on an L40S
    else:
        assert wanted == size > FLASHINFER_BUFFER_BYTES == 413_138_944


def test_the_flashinfer_workspace_is_a_line_where_it_is_the_default_backend() -> None:
    assert build_ledger("llama-3.1-8b", "b200").line("kernel_workspaces").bytes == FLASHINFER_BUFFER_BYTES
    assert "kernel_workspaces" not in {line.name for line in build_ledger("llama-3.1-8b", "h100").lines}


def test_split_kv_partials_are_an_output_and_a_log_sum_exp_a_row_and_head() -> None:
    kind = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128)
    partials = split_kv_partials(kind, gpu("h100"), 1, 1)
    assert partials is not None
    assert partials.requested_bytes == 17 * 1 * 32 * 129 * 4  # 8 pairs on 132 multiprocessors: 17 parts
    assert split_kv_partials(kind, gpu("h100"), 256, 1) is None


def test_encoder_tokens_stay_alive_through_the_step() -> None:
    # B40: tokens x hidden x dtype x live copies. 16,384 tokens into a model of hidden size 4096.
    without, encoded = (
        build_ledger("llava-v1.6-mistral-7b", "h100", encoder_tokens=tokens, max_num_batched_tokens=16384)
        for tokens in (0, 16384)
    )
    gap = encoded.line("peak_activation").bytes - without.line("peak_activation").bytes
    assert gap == 2 * 16384 * 4096 * 2
    assert op(phase(encoded, "encoder"), "encoder tensors").requested_bytes == 3 * 16384 * 4096 * 2


def test_the_sampler_was_the_peak_before_0_17_and_less_after() -> None:
    # Qwen3-14B with 1,024 sequences: 5.64 GiB at 0.15 and 0.16, 2.23 at 0.17.
    for version, gib in (("0.15", 5.64), ("0.16", 5.64), ("0.17", 2.23)):
        ledger = build_ledger("qwen3-14b", "h100", engine_version=version, max_num_seqs=1024)
        assert ledger.line("peak_activation").gib == pytest.approx(gib, rel=0.01)
