"""Memory curves and request logs: planted causes are found, and what is not there is not claimed."""

import csv
import io

import numpy as np
import pytest

from experiments.investigator import Cause, DiagnoseError, Phase, diagnose
from experiments.investigator.sizes import GIB, MIB

KV = 131_072  # bytes a token of Llama-3.1-8B
TOTAL = 80 * GIB


def write(path, **columns):
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    path.write_text(stream.getvalue(), encoding="utf-8")
    return path


def load(rounds=4, busy=30, idle=10, seed=1):
    """Tokens and sequences of rounds of work with idle stretches between them."""
    rng = np.random.default_rng(seed)
    sequences, tokens = [0] * idle, [0] * idle
    for _ in range(rounds):
        for _ in range(busy):
            running = int(rng.integers(4, 60))
            sequences.append(running)
            tokens.append(int(running * rng.integers(200, 2000)))
        sequences += [0] * idle
        tokens += [0] * idle
    return np.array(sequences), np.array(tokens)


def curve(tmp_path, allocated, sequences, tokens, **more):
    return write(
        tmp_path / "curve.csv",
        time_s=[0.5 * row for row in range(len(tokens))],
        allocated_bytes=[int(value) for value in allocated],
        active_sequences=sequences,
        tokens=tokens,
        **more,
    )


def told(path, **settings):
    return diagnose([path], model="llama-3.1-8b", **settings)


def test_a_healthy_curve_has_no_cause_and_says_what_its_slope_is(tmp_path):
    sequences, tokens = load()
    diagnosis = told(curve(tmp_path, 16 * GIB + KV * tokens, sequences, tokens))
    assert diagnosis.cause is Cause.UNKNOWN
    assert any("131,072" in sentence for sentence in diagnosis.ruled_out)
    assert any(sentence.startswith("leak") for sentence in diagnosis.ruled_out)


def test_twice_the_ledger_s_slope_is_kv_kept_twice(tmp_path):
    sequences, tokens = load()
    diagnosis = told(curve(tmp_path, 16 * GIB + 2 * KV * tokens, sequences, tokens))
    assert (diagnosis.cause, diagnosis.detail) == (Cause.KV_DUPLICATION, "2 copies")


def test_a_reservation_a_sequence_is_poor_block_use(tmp_path):
    sequences, tokens = load()
    diagnosis = told(curve(tmp_path, 16 * GIB + KV * tokens + 2048 * KV * sequences, sequences, tokens))
    assert diagnosis.cause is Cause.BLOCK_USE
    assert any("KV of 2,048 tokens" in sentence for sentence in diagnosis.evidence)


@pytest.mark.parametrize("noise", [0, 2 * MIB])
def test_a_base_line_that_rises_with_every_round_is_a_leak(tmp_path, noise):
    sequences, tokens = load(rounds=5)
    leaked = np.cumsum(np.diff((sequences == 0).astype(int), prepend=1) > 0) * 300 * MIB
    wobble = np.random.default_rng(7).uniform(0, noise, len(tokens)) if noise else 0
    diagnosis = told(curve(tmp_path, 16 * GIB + KV * tokens + leaked + wobble, sequences, tokens))
    assert (diagnosis.cause, diagnosis.phase) == (Cause.LEAK, Phase.AFTER_RELEASE)
    assert any(line.startswith("double release") for line in diagnosis.ruled_out)
    assert diagnosis.fixes[0].effect_gib == pytest.approx(4 * 300 / 1024, abs=0.01)


def test_what_only_the_first_round_leaves_behind_is_no_leak(tmp_path):
    sequences, tokens = load(rounds=5)
    stays = np.where(np.arange(len(tokens)) >= 10, 500 * MIB, 0)  # workspaces made by the first request
    assert told(curve(tmp_path, 16 * GIB + KV * tokens + stays, sequences, tokens)).cause is not Cause.LEAK


def test_memory_that_comes_back_later_than_the_load_falls_is_late_release(tmp_path):
    sequences, tokens = load(rounds=6, busy=12, idle=16)
    held = np.array([tokens[max(0, row - 6) : row + 1].max() for row in range(len(tokens))])
    diagnosis = told(curve(tmp_path, 16 * GIB + KV * held, sequences, tokens))
    assert diagnosis.cause is Cause.LATE_RELEASE
    assert diagnosis.detail.startswith("3 s")


def test_reserved_memory_that_grows_alone_is_the_allocator_s(tmp_path):
    _, tokens = load(rounds=1, busy=40)
    allocated = np.full(len(tokens), 10 * GIB)
    reserved = allocated + np.linspace(0, 20 * GIB, len(tokens))
    path = write(
        tmp_path / "c.csv", time_s=range(len(tokens)), allocated_gib=allocated / GIB, reserved_gib=reserved / GIB
    )
    assert diagnose([path]).cause is Cause.RESERVED_ONLY


def test_growth_outside_pytorch_is_seen_in_the_process_s_memory(tmp_path):
    rows = np.arange(50)
    path = write(
        tmp_path / "c.csv",
        time_s=rows,
        allocated_mib=np.full(50, 9000.0),
        reserved_mib=np.full(50, 9500.0),
        in_use_mib=10_000.0 + 60.0 * rows,
    )
    assert diagnose([path]).cause is Cause.NON_TORCH


