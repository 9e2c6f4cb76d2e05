"""Every public bug report that is marked S (a simulator scenario) in the public-bugs reference, and the tests of its right answer.

Row ids and titles are facts of the reports named with them, as stored in September 2026.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

REPORTS: dict[str, str] = {
    "B01": "vLLM #39734: scheduler deadlocks when a request exceeds KV cache capacity but is within max_model_len",
    "B02": "vLLM PR #40946, #41282: sliding-window admission capped to the pool-sizing bound; failure to allocate KV blocks",
    "B03": "vLLM #45388: scheduler permanently deadlocks when a KV-offloading connector is enabled",
    "B04": "vLLM PR #57104: deadlock with KV connector and MTP under KV pressure",
    "B06": "vLLM #53130: no admissions once running + skipped_waiting reaches max_num_seqs",
    "B07": "vLLM #25538: performance regression by frequently preempting and resuming a request",
    "B09": "vLLM #5578: chunked prefill scheduler uses up swap on many n >= 2 requests",
    "B10": "nano-vllm #274: assert scheduled_seqs crashes the engine when decode runs out of blocks",
    "B11": "nano-vllm #114: crash when the prompt length exactly equals the block size",
    "B12": "nano-vllm PR #217: re-prefill after preemption breaks the block table",
    "B14": "SGLang PR #19881: abort the last request in retract_decode on OOM",
    "B15": "SGLang #4602: paged allocation fails with plenty of tokens free",
    "B16": "TensorRT-LLM #9412, #2866: requests run one by one if max_tokens is missing or very big",
    "B17": "TensorRT-LLM #16827: MAX_UTILIZATION loses 40.6 % throughput and has 9.1x TPOT p99 when oversubscribed",
    "B18": "TensorRT-LLM #13318: scheduler deadlock, total_num_tokens > max_num_tokens",
    "B19": "inference-sim #963: preemption log storm and near-livelock under KV exhaustion",
    "B20": "vLLM PR #11565: hits touched before the capacity check",
    "B21": "vLLM PR #19031, #21357: null blocks counted as evictable; inverted eviction delete",
    "B23": "vLLM PR #32255: freeing blocks of aborted async loads is delayed",
    "B24": "vLLM PR #33377: double free with async scheduling, abort and async KV transfer",
    "B25": "vLLM PR #29987: eagerly abort cancelled final-step requests",
    "B28": "vLLM PR #14326: abort and memory leak when n > 1",
    "B29": "SGLang #11970: memory leak in token_to_kv_pool_allocator",
    "B31": "SGLang PR #18694: double free of requests that have finished during preemption",
    "B34": "vLLM #5907: CUDA OOM with logprobs",
    "B39": "vLLM #9995: only the target model is counted for speculative decoding",
    "B47": "vLLM #44701: prefix-cache key collision between LoRA name and cache_salt",
    "B48": "vLLM #58192: --max-num-queued-reqs is checked before the render and counted after it",
    "B50": "llama.cpp #4185, #6603: failed to decode the batch",
}
"""All rows marked S."""

ANSWERS: dict[str, tuple[str, ...]] = {
    "B01": (
        "test_public_bugs_scheduling::test_b01_a_prompt_that_can_never_fit_is_rejected_and_the_next_one_runs",
        "test_public_bugs_scheduling::test_b01_a_prompt_that_just_fits_is_served",
        "test_public_bugs_scheduling::test_b01_the_pools_of_the_reports_say_never_at_once",
        "test_public_bugs_scheduling::test_b01_no_preset_waits_for_what_can_never_fit",
        "test_public_bugs_scheduling::test_b01_no_watermark_makes_it_wait_for_ever",
        "test_policy_leap_and_progress::test_every_preset_serves_or_explains_every_request",
    ),
    "B02": (
        "test_public_bugs_scheduling::test_b02_gate_and_sizer_share_one_cap_and_the_predictor_is_the_allocator",
        "test_golden_vllm_v1::test_t5_a_sliding_window_is_capped_at_the_gate",
        "test_golden_vllm_v1::test_t5_a_pool_below_the_cap_refuses_at_arrival",
        "test_golden_vllm_v1::test_t7_the_predictor_equals_the_allocator_while_the_window_slides",
        "test_kv_groups_need::test_t5_the_gate_of_two_groups",
        "test_kv_groups_need::test_the_gate_counts_what_the_sizer_counted",
    ),
    "B03": ("test_cpu_tier::test_b03_a_load_is_not_begun_until_all_its_blocks_are_secured",),
    "B04": ("test_cpu_tier::test_b04_t10_the_block_after_the_prompt_is_counted_when_a_load_is_admitted",),
    "B06": ("test_deferral::test_b06_four_deferred_requests_take_none_of_four_slots",),
    "B07": (
        "test_public_bugs_scheduling::test_b07_without_the_full_prompt_gate_the_long_prompt_thrashes",
        "test_public_bugs_scheduling::test_b07_with_the_full_prompt_gate_it_waits",
        "test_policy_presets::test_b07_max_util_thrashes_where_no_evict_waits",
    ),
    "B09": (
        "test_public_bugs_scheduling::test_b09_nobody_starts_while_somebody_is_swapped_out_and_a_full_cpu_pool_ends_nobody",
        "test_real_bugs_scheduling::test_b09_nobody_starts_while_somebody_is_swapped_out_and_a_full_cpu_pool_kills_nobody",
    ),
    "B10": (
        "test_public_bugs_scheduling::test_b10_a_decode_that_needs_a_third_of_two_blocks_is_refused_at_arrival",
        "test_public_bugs_scheduling::test_b10_without_a_stated_output_it_fails_alone",
        "test_policy_presets::test_t12_b10_nano_vllm_ends_the_request_that_needs_a_third_of_two_blocks",
    ),
    "B11": (
        "test_public_bugs_scheduling::test_b11_a_prompt_of_exactly_two_blocks_computes_its_last_block_again",
        "test_public_bugs_scheduling::test_b11_many_copies_of_a_prompt_of_one_block_all_compute_something",
    ),
    "B12": ("test_public_bugs_scheduling::test_b12_after_a_resume_length_and_table_agree",),
    "B14": (
        "test_public_bugs_scheduling::test_b14_a_request_that_outgrows_the_pool_ends_alone",
        "test_policy_presets::test_b14_sglang_ends_only_the_request_that_outgrows_the_pool",
    ),
    "B15": (
        "test_public_bugs_scheduling::test_b15_victims_are_taken_one_by_one_until_the_rest_fits",
        "test_policy_presets::test_t13_b15_sglang_retracts_until_the_pages_suffice",
    ),
    "B16": (
        "test_policy_presets::test_b16_without_max_tokens_no_evict_runs_one_at_a_time_and_says_why",
        "test_policy_presets::test_b16_with_max_tokens_no_evict_runs_all_four_and_has_nothing_to_say",
        "test_policy_presets::test_b16_a_pool_that_is_really_full_is_not_called_reservation_bound",
        "test_policy_presets::test_b16_max_util_runs_all_four",
        "test_diagnose_bugs::test_b16_a_pool_mostly_free_while_requests_wait_is_reservation_bound_not_memory_bound",
    ),
    "B17": (
        "test_policy_presets::test_b17_without_pressure_both_policies_are_the_same",
        "test_policy_presets::test_b17_under_pressure_max_util_starts_sooner_and_pays_for_it_by_recomputing",
    ),
    "B18": (
        "test_public_bugs_scheduling::test_b18_a_hit_evicted_in_the_same_step_is_not_counted_on",
        "test_policy_presets::test_b18_no_preset_computes_more_than_its_budget",
    ),
    "B19": (
        "test_public_bugs_scheduling::test_b19_preemptions_per_request_stay_few",
        "test_policy_presets::test_b19_preemptions_per_request_stay_few",
    ),
    "B20": (
        "test_public_bugs_references::test_b20_a_refused_admission_leaves_its_hits_alone",
        "test_golden_vllm_v1::test_t4_a_refused_allocation_does_not_touch_its_hits",
    ),
    "B21": (
        "test_golden_vllm_v1::test_t6_null_blocks_among_the_hits_cost_nothing",
        "test_golden_vllm_v1::test_t6_the_table_counts_likewise",
        "test_public_bugs_references::test_b21_what_was_evicted_is_not_found",
        "test_public_bugs_references::test_b21_a_twin_takes_the_place_of_an_evicted_block",
    ),
    "B23": (
        "test_cpu_tier::test_b23_blocks_of_an_aborted_load_return_when_the_copy_is_done",
        "test_real_bugs_references::test_b23_an_aborted_load_keeps_its_blocks_until_it_has_arrived",
    ),
    "B24": (
        "test_public_bugs_references::test_b24_late_output_of_an_aborted_request_is_ignored_and_its_blocks_return_once",
        "test_public_bugs_references::test_b24_aborted_after_the_next_step_was_planned_it_is_freed_once_and_late",
        "test_async_scheduling::test_a_request_that_leaves_while_it_runs_is_computed_once_more",
        "test_async_scheduling::test_late_output_of_a_request_that_stopped_is_ignored",
    ),
    "B25": (
        "test_public_bugs_references::test_b25_aborted_in_their_last_step_they_count_as_aborted_and_free_at_once",
        "test_forks::test_b28_when_the_client_leaves_all_sequences_leave_and_every_block_is_back",
    ),
    "B28": (
        "test_public_bugs_references::test_b28_all_sequences_that_share_a_prompt_return_it",
        "test_forks::test_b28_when_the_client_leaves_all_sequences_leave_and_every_block_is_back",
        "test_samples::test_when_the_client_leaves_all_samples_leave_and_every_block_is_back",
    ),
    "B29": (
        "test_public_bugs_references::test_b29_the_books_name_what_is_missing",
        "test_diagnose_bugs::test_b29_missing_slots_are_counted",
    ),
    "B31": ("test_public_bugs_references::test_b31_what_has_finished_is_no_victim",),
    "B34": (
        "test_ledger_phases::test_prompt_logprobs_cost_six_bytes_for_every_position_and_vocabulary_entry",
        "test_diagnose_bugs::test_b34_logits_of_a_prompt_are_named_by_rows_times_vocabulary",
        "test_oom_survival::test_a_step_that_is_too_large_is_halved_and_nobody_fails",
    ),
    "B39": (
        "test_ledger_account::test_the_draft_model_is_on_the_ledger_of_the_rank_that_holds_it",
        "test_diagnose_bugs::test_b39_a_draft_model_that_the_account_left_out",
    ),
    "B47": ("test_public_bugs_references::test_b47_a_lora_and_a_salt_of_one_name_share_nothing",),
    "B48": (
        "test_policy_retry_after::test_b48_a_burst_is_counted_as_it_is_checked",
        "test_policy_retry_after::test_b48_what_a_later_policy_refuses_is_given_back",
    ),
    "B50": ("test_policy_presets::test_b50_a_full_pool_is_met_in_order_and_each_measure_is_taken_once",),
}
"""For each row the tests, as `file::function`."""


@cache
def functions_of(module: str) -> frozenset[str]:
    """The test functions that a test file defines, wherever it lies, or nothing if there is no such file."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in TESTS.rglob(f"{module}.py")]
    return frozenset(node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_row_has_its_tests() -> None:
    assert list(ANSWERS) == list(REPORTS)
    assert all(ANSWERS.values())


@pytest.mark.parametrize("row", ANSWERS)
def test_every_test_that_is_named_exists(row: str) -> None:
    for name in ANSWERS[row]:
        module, function = name.split("::")
        assert function in functions_of(module), f"{row} ({REPORTS[row]}): there is no {name}"


def test_every_test_named_after_a_row_is_in_the_table() -> None:
    """A test called `test_b17_…` stands in row B17, unless it is about a device (`test_real_…`) or a diagnosis."""
    named = {name for names in ANSWERS.values() for name in names}
    for path in TESTS.rglob("test_*.py"):
        if path.stem.startswith(("test_real_", "test_diagnose_")):
            continue
        for function in functions_of(path.stem):
            row = function.removeprefix("test_")[:3].upper()
            if row in REPORTS and function[8:9] == "_":
                assert f"{path.stem}::{function}" in named
