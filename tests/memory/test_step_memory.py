"""What a step needs beside everything that is always there, and what happens when it is not there."""

from __future__ import annotations

import pytest

from sim.catalog.gpus import GIB, gpu
from sim.catalog.models import model_shape
from sim.core.batch_shape import BatchShape
from sim.core.config import ConfigError
from sim.memory import build_ledger
from sim.memory.device import Device
from sim.memory.faults import Fault, Faults, read_faults
from sim.memory.ops import Op, Peak
from sim.memory.rounding import MIB, allocated_bytes
from sim.memory.step_memory import PLAIN_ATTENTION, PROMPT_LOGPROBS, StepMemory
from sim.world.workspace import what_fails

LLAMA, H100 = model_shape("llama-3.1-8b"), gpu("h100-sxm-80gb")
LEDGER = build_ledger(LLAMA, H100, max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8192)
STEPS = StepMemory(LLAMA, H100, LEDGER.settings)
CUBLAS = 32 * MIB
VOCABULARY, HIDDEN, MLP, HEADS = 128_256, 4096, 14_336, 32


# -- one step, by hand ---------------------------------------------------------------------------------------------------


def test_a_wide_prefill_is_widest_in_the_mlp() -> None:
    """8,192 tokens: residual, input and output 3 x 4096 x 2 B, gate, up and product 3 x 14336 x 2 B, and cuBLAS's 32 MiB."""
    need = STEPS.need(BatchShape(prefill=((8192, 0),)))
    assert need.bytes == 8192 * 3 * HIDDEN * 2 + 8192 * 3 * MLP * 2 + CUBLAS == 939_524_096
    assert need.phase == "prefill"


def test_a_decode_step_is_widest_in_the_sampler() -> None:
    """100 rows: logits 2 B, fp32 copy, probabilities, noise and the kernel's rows 4 B each; hidden states of 200 rows."""
    need = STEPS.need(BatchShape(decode_seqs=100, decode_context_tokens=10**6, sampled_seqs=100))
    rows = 100 * VOCABULARY
    sizes = [rows * 2, 200 * HIDDEN * 2, CUBLAS, rows * 4, rows * 4, rows * 4, rows * 4]
    assert (need.bytes, need.phase) == (sum(map(allocated_bytes, sizes)), "sampler")


def test_the_rows_of_the_sampling_kernel_stop_at_the_multiprocessors() -> None:
    few, many = (
        STEPS.widest(BatchShape(decode_seqs=rows, decode_context_tokens=rows, sampled_seqs=rows)) for rows in (132, 256)
    )
    size = {peak.ops[-1].name: peak.ops[-1].requested_bytes for peak in (few, many)}
    assert size == {"rows of the top-k / top-p kernel": 132 * VOCABULARY * 4}


def test_the_step_that_start_up_profiles_needs_what_the_account_has_for_it() -> None:
    """But for what only the profile does: the kernel tuner's buffer, and random states to sample from."""
    by_phase = {peak.phase: peak for peak in LEDGER.phases if peak.profiled}
    sampler = by_phase["sampler"].bytes - allocated_bytes(256 * HIDDEN * 2)
    shape = BatchShape(prefill=((8192, 0),), sampled_seqs=256)
    assert STEPS.need(shape).bytes == max(sampler, 939_524_096)


def test_a_step_is_priced_as_its_operators_are_listed() -> None:
    for tokens, rows in ((1, 1), (17, 3), (2048, 64), (8192, 256)):
        shape = BatchShape(prefill=((tokens, 100),), decode_seqs=rows, decode_context_tokens=9, sampled_seqs=rows)
        widest = STEPS.widest(shape)
        assert STEPS.need(shape).bytes == widest.bytes == sum(op.allocated_bytes for op in widest.ops)


def test_prompt_log_probabilities_take_six_bytes_a_token_and_word() -> None:
    need = STEPS.need(BatchShape(prefill=((2048, 0),)), extra=frozenset({PROMPT_LOGPROBS}))
    assert need.bytes == allocated_bytes(2048 * VOCABULARY * 2) + allocated_bytes(2048 * VOCABULARY * 4)
    assert need.phase == "prompt_logprobs"


