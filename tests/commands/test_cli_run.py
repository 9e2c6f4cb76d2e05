"""`kvtwin run`: what it prints, what it writes, and how it ends."""

import json

import pytest

from experiments.cli import main
from tests.support.results import without_clock

BASIC = [
    "--model",
    "llama-3.1-8b",
    "--gpu",
    "h100-sxm-80gb",
    "--workload",
    "sharegpt",
    "--num-requests",
    "30",
    "--seed",
    "3",
]


@pytest.fixture
def kvtwin(capsys):
    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_json_is_one_document_on_stdout_and_nothing_else(kvtwin):
    code, out, err = kvtwin("run", *BASIC, "--json")
    summary = json.loads(out)
    assert (code, err) == (0, "")
    outcomes = ("finished", "rejected", "aborted", "timed_out", "failed")
    assert summary["num_requests"] == 30 == sum(summary[outcome] for outcome in outcomes)
    assert summary["seed"] == 3
    assert summary["scenario"]["engine"]["max_num_seqs"] == 1024


def test_a_table_is_printed_without_json(kvtwin):
    code, out, err = kvtwin("run", *BASIC)
    assert (code, err) == (0, "")
    assert "TTFT" in out
    assert "30" in out


def test_the_same_command_gives_the_same_numbers_and_another_seed_others(kvtwin):
    first, again, other = (
        without_clock(json.loads(kvtwin("run", *BASIC[:-1], seed, "--json")[1])) for seed in ("3", "3", "4")
    )
    assert first == again
    assert first["ttft_s"] != other["ttft_s"]


def test_a_scenario_file_and_flags_give_what_flags_alone_give(kvtwin, tmp_path):
    path = tmp_path / "chat.toml"
    path.write_text('model = "llama-3.1-8b"\ngpu = "h100-sxm-80gb"\nworkload = "sharegpt"\n[run]\nseed = 9\n')
    from_file = json.loads(kvtwin("run", path, "--num-requests", 30, "--seed", 3, "--json")[1])
    from_flags = json.loads(kvtwin("run", *BASIC, "--json")[1])
    assert without_clock(from_file) == without_clock(from_flags)


def test_files_are_written_where_asked_and_named(kvtwin, tmp_path):
    out_dir, html, log = tmp_path / "out", tmp_path / "deep" / "report.html", tmp_path / "log.jsonl"
    code, out, _ = kvtwin("run", *BASIC, "--out", out_dir, "--html", html, "--decision-log", log)
    assert code == 0
    for path in (out_dir, html, log):
        assert f"wrote {path}" in out
    assert {"summary.json", "requests.csv"} <= {path.name for path in out_dir.iterdir()}
    assert json.loads((out_dir / "summary.json").read_text())["num_requests"] == 30
    assert html.read_text().lstrip().lower().startswith("<!doctype html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "log.jsonl", "out"]  # no temporary file is left


def test_stepping_and_leaping_write_the_same_decision_log_and_summary(kvtwin, tmp_path):
    logs, summaries = [], []
    pressure = [
        "--num-gpu-blocks-override",
        300,
        "--max-model-len",
        4096,
        "--cancel-rate",
        0.2,
        "--rate",
        50,
        "--check",
    ]
    for name, extra in (("leap", []), ("step", ["--stepping"])):
        log = tmp_path / name
        code, out, _ = kvtwin("run", *BASIC, *pressure, *extra, "--decision-log", log, "--json")
        assert code == 0
        logs.append(log.read_bytes())
        summary = without_clock(json.loads(out))
        summary["scenario"]["run"]["stepping"] = None
        summaries.append(summary)
    assert logs[0] == logs[1]
    assert summaries[0] == summaries[1]


def test_the_decision_log_is_json_lines_with_the_documented_keys(kvtwin, tmp_path):
    log = tmp_path / "log.jsonl"
    kvtwin("run", *BASIC, "--decision-log", log)
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    keys = {
        "step",
        "scheduled",
        "preempted",
        "swapped_out",
        "swapped_in",
        "copied",
        "released",
        "admitted",
        "rejected",
        "ladder",
    }
    assert all(keys <= set(entry) for entry in entries)
    assert [entry["step"] for entry in entries] == list(range(len(entries)))
    assert sorted(request for entry in entries for request in entry["admitted"]) == sorted(str(k) for k in range(30))


def test_a_run_that_fails_leaves_an_older_decision_log_alone(kvtwin, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text("older\n")
    code, _, err = kvtwin("run", *BASIC[:-4], "--trace", tmp_path / "none.csv", "--decision-log", log)
    assert code == 2
    assert err
    assert log.read_text() == "older\n"
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_folder_that_cannot_be_written_is_one_message(refused, tmp_path):
    (tmp_path / "file").write_text("")
    refused(["run", *BASIC, "--out", tmp_path / "file" / "out"], "file")


def test_requests_that_can_never_fit_are_rejected_and_counted(kvtwin):
    code, out, _ = kvtwin("run", *BASIC, "--num-gpu-blocks-override", 20, "--json")
    summary = json.loads(out)
    assert code == 0
    assert summary["rejected"] > 0
    assert summary["finished"] + summary["rejected"] == 30
    assert any("rejected when they arrive" in warning for warning in summary["warnings"])


def test_a_folder_in_place_of_a_file_is_found_before_the_run(refused, tmp_path, monkeypatch):
    def not_reached(*arguments, **settings):
        raise AssertionError("the run has begun")

    monkeypatch.setattr("sim.simulation.simulate", not_reached)
    for flag in ("--html", "--decision-log"):
        refused(["run", *BASIC, flag, tmp_path], f"{tmp_path}: is a folder")
