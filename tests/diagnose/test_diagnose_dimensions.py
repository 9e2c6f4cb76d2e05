"""Which dimension of the load memory follows, what was served at the failure, and several files of a kind."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest

from experiments.investigator import Cause, diagnose, diagnose_text
from experiments.investigator.curve import read_curves
from experiments.investigator.curve_fit import fit_dimensions
from experiments.investigator.log_load import read_load
from experiments.investigator.sizes import GIB, MIB
from experiments.investigator.table_file import read_table

KV = 131_072  # bytes a token of Llama-3.1-8B
OOM = "CUDA out of memory. Tried to allocate 400.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 100.00 MiB is free."


def csv_text(**columns: object) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return stream.getvalue()


def load(rows: int = 200, seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    sequences = rng.integers(1, 60, rows)
    return {
        "time_s": np.arange(rows) * 0.5,
        "active_sequences": sequences,
        "tokens": sequences * rng.integers(200, 2000, rows),
        "prefill_tokens": rng.integers(0, 8192, rows),
        "decode_sequences": sequences,
    }


def fits(text: str):
    (curve,) = read_curves(read_table("curve.csv", text))
    return fit_dimensions(curve)


def test_memory_that_follows_tokens_is_told_from_what_rises_with_them() -> None:
    columns = load()
    allocated = (16 * GIB + KV * columns["tokens"]).astype(int)
    (fit,) = fits(csv_text(allocated_bytes=allocated, **columns))
    assert fit.per_unit("tokens") == pytest.approx(KV)
    assert fit.base == pytest.approx(16 * GIB)
    assert fit.per_unit("sequences") is None
    assert fit.r2 == pytest.approx(1.0)


def test_temporary_tensors_follow_the_prompts_of_a_step_and_its_rows() -> None:
    columns = load()
    workspace = (32 * MIB + 90_000 * columns["prefill_tokens"] + 1_500_000 * columns["decode_sequences"]).astype(int)
    fit = fits(
        csv_text(allocated_bytes=(16 * GIB + KV * columns["tokens"]).astype(int), workspace_bytes=workspace, **columns)
    )[1]
    assert fit.what == "temporary tensors"
    assert fit.per_unit("prefill_tokens") == pytest.approx(90_000)
    rows = fit.per_unit("decode_sequences") or fit.per_unit("sequences")
    assert rows == pytest.approx(1_500_000)


@pytest.mark.parametrize("varies", ["nothing", "the load alone", "memory alone", "few rows"])
def test_where_nothing_can_be_fitted_nothing_is_said(varies: str) -> None:
    columns = load(4 if varies == "few rows" else 40)
    if varies != "the load alone":
        columns = {name: values if name == "time_s" else np.full_like(values, 7) for name, values in columns.items()}
    steady = varies in ("nothing", "the load alone")
    allocated = np.full(len(columns["time_s"]), 5) if steady else np.arange(len(columns["time_s"]))
    assert fits(csv_text(allocated_bytes=allocated, workspace_bytes=np.zeros_like(allocated), **columns)) == ()


@pytest.mark.parametrize(("copied", "cause"), [(1.0, Cause.KV_DUPLICATION), (0.05, Cause.UNKNOWN)])
@pytest.mark.parametrize("recorded", ["beams", "requests"])
def test_beams_that_copy_are_told_from_beams_that_share(
    copied: float, cause: Cause, recorded: str, tmp_path: Path
) -> None:
    columns = load()
    beams = np.tile([1, 4], len(columns["tokens"]) // 2)
    allocated = 16 * GIB + KV * columns["tokens"] * (1 + copied * (beams - 1))
    if recorded == "beams":
        columns["beams"] = beams
    else:
        columns["requests"] = columns["active_sequences"]
        columns["active_sequences"] = columns["active_sequences"] * beams
    path = tmp_path / "curve.csv"
    path.write_text(csv_text(allocated_bytes=allocated.astype(int), **columns))
    diagnosis = diagnose([path], model="llama-3.1-8b")
    assert diagnosis.cause is cause
    if cause is Cause.KV_DUPLICATION:
        assert diagnosis.detail == "a copy for each beam"
        assert any("holds 100% of the KV of its request again" in sentence for sentence in diagnosis.evidence)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "Prefill batch. #new-seq: 3, #new-token: 7000, #cached-token: 0, token usage: 0.61, #running-req: 5, #queue-req: 2",
            ("5 requests run", "2 wait", "3 prompts in it", "7,000 prompt tokens", "61% of the KV pool"),
        ),
        (
            "Decode batch. #running-req: 8, #token: 9000, token usage: 0.50, gen throughput (token/s): 300, #queue-req: 1",
            ("8 sequences decode", "9,000 tokens in the KV cache", "50% of the KV pool"),
        ),
        (
            "Engine 000: Running: 12 reqs, Waiting: 3 reqs, GPU KV cache usage: 45.5%",
            ("12 requests run", "3 wait", "46% of the KV pool"),
        ),
        ("scheduler_output=SchedulerOutput(..., total_num_scheduled_tokens=8192, ...)", ("8,192 tokens in the step",)),
        (
            "2.0 s, step 71: 8000 tokens in 2 prompt chunks; 21 sequences decode; 45.0% of the KV blocks are in use",
            ("8,000 tokens in the step", "2 prompts", "7,979 prompt tokens", "21 sequences decode"),
        ),
    ],
)
def test_the_load_at_the_failure_is_read_off_the_log(line: str, words: tuple[str, ...]) -> None:
    diagnosis = diagnose_text(f"{line}\n{OOM}\n")
    (sentence,) = [found for found in diagnosis.evidence if found.startswith("the load at the failure")]
    assert all(word in sentence for word in words), sentence


def test_a_line_after_the_failure_or_long_before_it_tells_nothing_of_its_load() -> None:
    line = "Running: 12 reqs, Waiting: 3 reqs, GPU KV cache usage: 45.5%"
    assert read_load("\n" * 300 + OOM + "\n\n\n" + line, 301) is None
    assert read_load(line + "\n" * 300 + OOM, 301) is None


# -- against the requests ----------------------------------------------------------------------------------------------


def scheduler(usage: float) -> str:
    line = f"Running: 10 reqs, Waiting: 0 reqs, GPU KV cache usage: {usage:.1f}%\n"
    return "GPU KV cache size: 100,000 tokens\n" + line * 8


REQUESTS = "request_id,arrival_s,input_tokens,output_tokens\n" + "".join(f"{n},{n},900,100\n" for n in range(20))


@pytest.mark.parametrize(
    ("usage", "cause"), [(9.0, Cause.UNKNOWN), (30.0, Cause.KV_DUPLICATION), (24.0, Cause.LATE_RELEASE)]
)
def test_a_pool_that_holds_more_than_its_requests_can_need_has_copies_or_gives_back_late(
    usage: float, cause: Cause, tmp_path: Path
) -> None:
    """Ten requests of 1,000 tokens need 10,000 at most; 30,000 are three copies."""
    (tmp_path / "server.log").write_text(scheduler(usage))
    (tmp_path / "requests.csv").write_text(REQUESTS)
    assert diagnose([tmp_path / "server.log", tmp_path / "requests.csv"]).cause is cause


# -- several files of a kind -------------------------------------------------------------------------------------------


def test_every_curve_is_judged_and_the_file_is_named(tmp_path: Path) -> None:
    columns = load()
    for name, copies in (("good.csv", 1), ("bad.csv", 3)):
        allocated = (16 * GIB + copies * KV * columns["tokens"]).astype(int)
        (tmp_path / name).write_text(csv_text(allocated_bytes=allocated, **columns))
    diagnosis = diagnose([tmp_path / "good.csv", tmp_path / "bad.csv"], model="llama-3.1-8b")
    assert (diagnosis.cause, diagnosis.detail) == (Cause.KV_DUPLICATION, "3 copies")
    assert any(f"{tmp_path / 'bad.csv'}: 3 times the KV" in sentence for sentence in diagnosis.evidence)
    assert [(Path(one.file).name, one.cause) for one in diagnosis.by_file] == [
        ("good.csv", "cannot tell from this"),
        ("bad.csv", "KV duplication: 3 copies"),
    ]


def test_replicas_of_one_curve_are_told_apart(tmp_path: Path) -> None:
    columns = load()
    rows = len(columns["tokens"])
    both = {name: np.concatenate((values, values)) for name, values in columns.items()}
    allocated = 16 * GIB + KV * both["tokens"] * np.repeat([1, 2], rows)
    path = tmp_path / "memory.csv"
    path.write_text(csv_text(allocated_bytes=allocated.astype(int), replica=np.repeat([0, 1], rows), **both))
    diagnosis = diagnose([path], model="llama-3.1-8b")
    assert diagnosis.cause is Cause.KV_DUPLICATION
    assert [one.file.rpartition(", ")[2] for one in diagnosis.by_file] == ["replica 0", "replica 1"]


def test_logs_of_several_ranks_are_judged_together_and_each_alone(tmp_path: Path) -> None:
    other = (
        "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 1 has a total capacity of 79.11 GiB of which 1.00 MiB is free. Process 7 "
        "has 40.00 GiB memory in use. Process 8 has 39.00 GiB memory in use. Of the allocated memory 37.00 GiB is allocated by "
        "PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated."
    )
    (tmp_path / "rank0.log").write_text(f"Capturing CUDA graph shapes\n{OOM}\n")
    (tmp_path / "rank1.log").write_text(f"Starting to load model\n{other}\n")
    (tmp_path / "rank2.log").write_text("INFO nothing to see\n")
    diagnosis = diagnose([tmp_path / f"rank{rank}.log" for rank in range(3)])
    told = {Path(one.file).name: (str(one.phase), one.cause) for one in diagnosis.by_file}
    assert told == {"rank0.log": ("graph capture", "CUDA graphs"), "rank1.log": ("loading", "another process")}


def test_a_file_alone_is_not_listed_by_file(tmp_path: Path) -> None:
    (tmp_path / "oom.txt").write_text(OOM)
    assert diagnose([tmp_path / "oom.txt"]).by_file == ()


def test_preempted_requests_get_the_number_that_the_pool_holds(tmp_path: Path) -> None:
    """50 requests of 1,000 tokens ran in a pool of 20,000: 20 fit, 30,000 tokens too many were asked for."""
    rows = "".join(f"{n},0,900,100,finished,0,100,1,1000\n" for n in range(50))
    (tmp_path / "requests.csv").write_text(
        "request_id,arrival_s,input_tokens,output_tokens,outcome,scheduled_s,finished_s,preemptions,recomputed_tokens\n"
        + rows
    )
    (tmp_path / "server.log").write_text("GPU KV cache size: 20,000 tokens\n")
    diagnosis = diagnose([tmp_path / "requests.csv", tmp_path / "server.log"], model="llama-3.1-8b")
    (fix,) = [fix for fix in diagnosis.fixes if fix.change == "--max-num-seqs 20"]
    assert diagnosis.cause is Cause.KV_CAPACITY
    assert fix.effect_tokens == 30_000
    assert fix.effect_gib == pytest.approx(30_000 * KV / GIB)
