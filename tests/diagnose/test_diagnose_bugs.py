"""Public bug reports: the right answer that each must get. The names say which report; numbers are those of the reports."""

import pytest

from experiments.investigator import Cause, Phase, diagnose_text
from experiments.investigator.sizes import GIB, MIB

FULL = "GPU 0 has a total capacity of {total} GiB of which {free} is free."


def stats(running, waiting, usage, lines=5):
    line = (
        "INFO 05-07 12:00:00 [loggers.py:111] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 31.0 "
        "tokens/s, Running: {} reqs, Waiting: {} reqs, GPU KV cache usage: {}%, Prefix cache hit rate: 0.0%\n"
    )
    return line.format(running, waiting, usage) * lines


def says(diagnosis, text):
    return any(text in sentence for sentence in diagnosis.evidence)


def test_b06_nothing_runs_and_requests_wait_is_a_blocked_scheduler_not_a_full_pool():
    diagnosis = diagnose_text(stats(0, 5, 0.0))
    assert diagnosis.cause is Cause.BLOCKED
    assert any(line.startswith("KV capacity") for line in diagnosis.ruled_out)


def test_b16_a_pool_mostly_free_while_requests_wait_is_reservation_bound_not_memory_bound():
    diagnosis = diagnose_text(stats(1, 31, 3.1))
    assert diagnosis.cause is Cause.RESERVATION
    assert "not memory-bound" in diagnosis.headline


def test_b29_missing_slots_are_counted():
    diagnosis = diagnose_text(
        "ValueError: token_to_kv_pool_allocator memory leak detected! self.max_total_num_tokens=270331, available_size=644, "
        "evictable_size=269628, protected_size=0"
    )
    assert (diagnosis.cause, diagnosis.phase) == (Cause.LEAK, Phase.AFTER_RELEASE)
    assert says(diagnosis, "59 slots are missing")


def test_b29_the_opposite_sign_is_a_double_release():
    diagnosis = diagnose_text(
        "ValueError: token_to_kv_pool_allocator memory leak detected!\n"
        "self.max_total_num_tokens=1000, available_size=1002, evictable_size=0, protected_size=0"
    )
    assert diagnosis.cause is Cause.DOUBLE_RELEASE
    assert any(line.startswith("leak") for line in diagnosis.ruled_out)


@pytest.mark.parametrize(("needed", "there"), [(536_346_624, 413_138_944), (283_115_520, 268_435_456)])
def test_b33_a_fixed_workspace_is_too_small_and_the_gpu_is_not_full(needed, there):
    diagnosis = diagnose_text(
        f"RuntimeError: Buffer overflow when allocating memory for batch_prefill_tmp_v with size {needed} and alignment 16, "
        f"but only {there} bytes available in AlignedAllocator."
    )
    assert diagnosis.cause is Cause.TRANSIENT_PEAK
    assert "workspace" in diagnosis.detail
    assert any(f"{-(-needed // MIB)} MiB" in fix.change for fix in diagnosis.fixes)


def test_b34_logits_of_a_prompt_are_named_by_rows_times_vocabulary():
    # 8192 tokens x 151936 x 4 B = 4.64 GiB
    diagnosis = diagnose_text(
        f"CUDA out of memory. Tried to allocate 4.64 GiB. {FULL.format(total='79.11', free='3.00 GiB')}",
        model="qwen3-8b",
        max_num_batched_tokens=8192,
    )
    assert diagnosis.cause is Cause.TRANSIENT_PEAK
    assert says(diagnosis, "8192 rows x 151936 vocabulary x 4 B")


def test_b34_a_prompt_of_odd_length_is_named_by_the_traceback_and_its_rows():
    # vocabulary 163840, 3.82 GiB of fp32 log-probabilities: about 6,258 rows
    diagnosis = diagnose_text(
        "vocab_size=163840\n"
        '  File "/vllm/v1/worker/gpu_model_runner.py", line 9, in _get_prompt_logprobs_dict\n'
        '  File "/vllm/v1/sample/sampler.py", line 80, in compute_logprobs\n'
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.82 GiB. {FULL.format(total='79.11', free='3.22 GiB')}"
    )
    assert (diagnosis.cause, diagnosis.phase) == (Cause.TRANSIENT_PEAK, Phase.SAMPLING)
    assert "log-probabilities" in diagnosis.detail
    assert says(diagnosis, "6,258 rows")


