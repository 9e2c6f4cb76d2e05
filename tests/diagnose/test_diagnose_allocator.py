"""What-if for the allocator, in `kvtwin diagnose`: a snapshot's own history under its recorded settings and under others."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from experiments.cli import main
from experiments.investigator import Cause, Phase, diagnose
from experiments.investigator.allocator_runs import allocator_runs
from sim.memory.allocators import CachingAllocator, CachingSettings, DeviceMemory, parse_alloc_conf, read_snapshot
from tests.support.pages import loads_nothing
from tests.support.refusals import Refusals

MIB = 1 << 20
BIG = 11_643_387_904


def saved(tmp_path: Path, allocator: CachingAllocator) -> Path:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(allocator.snapshot()))
    return path


def split_segment(settings: CachingSettings | None = None) -> CachingAllocator:
    """The story of pytorch#35901: a freed segment is split by a small tensor, and the large one does not come back."""
    allocator = CachingAllocator(DeviceMemory(total_bytes=15 << 30), settings or CachingSettings())
    allocator.allocate("big", BIG)
    allocator.advance(0.5)
    allocator.free("big")
    allocator.advance(1.0)
    allocator.allocate("small", 499_214_336)
    allocator.advance(2.0)
    allocator.allocate("big again", BIG)
    return allocator


