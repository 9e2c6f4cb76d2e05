"""What was being done when memory ran out, where no line or traceback says it: from the arithmetic and the figures."""

import pytest

from experiments.investigator import Cause, Phase, diagnose_text
from experiments.investigator.oom_message import read_messages
from experiments.investigator.sizes import MIB, show


def card(total, free, rest=""):
    return f"GPU 0 has a total capacity of {total} GiB of which {free} MiB is free. {rest}"


def use(allocated, pools=""):
    return (
        f"Of the allocated memory {allocated} GiB is allocated by PyTorch, {pools}and 180.00 MiB is reserved by PyTorch but "
        "unallocated."
    )


POOLS = "with 128.00 MiB allocated in private pools (e.g., CUDA Graphs), "


@pytest.mark.parametrize(
    ("rows", "vocabulary", "model"), [(1024, 151936, "32B-class"), (1024, 128256, "a fine-tune of 8B")]
)
def test_the_sampler_s_sort_at_the_most_rows_with_graphs_made_is_its_warm_up(rows, vocabulary, model):
    """Sorting fp32 logits with 64-bit indices asks for 12 B a number at once; the vocabulary is that of models of that size."""
    tried = show(-(-rows * vocabulary * 12 // (2 * MIB)) * 2 * MIB)
    text = f"model: {model}\nCUDA out of memory. Tried to allocate {tried}. {card(23.57, 200, use(20.21, POOLS))}"
    diagnosis = diagnose_text(text)
    assert (diagnosis.cause, diagnosis.phase) == (Cause.TRANSIENT_PEAK, Phase.SAMPLER_WARM_UP)
    assert any(f"{rows} rows x {vocabulary} vocabulary x 12 B" in sentence for sentence in diagnosis.evidence)


def test_the_same_size_without_a_word_on_the_model_is_not_enough_to_name_the_sampler():
    tried = show(1024 * 151936 * 12)
    diagnosis = diagnose_text(f"CUDA out of memory. Tried to allocate {tried}. {card(23.57, 200, use(20.21, POOLS))}")
    assert diagnosis.cause is not Cause.TRANSIENT_PEAK


@pytest.mark.parametrize(
    "words",
    [
        "util 0.98 (0.97 works)",
        "gpu_memory_utilization=0.98; it boots at 0.97",
        "--gpu-memory-utilization 0.98, starts with 0.97",
    ],
)
def test_when_a_hundredth_less_works_graphs_are_what_did_not_fit(words):
    diagnosis = diagnose_text(f"{words}\nCUDA out of memory. Tried to allocate 136.00 MiB. {card(22.36, 120.88)}")
    assert (diagnosis.cause, diagnosis.phase) == (Cause.CUDA_GRAPHS, Phase.GRAPH_CAPTURE)


@pytest.mark.parametrize(
    ("words", "tried"),
    [
        ("util 0.98 (0.97 works) with enforce_eager=True", 136),  # there are no graphs
        ("util 0.98 (0.97 works), after hours in production", 136),  # not at every start
        ("util 0.98 (0.97 works)", 900),  # more was missing than lies between the two
    ],
)
def test_and_not_when_something_speaks_against_graphs(words, tried):
    diagnosis = diagnose_text(f"{words}\nCUDA out of memory. Tried to allocate {tried}.00 MiB. {card(22.36, 120.88)}")
    assert diagnosis.cause is not Cause.CUDA_GRAPHS


def test_a_round_number_of_gib_on_a_full_card_is_a_buffer_that_somebody_ordered():
    held = "Including non-PyTorch memory, this process has 181.77 GiB memory in use."
    diagnosis = diagnose_text(f"CUDA out of memory. Tried to allocate 4.00 GiB. {card(184.0, 2263, held)}")
    assert (diagnosis.cause, diagnosis.phase) == (Cause.BUDGET, Phase.START_UP)
    odd = diagnose_text(f"CUDA out of memory. Tried to allocate 3.94 GiB. {card(184.0, 2263, held)}")
    assert odd.phase is Phase.UNKNOWN


def test_a_full_card_with_the_pool_in_it_is_guessed_to_be_a_prefill_and_says_why():
    diagnosis = diagnose_text(f"CUDA out of memory. Tried to allocate 18.00 MiB. {card(79.11, 14.62, use(78.11))}")
    assert (diagnosis.cause, diagnosis.phase) == (Cause.BUDGET, Phase.PREFILL)
    assert any("a guess from the figures" in sentence for sentence in diagnosis.evidence)
    assert any("a prefill needs most" in sentence for sentence in diagnosis.evidence)


@pytest.mark.parametrize(
    ("log", "phase"),
    [
        ("ERROR batch{batch_size=1}:prefill:prefill{id=70 size=1}:prefill{id=70 size=1}: text_generation_client", Phase.PREFILL),
        ("ERROR batch{batch_size=9}:decode:decode{size=9}:decode{size=9}: text_generation_client", Phase.DECODE),
        ('  File "/site-packages/vllm/model_executor/models/llama.py", line 254, in __init__', Phase.LOADING),
        ('  File "/site-packages/vllm/model_executor/models/utils.py", line 610, in make_layers', Phase.LOADING),
    ],
)  # fmt: skip
def test_signs_in_logs_name_the_phase(log, phase):
    assert (
        diagnose_text(f"{log}\nCUDA out of memory. Tried to allocate 350.00 MiB. {card(23.68, 212.81)}").phase is phase
    )


def test_memory_that_is_not_there_when_the_engine_wakes_up_is_held_by_somebody_else():
    diagnosis = diagnose_text(
        '  File "/vllm/device_allocator/cumem.py", line 207, in wake_up\n    create_and_map(handle)\n'
        "RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"
    )
    assert (diagnosis.cause, diagnosis.phase) == (Cause.OTHER_PROCESS, Phase.AFTER_RELEASE)


def test_a_lone_process_in_a_message_that_is_cut_off_is_the_one_that_failed():
    text = f"Tried to allocate 1.74 GiB. {card(23.69, 1095.68, 'Process 77 has 22.61 GiB memory in use.')}"
    (message,) = read_messages(text)
    assert message.in_use is not None
    assert message.others == ()


CARD = card(47.53, 9800.0, use(36.10))


@pytest.mark.parametrize(
    ("text", "phase", "cause"),
    [
        (f"limit_mm_per_prompt={{image:10,video:1}}\nTried to allocate 12.50 GiB. {CARD}", Phase.PROFILING, Cause.TRANSIENT_PEAK),
        (f"VRAM grows steadily; in the end: Tried to allocate 148.00 MiB. {card(79.1, 100)}", Phase.AFTER_RELEASE, Cause.LEAK),
        (f"_scaled_dot_product_attention_math\nTried to allocate 4.00 GiB. {CARD}", Phase.PREFILL, Cause.KERNEL_FALLBACK),
        (f"attention falls back to eager attention\nTried to allocate 4.00 GiB. {CARD}", Phase.PREFILL, Cause.KERNEL_FALLBACK),
        ("llama_kv_cache_init: failed to allocate buffer for kv cache", Phase.START_UP, Cause.KV_CAPACITY),
        ("llama_model_load: error loading model: unable to allocate CUDA0 buffer", Phase.LOADING, Cause.WEIGHTS),
        ("graph_reserve: failed to allocate compute buffers", Phase.PROFILING, Cause.TRANSIENT_PEAK),
        ("[ERROR] CUDA runtime error in ::cudaMallocAsync(ptr, n, pool, stream): out of memory", Phase.UNKNOWN, Cause.NON_TORCH),
        ("ray: Task was killed due to the node running low on memory.", Phase.UNKNOWN, Cause.HOST_MEMORY),
    ],
)  # fmt: skip
def test_more_engines_say_it_in_their_own_words(text, phase, cause):
    diagnosis = diagnose_text(text)
    assert (diagnosis.phase, diagnosis.cause) == (phase, cause)


def test_the_same_words_of_a_server_that_serves_or_does_not_fail_say_nothing():
    assert diagnose_text("memory leak fixed in this release").cause is Cause.UNKNOWN
    served = f"Application startup complete.\nlimit_mm_per_prompt=image:4\nTried to allocate 12.50 GiB. {CARD}"
    assert diagnose_text(served).phase is not Phase.PROFILING
