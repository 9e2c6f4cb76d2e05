"""Logs of servers: the phase, texts that are not PyTorch's, and what is read off the start-up account."""

import pytest

from experiments.investigator import Cause, Phase, diagnose_text
from experiments.investigator.engine_log import read_engine_log

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 400.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which "
    "100.00 MiB is free."
)


def traceback(*functions):
    frames = "".join(
        f'(EngineCore pid=7) ERROR 10-08 20:33:48 [core.py:708]   File "/vllm/x.py", line 1, in {name}\n'
        for name in functions
    )
    return f"Traceback (most recent call last):\n{frames}{OOM}\n"


@pytest.mark.parametrize(
    ("functions", "phase"),
    [
        (("_init_executor", "load_model", "initialize_model"), Phase.LOADING),
        (
            ("_initialize_kv_caches", "determine_available_memory", "profile_run", "_dummy_run", "forward"),
            Phase.PROFILING,
        ),
        (("compile_or_warm_up_model", "capture_model", "_dummy_run", "forward"), Phase.GRAPH_CAPTURE),
        (("compile_or_warm_up_model", "_dummy_sampler_run", "forward"), Phase.SAMPLER_WARM_UP),
        (("_initialize_kv_caches", "initialize_from_config"), Phase.START_UP),
        (("run_busy_loop", "execute_model", "compute_logits"), Phase.SAMPLING),
        (("run_busy_loop", "execute_model", "rearrange_expert_weights_inplace"), Phase.COMMUNICATION),
        (("event_loop_overlap", "forward_batch_generation", "forward_extend"), Phase.PREFILL),
        (("event_loop_overlap", "forward_batch_generation", "forward_decode"), Phase.DECODE),
        (("run_busy_loop", "execute_model", "forward"), Phase.SERVING),
    ],
)
def test_a_traceback_names_the_phase(functions, phase):
    assert diagnose_text(traceback(*functions)).phase is phase


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("Loading safetensors checkpoint shards:  50% Completed | 2/4", Phase.LOADING),
        ("Model loading took 14.99 GiB and 3.2 seconds", Phase.PROFILING),
        ("GPU KV cache size: 157,936 tokens", Phase.START_UP),
        ("Capturing CUDA graph shapes:  40%|####", Phase.GRAPH_CAPTURE),
        ("Application startup complete.", Phase.SERVING),
        ("Prefill batch. #new-seq: 1, #new-token: 7000, #cached-token: 0", Phase.PREFILL),
        ("Decode batch. #running-req: 8, #token: 9000, token usage: 0.61", Phase.DECODE),
    ],
)
def test_without_a_traceback_the_last_line_before_the_failure_names_the_phase(line, phase):
    later = "Loading safetensors checkpoint shards:   0% Completed\n"  # the restart of the server, after the failure
    assert diagnose_text(f"Starting to load model x\n{line}\n{OOM}\n{later}").phase is phase


def test_the_newest_marker_wins_over_older_ones():
    log = (
        "Starting to load model x\nModel loading took 14.99 GiB\nCapturing CUDA graphs\nGraph capturing finished in "
        "20 secs, took 0.53 GiB\nApplication startup complete.\n"
    )
    assert diagnose_text(log + OOM).phase is Phase.SERVING


@pytest.mark.parametrize(
    ("text", "phase", "cause"),
    [
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
            Phase.START_UP,
            Cause.KV_CAPACITY,
        ),
        (
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests.",
            Phase.SAMPLER_WARM_UP,
            Cause.TRANSIENT_PEAK,
        ),
        ("Prefill out of memory. Try to lower your batch size.", Phase.PREFILL, Cause.KV_CAPACITY),
        ("Decode out of memory. Try to lower your batch size.", Phase.DECODE, Cause.KV_CAPACITY),
        ("ValueError: Cannot get 12 free blocks from the pool", Phase.SERVING, Cause.KV_CAPACITY),
        ("No free blocks left.", Phase.SERVING, Cause.KV_CAPACITY),
        ("Aborted due to the lack of CPU swap space", Phase.DECODE, Cause.KV_CAPACITY),
        (
            "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 114688, Hardware "
            "limit: 101376.",
            Phase.UNKNOWN,
            Cause.KERNEL_LIMIT,
        ),
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            Phase.UNKNOWN,
            Cause.NON_TORCH,
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled cuda error",
            Phase.COMMUNICATION,
            Cause.NON_TORCH,
        ),
        ("RuntimeError: CUDA driver error: out of memory", Phase.UNKNOWN, Cause.NON_TORCH),
        (
            '  File "gpu_model_runner.py", line 1, in capture_model\nRuntimeError: CUDA error: out of memory',
            Phase.GRAPH_CAPTURE,
            Cause.CUDA_GRAPHS,
        ),
        (
            "Capture cuda graph failed: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 7 has a total "
            "capacity of 95.00",
            Phase.GRAPH_CAPTURE,
            Cause.CUDA_GRAPHS,
        ),
        (
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 137438953472 bytes.",
            Phase.UNKNOWN,
            Cause.HOST_MEMORY,
        ),
        (
            "RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp",
            Phase.UNKNOWN,
            Cause.UNKNOWN,
        ),
    ],
)
def test_texts_that_are_not_pytorch_s_are_classified(text, phase, cause):
    diagnosis = diagnose_text(text)
    assert (diagnosis.phase, diagnosis.cause) == (phase, cause)