def test_a_curve_that_follows_its_load_to_the_end_of_the_gpu_is_kv_capacity(tmp_path):
    tokens = np.linspace(0, 480_000, 60).astype(int)
    path = write(
        tmp_path / "c.csv",
        time_s=range(60),
        allocated_bytes=[int(20 * GIB + KV * value) for value in tokens],
        total_bytes=[int(79.2 * GIB)] * 60,
        tokens=tokens,
        phase=["decode"] * 60,
    )
    diagnosis = told(path)
    assert (diagnosis.cause, diagnosis.phase) == (Cause.KV_CAPACITY, Phase.DECODE)


def test_a_spike_above_the_load_at_the_end_of_the_gpu_is_a_transient_peak(tmp_path):
    allocated = [40 * GIB] * 30 + [79 * GIB] + [40 * GIB] * 10
    path = write(
        tmp_path / "c.csv",
        time_s=range(41),
        allocated_bytes=allocated,
        total_bytes=[TOTAL] * 41,
        phase=["decode"] * 30 + ["sampling"] + ["decode"] * 10,
    )
    diagnosis = diagnose([path])
    assert (diagnosis.cause, diagnosis.phase) == (Cause.TRANSIENT_PEAK, Phase.SAMPLING)


def test_idle_memory_below_where_it_began_is_a_double_release(tmp_path):
    sequences, tokens = load(rounds=3)
    taken = np.cumsum(np.diff((sequences == 0).astype(int), prepend=1) > 0) * 400 * MIB
    diagnosis = told(curve(tmp_path, 16 * GIB + KV * tokens - taken, sequences, tokens))
    assert diagnosis.cause is Cause.DOUBLE_RELEASE


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ("time_s,allocated,tokens", "'allocated' has no unit"),
        ("time,allocated_bytes,tokens", "'time' has no unit"),
        ("time_s,allocated_bytes,reserved", "'reserved' has no unit"),
    ],
)
def test_a_column_without_its_unit_is_an_error_that_names_the_units(tmp_path, header, problem):
    path = tmp_path / "c.csv"
    path.write_text(header + "\n" + "".join(f"{row},1000,5\n" for row in range(9)), encoding="utf-8")
    with pytest.raises(DiagnoseError, match=problem) as error:
        diagnose([path])
    assert str(path) in str(error.value)
    assert "_s" in str(error.value) or "_bytes" in str(error.value)


@pytest.mark.parametrize(("cell", "problem"), [("x", "a number was expected"), ("-5", "negative"), ("inf", "infinite")])
def test_a_cell_that_is_no_memory_is_an_error_with_its_line(tmp_path, cell, problem):
    path = tmp_path / "c.csv"
    rows = "".join(f"{row},{cell if row == 3 else 1000}\n" for row in range(9))
    path.write_text("time_s,allocated_bytes\n" + rows, encoding="utf-8")
    with pytest.raises(DiagnoseError, match=problem):
        diagnose([path])


def test_a_curve_that_is_cut_off_in_its_last_line_is_read_without_it(tmp_path):
    sequences, tokens = load()
    path = curve(tmp_path, 16 * GIB + 2 * KV * tokens, sequences, tokens)
    path.write_text(path.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    assert told(path).cause is Cause.KV_DUPLICATION


def requests(tmp_path, **columns):
    rows = len(columns["output_tokens"])
    full = {
        "request_id": [f"r{row}" for row in range(rows)],
        "arrival_s": [0.0] * rows,
        "outcome": ["finished"] * rows,
    } | columns
    return write(tmp_path / "requests.csv", **full)


def test_b16_requests_that_run_one_by_one_for_want_of_max_tokens_are_reservation_bound(tmp_path):
    # 100 blocks of 32: each request may grow to 3200 tokens, and needs 128.
    path = requests(
        tmp_path,
        input_tokens=[64] * 4,
        output_tokens_requested=[3136] * 4,
        output_tokens=[64] * 4,
        queued_s=[0, 2, 4, 6],
        e2el_s=[2, 4, 6, 8],
        scheduled_s=[0, 2, 4, 6],
        finished_s=[2, 4, 6, 8],
    )
    diagnosis = diagnose([path], num_gpu_blocks=100, block_size=32)
    assert diagnosis.cause is Cause.RESERVATION
    assert any("reservation-bound, not memory-bound" in sentence for sentence in diagnosis.evidence)


def test_preempted_requests_say_that_the_pool_is_too_small(tmp_path):
    path = requests(
        tmp_path,
        input_tokens=[1000] * 10,
        output_tokens=[200] * 10,
        preemptions=[0] * 5 + [2] * 5,
        recomputed_tokens=[0] * 5 + [1500] * 5,
    )
    assert diagnose([path]).cause is Cause.KV_CAPACITY


def test_a_log_of_requests_that_all_finished_has_no_cause(tmp_path):
    assert diagnose([requests(tmp_path, input_tokens=[10] * 5, output_tokens=[5] * 5)]).cause is Cause.UNKNOWN
