"""Out-of-memory messages of every generation of PyTorch, whole, cut off and quoted, and sizes as they are printed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.investigator import Cause, diagnose_text
from experiments.investigator.oom_message import read_messages
from experiments.investigator.sizes import GIB, MIB, Size, parse_size, show, tensor_interval

MODERN = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which "
    "140.75 MiB is free. Including non-PyTorch memory, this process has 78.96 GiB memory in use. Of the allocated memory 68.83 GiB is "
    "allocated by PyTorch, with 660.00 MiB allocated in private pools (e.g., CUDA Graphs), and 331.08 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
HINTS = (
    "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
    "If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.  See documentation",
    "",
)


def only(text):
    messages = read_messages(text)
    assert len(messages) == 1
    return messages[0]


def gib(size):
    return None if size is None else round(size.gib, 4)


def test_every_part_of_a_modern_message_is_read():
    message = only(MODERN)
    assert gib(message.tried) == round(786 / 1024, 4)
    assert (gib(message.total), gib(message.in_use), gib(message.allocated)) == (79.11, 78.96, 68.83)
    assert gib(message.free) == round(140.75 / 1024, 4)
    assert gib(message.private_pools) == round(660 / 1024, 4)
    assert gib(message.unallocated) == round(331.08 / 1024, 4)
    assert message.others == ()
    # in use less allocated less unallocated: the 9.807 GiB that the table of public reports derives
    assert message.non_torch_bytes / GIB == pytest.approx(9.807, abs=0.001)


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ("GPU 0 has a total capacty of 79.11 GiB of which 140.75 MiB is free. ", "total"),  # the typo of 2.1
        ("GPU  has a total capacity of 79.11 GiB of which 140.75 MiB is free. ", "free"),  # some builds of 2.3
        ("39.55 GiB allowed; ", "allowed"),
        ("Including non-PyTorch memory, this process has 78.96 GiB memory in use. ", "in_use"),
        ("Of the allocated memory 68.83 GiB is allocated by PyTorch, ", "allocated"),
        ("and 331.08 MiB is reserved by PyTorch but unallocated. ", "unallocated"),
    ],
)
@pytest.mark.parametrize("hint", HINTS)
def test_each_part_may_stand_alone(part, field, hint):
    message = only(f"CUDA out of memory. Tried to allocate 2.00 GiB. {part}{hint}")
    assert getattr(message, field) is not None
    assert gib(message.tried) == 2.0


def test_the_legacy_form_gives_the_unallocated_memory_as_a_difference():
    message = only(
        "RuntimeError: CUDA out of memory. Tried to allocate 648.00 MiB (GPU 0; 39.59 GiB total capacity; 22.96 GiB already "
        "allocated; 1.40 GiB free; 36.19 GiB reserved in total by PyTorch)"
    )
    assert message.unallocated.gib == pytest.approx(36.19 - 22.96)
    assert message.in_use is None


def test_up_to_1_3_cached_is_what_is_not_allocated():
    message = only(
        "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 4.00 GiB total capacity; 2.61 GiB already allocated; "
        "8.63 MiB free; 310.88 MiB cached)"
    )
    assert gib(message.unallocated) == round(310.88 / 1024, 4)


def test_an_impossible_figure_of_the_driver_is_no_figure():
    message = only(
        "CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 23.99 GiB of which 0 bytes is free. "
        "Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. Of the allocated memory 22.50 GiB is "
        "allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated."
    )
    assert message.in_use is None
    assert message.in_use_is_bogus
    assert message.free.bytes == 0


def test_hip_messages_read_like_cuda_s():
    message = only(
        "HIP out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 191.98 GiB of which 1.00 GiB is free."
    )
    assert message.device == "HIP"
    assert gib(message.total) == 191.98


def test_other_processes_are_told_from_this_one():
    message = only(
        "CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 391.12 MiB is free. "
        "Process 247516 has 50.52 GiB memory in use. Process 477367 has 28.19 GiB memory in use. Of the allocated memory 27.48 GiB "
        "is allocated by PyTorch, and 1.98 MiB is reserved by PyTorch but unallocated."
    )
    # In a container no process is called "this": it is the one that holds what PyTorch says, with the least to spare.
    assert [(pid, gib(size)) for pid, size in message.others] == [("247516", 50.52)]
    assert gib(message.in_use) == 28.19


def test_a_message_broken_over_lines_and_prefixed_by_a_logger_is_one_message():
    broken = MODERN.replace(". ", ".\n(EngineCore_DP0 pid=18) ERROR 10-08 20:33:48 [core.py:708] ")
    assert gib(only(broken).unallocated) == round(331.08 / 1024, 4)


def test_a_quote_in_few_words_reads_like_the_whole():
    message = only(
        "Tried to allocate 786.00 MiB; 79.11 GiB total, 140.75 MiB free; 78.96 in use; 68.83 allocated; 331.08 MiB reserved unallocated"
    )
    assert (gib(message.total), gib(message.in_use), gib(message.allocated)) == (79.11, 78.96, 68.83)
    assert gib(message.unallocated) == round(331.08 / 1024, 4)


@pytest.mark.parametrize("cut", range(40, len(MODERN), 23))
def test_a_message_cut_off_anywhere_is_still_diagnosed(cut):
    diagnosis = diagnose_text(MODERN[:cut])
    assert 0.0 <= diagnosis.confidence <= 1.0
    assert diagnosis.evidence


@pytest.mark.parametrize("hint", HINTS[:2])
def test_the_hint_is_never_evidence(hint):
    bare = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.99 GiB of which 0.50 GiB is free. "
    assert diagnose_text(bare + hint).as_document() == diagnose_text(bare).as_document()
    assert diagnose_text(bare + hint).cause is not Cause.FRAGMENTATION


@given(st.integers(min_value=20 * MIB + 1, max_value=200 * GIB))
def test_a_tensor_lies_in_the_interval_of_the_size_that_is_printed_for_it(tensor):
    segment = -(-tensor // (2 * MIB)) * 2 * MIB  # 10 MiB and more: whole multiples of 2 MiB
    unit, name = (GIB, "GiB") if segment >= GIB else (MIB, "MiB")
    low, high = tensor_interval(parse_size(f"{segment / unit:.2f}", name))
    assert low < tensor <= high
    assert high - low <= 2 * MIB + 0.011 * unit


@given(st.floats(min_value=1, max_value=1e14))
def test_a_size_is_shown_with_two_decimals_as_it_is_read(size):
    number, unit = show(size).split()
    again = parse_size(number, unit)
    assert math.isclose(again.bytes, size, rel_tol=0.006, abs_tol=0.5)


def test_the_published_rounding_case():
    # 1024 x 154880 x 2 bytes = 302.5 MiB, and the message says 304.00 MiB.
    low, high = tensor_interval(Size(304.0 * MIB, 0.005 * MIB))
    assert low < 302.5 * MIB <= high


def test_a_hint_that_is_cut_off_takes_nothing_with_it():
    log = f"{MODERN.split(' large try')[0]}\nApplication startup complete.\n{MODERN}"
    assert len(read_messages(log)) == 2


def test_advice_that_engines_print_is_no_evidence_of_another_process():
    advice = "Decrease GPU memory utilization or reduce GPU memory used by other processes."
    bare = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.99 GiB of which 0.50 GiB is free."
    assert diagnose_text(f"{bare}\n{advice}").cause is diagnose_text(bare).cause


def test_five_times_the_weights_are_not_allocated_while_they_are_loaded():
    """128256 x 4096 x 4 B is the embedding of Llama 3.1 8B, and 4,096 rows of its logits. Its weights are 15 GiB and 76 are allocated:
    the KV pool is there, so nothing is being loaded."""
    text = (
        MODERN.replace("786.00 MiB", "1.96 GiB")
        .replace("68.83 GiB", "76.42 GiB")
        .replace("with 660.00 MiB allocated in private", "with 0 bytes in")
    )
    diagnosis = diagnose_text(text, model="llama-3.1-8b", gpu="h100-sxm-80gb")
    assert diagnosis.cause is Cause.TRANSIENT_PEAK
    assert diagnosis.detail.startswith("logits")