def test_plain_attention_writes_every_pair_of_a_chunk_and_its_context() -> None:
    """2,048 new tokens after 2,048: 32 heads x 2048 x 4096 scores, in fp32 and in bf16, the mask, and copies of key and value."""
    widest = STEPS.widest(BatchShape(prefill=((2048, 2048),)), extra=frozenset({PLAIN_ATTENTION}))
    pairs = 2048 * 4096
    sizes = {op.name: op.requested_bytes for op in widest.ops}
    assert sizes["attention scores"] == HEADS * pairs * 4
    assert sizes["attention probabilities"] == HEADS * pairs * 2
    assert sizes["attention mask"] == pairs * 2


def test_only_plain_attention_grows_within_a_stretch() -> None:
    shape = BatchShape(decode_seqs=8, decode_context_tokens=80_000, sampled_seqs=8)
    assert STEPS.need(shape, 1) == STEPS.need(shape, 1000)
    plain = frozenset({PLAIN_ATTENTION})
    first, last = STEPS.widest(shape, 1, plain), STEPS.widest(shape, 1001, plain)
    scores = [next(op for op in peak.ops if op.name == "attention scores").requested_bytes for peak in (first, last)]
    assert scores == [HEADS * 80_000 * 4, HEADS * 88_000 * 4]


def test_draft_tokens_add_the_verification_that_nobody_profiles() -> None:
    """Three drafts: 4 rows of bf16 logits a sequence, 3 rows in fp32, and their copy."""
    ledger = build_ledger(LLAMA, H100, max_num_seqs=256, max_num_batched_tokens=2048, num_speculative_tokens=3)
    need = StepMemory(LLAMA, H100, ledger.settings).need(
        BatchShape(decode_seqs=64, decode_context_tokens=64, sampled_seqs=64)
    )
    sizes = [64 * VOCABULARY * 4 * 2, 64 * VOCABULARY * 3 * 4, 64 * VOCABULARY * 3 * 4]
    assert (need.bytes, need.phase) == (sum(map(allocated_bytes, sizes)), "verification")


# -- the device ----------------------------------------------------------------------------------------------------------


def test_what_is_left_for_steps_and_all_holdings_are_the_whole_device() -> None:
    faults = Faults(
        Fault(kind=kind, gib=0.25)
        for kind in ("other_process", "non_torch", "leak", "fragmentation", "pending_frees", "cuda_graphs")
    )
    device = Device(LLAMA, H100, LEDGER, faults)
    held = device.at(0)
    parts = (held.tensors_bytes, held.private_bytes, held.kv_pool_bytes, held.stuck_bytes, held.pending_bytes)
    assert sum(parts) + held.non_torch_bytes + held.others_bytes + held.left_bytes == H100.total_bytes
    lines = ("peak_activation", "unused", "fragmentation", "outside_budget")
    assert device.workspace_bytes == sum(line.bytes for line in LEDGER.lines if line.name in lines)
    assert held.left_bytes == device.workspace_bytes - 6 * GIB // 4


def test_the_operator_that_fails_is_the_first_that_does_not_fit() -> None:
    ops = tuple(
        Op(name=name, requested_bytes=size * MIB, formula="") for name, size in (("a", 20), ("b", 40), ("c", 4))
    )
    report = what_fails(Peak(phase="prefill", ops=ops, profiled=True), 50 * MIB)
    assert (report.op, report.requested_bytes, report.free_bytes) == ("prefill: b", 40 * MIB, 30 * MIB)


def test_a_fault_grows_in_steps_and_gives_everything_back() -> None:
    fault = Fault(kind="leak", at_s=2.0, gib=1.0, every_s=3.0, until_s=10.0)
    second = 10**15
    times = (1.9, 2.0, 4.9, 5.0, 9.9, 10.0)
    assert [fault.held_bytes(round(time * second)) // GIB for time in times] == [0, 1, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "leek", "gib": 1.0}, "must be one of"),
        ({"kind": "leak"}, "must say how much"),
        ({"kind": "kernel_fallback", "gib": 1.0}, "leave gib out"),
        ({"kind": "leak", "gib": 1.0, "at": 3.0}, "no key 'at'"),
        ({"kind": "leak", "gib": "1"}, "gib is '1'"),
        ({"kind": "leak", "gib": 1.0, "at_s": 5.0, "until_s": 5.0}, "is not after"),
        ({"gib": 1.0}, "kind is None"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused_with_its_place(given: dict[str, str | float], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        read_faults([{"kind": "leak", "gib": 1.0}, given])
    assert "entry 2" in str(refused.value)