def test_b34_a_chunk_gathered_over_ranks_is_named_with_the_vocabulary_alone():
    diagnosis = diagnose_text(
        "vocab_size=154880, prompt_logprobs=20, TP4\n"
        f"CUDA out of memory. Tried to allocate 304.00 MiB. {FULL.format(total='94.97', free='218.81 MiB')} Of the allocated memory "
        "91.19 GiB is allocated by PyTorch, with 118.00 MiB allocated in private pools (e.g., CUDA Graphs), and 744.36 MiB is "
        "reserved by PyTorch but unallocated."
    )
    assert diagnosis.cause is Cause.TRANSIENT_PEAK
    assert says(diagnosis, "1024 rows x 154880 vocabulary x 2 B = 302.50 MiB")
    assert any("fragmentation" in line for line in diagnosis.ruled_out)


def test_b35_the_sampler_s_buffers_are_named():
    # 1024 sequences x 128256 x 4 B = 501 MiB, a segment of 502
    diagnosis = diagnose_text(
        '  File "gpu_model_runner.py", line 2000, in _dummy_sampler_run\n'
        f"CUDA out of memory. Tried to allocate 502.00 MiB. {FULL.format(total='79.19', free='310.00 MiB')}",
        model="llama-3.1-8b",
        gpu="h100",
    )
    assert (diagnosis.phase, diagnosis.cause) == (Phase.SAMPLER_WARM_UP, Cause.TRANSIENT_PEAK)
    assert says(diagnosis, "1024 rows x 128256 vocabulary x 4 B")
    fewer = next(fix for fix in diagnosis.fixes if fix.change == "--max-num-seqs 512")
    assert fewer.effect_gib > 0.4 and fewer.effect_tokens > 0


def test_b37_graphs_needed_more_than_was_estimated_and_a_hundredth_of_utilisation_mends_it():
    diagnosis = diagnose_text(
        "gpu_memory_utilization=0.98\nCapturing CUDA graphs (mixed prefill-decode, PIECEWISE):  40%\n"
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 136.00 MiB. {FULL.format(total='22.36', free='120.88 MiB')}"
    )
    assert (diagnosis.phase, diagnosis.cause) == (Phase.GRAPH_CAPTURE, Cause.CUDA_GRAPHS)
    assert says(diagnosis, "15.12 MiB")
    first = diagnosis.fixes[0]
    assert first.change == "--gpu-memory-utilization 0.97"
    assert first.effect_gib == pytest.approx(0.2236)


def test_b39_a_draft_model_that_the_account_left_out():
    diagnosis = diagnose_text(
        "speculative_model='draft-8b', num_speculative_tokens=5, gpu_memory_utilization=0.9\n"
        f"CUDA out of memory. Tried to allocate 1.50 GiB. {FULL.format(total='44.53', free='263.25 MiB')} Including non-PyTorch memory, "
        "this process has 44.25 GiB memory in use. Of the allocated memory 40.62 GiB is allocated by PyTorch, with 324.00 MiB "
        "allocated in private pools (e.g., CUDA Graphs), and 1.57 GiB is reserved by PyTorch but unallocated."
    )
    assert diagnosis.cause is Cause.BUDGET
    assert "draft model" in diagnosis.detail


def test_b40_the_multimodal_encoder_is_profiled_with_the_largest_input():
    diagnosis = diagnose_text(
        '  File "gpu_model_runner.py", line 3000, in profile_run\n  File "qwen2_5_vl.py", line 10, in get_multimodal_embeddings\n'
        f"CUDA out of memory. Tried to allocate 10.00 GiB. {FULL.format(total='79.25', free='5.00 GiB')}"
    )
    assert (diagnosis.phase, diagnosis.cause) == (Phase.PROFILING, Cause.TRANSIENT_PEAK)
    assert diagnosis.detail == "multimodal encoder"
    assert any("limit-mm-per-prompt" in fix.change for fix in diagnosis.fixes)


