"""`kvtwin bisect` against a real forward pass: real memory in simulated time, so that every run answers alike."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from experiments import bisect_probe
from experiments.cli import main
from experiments.real_run import run_scenario
from sim import Scenario
from tests.support.refusals import Refusals

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[gpu]'")

CULPRITS = ("r20", "r21", "r22")
SERVER = """
[model]
model = "tiny-llama-test"

[engine]
max_num_batched_tokens = 256
max_num_seqs = 8
max_model_len = 128
num_gpu_blocks_override = 200

[run]
executor = "torch"
device = "cpu"
workspace_bytes = 650000
"""
"""A workspace that two prompts of 60 tokens in one step fit into, and three do not."""


@pytest.fixture
def planted(tmp_path: Path) -> tuple[Path, Path]:
    """40 small requests, and among them three that arrive together and are ten times as long."""
    trace, server = tmp_path / "requests.csv", tmp_path / "server.toml"
    with trace.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["request_id", "arrival_s", "input_tokens", "output_tokens_requested"])
        for number in range(40):
            name = f"r{number}"
            at_s = 0.05 * (20 if name in CULPRITS else number)
            writer.writerow([name, repr(at_s), 60 if name in CULPRITS else 6 + number % 9, 3])
    server.write_text(SERVER)
    return trace, server


def bisected(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["bisect", *map(str, arguments), "--fails", "oom", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_a_planted_culprit_is_found_on_a_real_device_and_its_scenario_fails_there_too(
    planted: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "culprit"
    document = bisected(capsys, *planted, "--out", out)
    assert [row["request_id"] for row in document["requests"]] == list(CULPRITS)
    assert document["reproduces"] is True
    assert document["runs"] <= 200

    # As a user would run it: with measured durations, and from its files alone.
    written = Scenario.load(out / "scenario.toml")
    failed = run_scenario(written)
    assert failed.summary["oom_events"] > 0
    assert "CUDA out of memory" in failed.oom_log
    shortest = min(row["input_tokens"] for row in document["requests"])
    rows = (out / "requests.csv").read_text()
    (out / "requests.csv").write_text(rows.replace(f",{shortest},", f",{shortest - 1},", 1))
    assert run_scenario(written).summary["oom_events"] == 0


def test_it_says_the_same_again_and_goes_on_from_where_it_was(
    planted: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state.json"
    document = bisected(capsys, *planted, "--state", state)
    kept = json.loads(state.read_text())
    half = {**kept, "answers": dict(list(kept["answers"].items())[: len(kept["answers"]) // 2])}
    state.write_text(json.dumps(half))
    assert bisected(capsys, *planted, "--state", state) == document
    assert json.loads(state.read_text()) == kept

    # With every answer known, only the scenario that is written is run.
    runs: list[int] = []
    judge = bisect_probe.Probe._judge
    monkeypatch.setattr(
        bisect_probe.Probe,
        "_judge",
        lambda self, requests, engine: runs.append(len(requests)) or judge(self, requests, engine),
    )
    assert bisected(capsys, *planted, "--state", state) == document
    assert runs == [3]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('faults = [{ kind = "leak", gib = 1.0 }]', "leave one out"),
        ("", "the whole load does not fail here"),
    ],
)
def test_what_cannot_be_searched_is_one_message(
    lines: str, said: str, planted: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    trace, server = planted
    server.write_text(SERVER.replace("workspace_bytes = 650000", lines))
    assert main(["bisect", str(trace), str(server), "--fails", "oom"]) == (2 if lines else 1)
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_workspace_without_a_device_is_refused(planted: tuple[Path, Path], refused: Refusals) -> None:
    trace, server = planted
    server.write_text(SERVER.replace('executor = "torch"\ndevice = "cpu"\n', ""))
    refused(["bisect", trace, server, "--gpu", "l4-24gb"], "workspace_bytes")