@pytest.mark.parametrize("models", ["model's", "models's"])
def test_one_request_that_does_not_fit_names_the_length_that_would(models):
    diagnosis = diagnose_text(
        f"ValueError: To serve at least one request with the {models} max seq len (40,960),\n(4.38 GiB KV cache is needed, which is "
        "larger than the available KV cache memory\n(0.51 GiB). Based on the available memory, the estimated maximum model length is 4800."
    )
    assert (diagnosis.phase, diagnosis.cause) == (Phase.START_UP, Cause.KV_CAPACITY)
    assert diagnosis.fixes[0].change == "--max-model-len 4800"
    assert diagnosis.fixes[0].effect_gib == pytest.approx(3.87)


def test_memory_taken_before_the_start_is_another_process_and_the_share_that_fits_is_advised():
    diagnosis = diagnose_text(
        "ValueError: Free memory on device cuda:0 (7.34/15.49 GiB) on startup is less than desired GPU memory utilization (0.8, 12.39 GiB)."
    )
    assert (diagnosis.phase, diagnosis.cause) == (Phase.START_UP, Cause.OTHER_PROCESS)
    assert diagnosis.fixes[0].change == "--gpu-memory-utilization 0.47"


def test_a_context_s_worth_of_taken_memory_is_a_budget_that_is_too_high():
    diagnosis = diagnose_text(
        "Free memory on device (23.05/23.58 GiB) on startup is less than desired GPU memory utilization (0.99, 23.34 GiB)."
    )
    assert diagnosis.cause is Cause.BUDGET


def test_no_room_for_blocks_because_of_the_weights_is_said():
    # The negative case of the public table: 5.43 GiB of weights in 0.9 x 6 GiB.
    diagnosis = diagnose_text(
        "the current vLLM instance can use total_gpu_memory (6.00GiB) x gpu_memory_utilization (0.90) = 5.40GiB\n"
        "model weights take 5.43GiB; non_torch_memory takes -0.51GiB; PyTorch activation peak memory takes 1.42GiB; the rest of the "
        "memory reserved for KV Cache is -0.94GiB.\nValueError: No available memory for the cache blocks."
    )
    assert diagnosis.cause is Cause.WEIGHTS


def test_the_account_of_vllm_is_read():
    account = read_engine_log(
        "total_gpu_memory (22.07GiB) x gpu_memory_utilization (0.90) = 19.86GiB\nmodel weights take 14.99GiB; non_torch_memory takes "
        "0.05GiB; PyTorch activation peak memory takes 0.22GiB; the rest of the memory reserved for KV Cache is 4.60GiB.\n"
        "# cuda blocks: 2356, # CPU blocks: 16384\nGraph capturing finished in 20 secs, took 0.53 GiB"
    ).account
    assert account == {
        "total_gib": 22.07, "weights_gib": 14.99, "non_torch_gib": 0.05, "peak_activation_gib": 0.22, "kv_gib": 4.6,
        "gpu_blocks": 2356, "graphs_gib": 0.53,
    }  # fmt: skip


def test_the_account_of_sglang_is_read():
    account = read_engine_log(
        "Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=63.72 GB, mem usage=15.09 GB.\n"
        "KV Cache is allocated. #tokens: 444500, K size: 27.13 GB, V size: 27.13 GB\nMemory pool end. avail mem=8.34 GB"
    ).account
    assert (account["weights_gib"], account["kv_tokens"], account["free_after_pool_gib"]) == (15.09, 444500, 8.34)


def test_a_full_pool_with_waiting_requests_is_kv_capacity():
    line = "Running: 8 reqs, Waiting: 12 reqs, GPU KV cache usage: 96.5%, Prefix cache hit rate: 0.0%\n"
    assert diagnose_text(line * 4).cause is Cause.KV_CAPACITY


def test_settings_in_the_log_decide_the_flag_that_is_advised():
    vllm = diagnose_text(
        f"Initializing a V1 LLM engine, gpu_memory_utilization=0.95\nApplication startup complete.\n{OOM}"
    )
    assert vllm.fixes[0].change == "--gpu-memory-utilization 0.94"
    sglang = diagnose_text(
        f"sglang server_args=ServerArgs(mem_fraction_static=0.88)\nDecode batch. #running-req: 8\n{OOM}"
    )
    assert sglang.fixes[0].change == "--mem-fraction-static 0.87"


def test_a_pool_shorter_than_one_request_is_kv_capacity():
    # The refused log of the public table: 29,000 tokens asked for, 1,478 blocks of 16.
    diagnosis = diagnose_text("max_model_len=29000\n# GPU blocks: 1478, # CPU blocks: 2048\n")
    assert (diagnosis.cause, diagnosis.phase) == (Cause.KV_CAPACITY, Phase.START_UP)
    assert any("0.82 of one fits" in sentence for sentence in diagnosis.evidence)


def test_a_pool_that_left_nothing_is_a_budget_that_is_too_high():
    diagnosis = diagnose_text(
        "KV Cache is allocated. #tokens: 15387, K size: 0.82 GB, V size: 0.82 GB\nMemory pool end. avail mem=0.00 GB\n"
    )
    assert diagnosis.cause is Cause.BUDGET


def test_a_start_up_that_went_well_has_no_cause():
    diagnosis = diagnose_text(
        "max_model_len=32768\nModel loading took 14.99 GiB\nAvailable KV cache memory: 19.28 GiB\nGPU KV cache size: 157,936 tokens\n"
        "Graph capturing finished in 20 secs, took 0.53 GiB\nApplication startup complete.\n"
    )
    assert diagnosis.cause is Cause.UNKNOWN
    assert any("19.28" in sentence for sentence in diagnosis.evidence)