@pytest.mark.parametrize(
    "text",
    [
        "a prompt of ~27k tokens, 16 heads. CUDA out of memory. Tried to allocate 45.64 GiB. ",
        "prompt length 32768, 32 heads: Attempting to allocate 137438953472 bytes",
    ],
)
def test_b42_the_square_root_of_the_size_is_the_prompt(text):
    diagnosis = diagnose_text(text)
    assert (diagnosis.phase, diagnosis.cause) == (Phase.PREFILL, Cause.KERNEL_FALLBACK)


def test_b42_another_prompt_length_is_no_fallback():
    diagnosis = diagnose_text("a prompt of 3000 tokens, 16 heads. CUDA out of memory. Tried to allocate 45.64 GiB.")
    assert diagnosis.cause is not Cause.KERNEL_FALLBACK


def snapshot(*blocks, pool=(0, 0)):
    total = sum(size for size, _ in blocks)
    listed = [{"size": size, "state": state} for size, state in blocks]
    return {"segments": [{"total_size": total, "segment_pool_id": pool, "blocks": listed}]}


FOUR_GIB = (
    f"CUDA out of memory. Tried to allocate 4.00 GiB. {FULL.format(total='79.11', free='0.10 GiB')} Of the allocated memory 74.00 GiB "
    "is allocated by PyTorch, and 4.40 GiB is reserved by PyTorch but unallocated."
)


def test_b45_a_free_that_waits_for_a_stream_is_mended_by_one_retry():
    waiting = snapshot((74 * GIB, "active_allocated"), (4 * GIB, "active_pending_free"))
    diagnosis = diagnose_text(FOUR_GIB, snapshot=waiting)
    assert diagnosis.cause is Cause.PENDING_FREES
    assert "retry" in diagnosis.fixes[0].change and "once" in diagnosis.fixes[0].change


def test_b45_the_same_figures_in_pieces_are_fragmentation():
    pieces = snapshot((74 * GIB, "active_allocated"), *[(GIB // 2, "inactive")] * 8)
    diagnosis = diagnose_text(FOUR_GIB, snapshot=pieces)
    assert diagnosis.cause is Cause.FRAGMENTATION
    assert says(diagnosis, "512.00 MiB")


def test_b45_without_a_snapshot_it_says_to_record_one():
    diagnosis = diagnose_text(FOUR_GIB)
    assert any("snapshot" in text for text in diagnosis.next_to_record)
    assert any(line.startswith("pending frees") for line in diagnosis.ruled_out)


def test_free_blocks_of_graph_pools_cannot_serve_ordinary_requests():
    diagnosis = diagnose_text(
        f"CUDA out of memory. Tried to allocate 2.00 MiB. {FULL.format(total='47.53', free='896.00 KiB')} Of the allocated memory 47.00 "
        "GiB is allocated by PyTorch, with 46.22 GiB allocated in private pools (e.g., CUDA Graphs), and 149.10 MiB is reserved by "
        "PyTorch but unallocated."
    )
    assert diagnosis.cause is Cause.CUDA_GRAPHS


def test_a_snapshot_alone_tells_the_failure_in_its_history():
    pieces = snapshot((20 * GIB, "active_allocated"), *[(GIB, "inactive")] * 3)
    pieces["device_traces"] = [[{"action": "oom", "size": 2 * GIB, "device_free": 100 * MIB}]]
    diagnosis = diagnose_text("", snapshot=pieces)
    assert diagnosis.cause is Cause.FRAGMENTATION


def test_a_snapshot_without_a_failure_shows_what_only_the_allocator_holds():
    diagnosis = diagnose_text("", snapshot=snapshot((2 * GIB, "active_allocated"), (6 * GIB, "inactive")))
    assert diagnosis.cause is Cause.RESERVED_ONLY
    assert diagnosis.fixes[0].effect_gib == 6.0