def documented(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["diagnose", *map(str, arguments), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_the_settings_that_would_have_helped_are_the_fixes(tmp_path: Path) -> None:
    diagnosis = diagnose([saved(tmp_path, split_segment())], read_snapshot=read_snapshot)
    assert diagnosis.cause is Cause.FRAGMENTATION
    changes = {fix.change: fix for fix in diagnosis.fixes}
    assert {"PYTORCH_ALLOC_CONF=expandable_segments:True", "PYTORCH_ALLOC_CONF=max_split_size_mb:512"} <= set(changes)
    assert "PYTORCH_ALLOC_CONF=roundup_power2_divisions:8" not in changes
    assert changes["PYTORCH_ALLOC_CONF=expandable_segments:True"].effect_gib == pytest.approx(BIG / 2**30, rel=1e-3)
    evidence = " ".join(diagnosis.evidence)
    assert (
        "6 recorded steps, replayed by the caching allocator's rules, end as recorded: 10.84 GiB reserved in 1 segments"
        in evidence
    )
    assert "under roundup_power2_divisions:8 the 10.84 GiB that failed would not have had room" in evidence


def test_the_recorded_setting_is_not_advised_again(tmp_path: Path) -> None:
    allocator = split_segment(parse_alloc_conf("roundup_power2_divisions:8"))
    runs = allocator_runs(read_snapshot(saved(tmp_path, allocator)))
    assert runs is not None
    assert "roundup_power2_divisions:8" not in {conf for conf, _ in runs.others}


def test_a_free_that_waits_is_found_by_searching_again(tmp_path: Path) -> None:
    """pytorch#189504: after the wait the pool is not searched again; the identical retry succeeds."""
    allocator = CachingAllocator(DeviceMemory(total_bytes=80 * MIB))
    allocator.allocate("whole", 80 * MIB)
    allocator.free("whole")
    allocator.allocate("live", 40 * MIB)
    allocator.allocate("waiting", 40 * MIB)
    allocator.record_stream("waiting", 1)
    allocator.free("waiting")
    allocator.allocate("x", 40 * MIB)
    diagnosis = diagnose([saved(tmp_path, allocator)], read_snapshot=read_snapshot)
    assert diagnosis.cause is Cause.PENDING_FREES
    assert any("replayed: with the pool searched again" in fix.basis for fix in diagnosis.fixes)


def test_a_device_that_is_simply_full_is_not_fragmented(tmp_path: Path) -> None:
    allocator = CachingAllocator(DeviceMemory(total_bytes=100 * MIB))
    allocator.allocate("most", 90 * MIB)
    allocator.allocate("more", 40 * MIB)
    diagnosis = diagnose([saved(tmp_path, allocator)], read_snapshot=read_snapshot)
    assert diagnosis.cause is Cause.BUDGET
    assert any(sentence.startswith("fragmentation: replayed: under none of") for sentence in diagnosis.ruled_out)


def test_a_history_that_the_rules_do_not_give_is_said_to_be_off(tmp_path: Path) -> None:
    snapshot = split_segment().snapshot()
    snapshot["segments"][0]["total_size"] += 2 * MIB
    snapshot["segments"][0]["blocks"][-1]["size"] += 2 * MIB
    path = tmp_path / "odd.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    diagnosis = diagnose([path], read_snapshot=read_snapshot)
    assert any("do not end quite as recorded (off by: reserved" in sentence for sentence in diagnosis.evidence)


def test_settings_of_one_s_own_are_replayed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = saved(tmp_path, split_segment()), tmp_path / "page.html"
    document = documented(capsys, path, "--what-if", "max_split_size_mb:200", "--html", page)
    assert any("under max_split_size_mb:200 the 10.84 GiB" in sentence for sentence in document["evidence"])
    html = page.read_text()
    assert html.count("<svg") == 3  # reserved, allocated, largest free block
    assert "max_split_size_mb:200" in html
    assert loads_nothing(html)


@pytest.mark.parametrize(
    ("conf", "said"),
    [("max_split_size_mb:5", "max_split_size_mb"), ("expandable:True", "expandable"), ("", "--what-if ''")],
)
def test_a_setting_that_pytorch_refuses_is_refused(conf: str, said: str, tmp_path: Path, refused: Refusals) -> None:
    refused(["diagnose", saved(tmp_path, split_segment()), "--what-if", conf], said)


def test_a_what_if_without_a_snapshot_or_without_its_history_is_an_error(tmp_path: Path, refused: Refusals) -> None:
    text = tmp_path / "oom.txt"
    text.write_text("CUDA out of memory. Tried to allocate 2.00 GiB.")
    refused(["diagnose", text, "--what-if", "expandable_segments:True"], "no snapshot is among the files")
    snapshot = split_segment().snapshot()
    snapshot["device_traces"] = [[]]
    path = tmp_path / "bare.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    refused(["diagnose", path, "--what-if", "expandable_segments:True"], "has no history")
    assert main(["diagnose", str(path)]) == 0


def test_the_page_draws_curves_with_the_ledger_s_slope_and_escapes_what_files_are_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = tmp_path / "<b>curve.csv"
    rows = "".join(f"{n},{2**34 + 131072 * 100 * n},{100 * n},{n}\n" for n in range(40))
    curve.write_text("time_s,allocated_bytes,tokens,active_sequences\n" + rows)
    page = tmp_path / "page.html"
    documented(capsys, curve, "--model", "llama-3.1-8b", "--html", page)
    html = page.read_text()
    assert "<b>curve.csv" not in html and "&lt;b&gt;curve.csv" in html
    assert "fitted, 131,072 B a token" in html and "the ledger&#x27;s 131,072 B a token" in html


def test_the_frames_of_the_failure_name_its_phase_and_operation(tmp_path: Path) -> None:
    snapshot = split_segment().snapshot()
    oom = next(entry for entry in snapshot["device_traces"][0] if entry["action"] == "oom")
    oom["frames"] = [{"filename": "/vllm/v1/sample/topk_topp_sampler.py", "line": 111, "name": "apply_top_k_top_p"}]
    path = tmp_path / "frames.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    diagnosis = diagnose([path], read_snapshot=read_snapshot)
    assert diagnosis.phase is Phase.SAMPLING
    assert any("the traceback passes through" in sentence for sentence in diagnosis.evidence)


class _RunsCode:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        import os

        return os.system, (f"touch '{self.target}'",)


def test_a_snapshot_that_would_run_code_is_refused_by_name_and_does_not_run(tmp_path: Path, refused: Refusals) -> None:
    evil, target = tmp_path / "evil.pickle", tmp_path / "it ran"
    evil.write_bytes(pickle.dumps({"segments": [_RunsCode(target)], "device_traces": []}))
    assert refused(["diagnose", evil]).startswith(f"kvtwin diagnose: {evil}: the file asks to load")
    assert not target.exists()


def test_a_snapshot_that_is_cut_off_is_named(tmp_path: Path, refused: Refusals) -> None:
    path = saved(tmp_path, split_segment())
    path.write_bytes(path.read_bytes()[:200])
    refused(["diagnose", path], f"{path}: the file is no complete pickle")
