"""Bad input ends with code 2 and one message that says what is wrong, where, and what would be right."""

import errno

import pytest

from experiments.cli import main
from experiments.options import METAVARS
from sim.scenario_tables import KEYS_WITHOUT_FLAG, TABLE_OF_KEY

NAMED = ["--model", "llama-3.1-8b", "--gpu", "h100-sxm-80gb"]
LOADED = [*NAMED, "--workload", "uniform"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", *LOADED, "--modle", "x"], ["no such flag --modle", "nearest is --model"]),
        (["rnu"], ["rnu", "run"]),
        (["run", *LOADED, "--model"], ["--model", "argument"]),
        (["run", *LOADED, "--block-size", "many"], ["--block-size", "'many'", "integer"]),
        (["run", *LOADED, "--peak-step=-1"], ["--peak-step", "-1", "0"]),
        (["run", *LOADED, "--rate", "fast"], ["--rate", "'fast'", "number"]),
        (
            ["run", *LOADED, "--speculative-model", "x"],
            ["no such flag --speculative-model", "a key of [engine] in a scenario file"],
        ),
        (["run", *LOADED, "--zzz"], ["no such flag --zzz; kvtwin run --help lists all"]),
        (["run", *NAMED, "--workload", "foo"], ["unknown workload 'foo'", "known are azure-code"]),
        (["run", *LOADED, "extra.toml", "more.toml"], ["more.toml"]),
        (["run", "--gpu", "h100", "--workload", "uniform"], ["no model is given", "--model"]),
        (["run", "--model", "llama-3.1-8b", "--workload", "uniform"], ["no gpu is given", "--gpu"]),
        (["run", *NAMED], ["no workload is given", "--workload", "--trace"]),
        (["run", "--model", "lama-3.1-8b", "--gpu", "h100"], ["lama-3.1-8b", "llama-3.1-8b"]),
        (["run", "--model", "llama-3.1-8b", "--gpu", "h101"], ["h101", "h100"]),
        (["run", *NAMED, "--workload", "azure-chat"], ["azure-chat", "azure-conv"]),
        (["run", *NAMED, "--trace", "no-such-trace.csv"], ["no-such-trace.csv"]),
        (["run", *LOADED, "--trace", "t.csv"], ["--trace", "--workload", "both"]),
        (["run", *NAMED, "--trace", "t.csv", "--burstiness", "2"], ["--burstiness", "rate"]),
        (["run", *LOADED, "--block-size", "0"], ["--block-size is 0", "at least 1"]),
        (["run", *LOADED, "--num-gpu-blocks-override", "0"], ["--num-gpu-blocks-override is 0", "at least 1"]),
        (["run", *LOADED, "--num-gpu-blocks-override", "-5"], ["--num-gpu-blocks-override is -5"]),
        (["run", *LOADED, "--num-requests", "0"], ["--num-requests is 0"]),
        (["run", *LOADED, "--rate", "-1"], ["--rate is -1", "above 0"]),
        (["run", *LOADED, "--rate", "nan"], ["--rate is nan"]),
        (["run", *LOADED, "--cancel-rate", "1.5"], ["--cancel-rate is 1.5", "at most 1"]),
        (["run", *LOADED, "--gpu-memory-utilization", "92"], ["--gpu-memory-utilization is 92", "at most 1"]),
        (["run", *LOADED, "--scheduling-policy", "lifo"], ["--scheduling-policy is 'lifo'", "fcfs, priority"]),
        (["run", *LOADED, "--policy", "vllm-v7"], ["--policy is 'vllm-v7'", "vllm-v1"]),
        (["run", *LOADED, "--profile", "mine.json"], ["profile is 'mine.json'", "roofline"]),
        (["run", *LOADED, "--executor", "tensorrt"], ["--executor is 'tensorrt'", "torch"]),
        (["run", *LOADED, "--executor", "torch", "--device", "gpu0"], ["--device is 'gpu0'", "cuda:N"]),
        (
            ["run", *LOADED, "--executor", "torch", "--tensor-parallel-size", "2"],
            ["tensor_parallel_size is 2", "one device"],
        ),
        (["run", *LOADED, "--router", "luck"], ["luck", "round-robin"]),
        (["run", *LOADED, "--max-num-batched-tokens", "64", "--max-num-seqs", "128"], ["64", "128", "raise"]),
        (
            [
                "run",
                *LOADED,
                "--no-enable-chunked-prefill",
                "--max-num-batched-tokens",
                "2048",
                "--max-model-len",
                "4096",
            ],
            ["2048", "4096", "chunked prefill"],
        ),
        (["run", *LOADED, "--vllm-args", "--block-sise 16"], ["--block-sise", "--block-size"]),
        (["run", *LOADED, "--vllm-args", "--block-size 32", "--block-size", "16"], ["block_size is 16", "32"]),
        (["run", *LOADED, "--slo", "ttfp=1"], ["--slo", "'ttfp'", "nearest is"]),
        (["run", "no-such-file.toml"], ["no-such-file.toml", "cannot read"]),
        (["ledger", "--model=llama-3.1-70b", "--gpu=l4-24gb"], ["llama-3.1-70b", "GiB"]),
        (["ledger", *NAMED, "--tensor-parallel-size", "3"], ["tensor_parallel_size 3", "1, 2, 4, 8"]),
        (["capacity", *LOADED], ["no objectives", "--slo"]),
        (["capacity", *LOADED, "--slo", "ttft=1", "--max-concurrency", "4"], ["max_concurrency is 4", "closed-loop"]),
        (["capacity", *LOADED, "--slo", "ttft=1", "--replications", "1"], ["--replications is 1", "at least 2"]),
        (["compare"], ["A.toml"]),
        (["compare", "a.toml"], ["at least two"]),
        (["compare", "a.toml", "a.toml"], ["a.toml is given twice"]),
        (["compare", "no-such-file.toml", "b.toml"], ["no-such-file.toml", "cannot read"]),
    ],
    ids=lambda value: (
        " ".join(word for word in value if word not in LOADED) if value and "--" in "".join(value) else None
    ),
)
def test_bad_input_is_one_message_and_code_2(arguments, says, refused):
    assert refused(arguments, *says).startswith("kvtwin")


def test_no_command_shows_the_help(capsys):
    assert main([]) == 2
    assert "Commands:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "ledger", "capacity", "compare"])
def test_help_has_an_example(command, capsys):
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Example:" in out
    assert f"kvtwin {command} " in out


@pytest.mark.parametrize("command", ["run", "ledger", "capacity"])
def test_the_shared_flags_are_on_every_command_that_takes_a_scenario(command, capsys):
    main([command, "--help"])
    out = capsys.readouterr().out
    for key in METAVARS:
        assert f"--{key.replace('_', '-')}" in out
    assert "--slo" in out
    assert "--json" in out


def test_every_scenario_key_is_a_flag_or_declared_to_have_none():
    assert set(METAVARS) | KEYS_WITHOUT_FLAG == set(TABLE_OF_KEY)
    assert not set(METAVARS) & KEYS_WITHOUT_FLAG


def test_an_interrupt_is_a_word_and_not_a_traceback(capsys, monkeypatch):
    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("sim.simulation.simulate", interrupted)
    assert main(["run", *LOADED]) == 130
    assert capsys.readouterr().err == "kvtwin run: interrupted\n"


def test_results_that_have_nowhere_to_go_name_the_path_that_was_given(tmp_path, capsys):
    (tmp_path / "taken").write_text("notes", encoding="utf-8")
    for flags, says in (
        (["--out", "taken"], "taken: is a file; a folder is needed\n"),
        (["--out", "taken/x"], f"taken: is a file; a folder is needed, and {tmp_path / 'taken/x'} lies under it"),
        (["--html", "taken/x.html"], "taken: is a file; a folder is needed, and"),
        (["--decision-log", "taken/x.jsonl"], "taken: is a file; a folder is needed, and"),
        (["--html", "."], "is a folder; a file name is needed"),
    ):
        assert main(["run", *LOADED, flags[0], str(tmp_path / flags[1])]) == 2
        assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_folder_that_cannot_be_written_is_found_out_before_the_run(tmp_path, capsys, monkeypatch):
    def refuse(*arguments, **settings):
        raise OSError(errno.EROFS, "Read-only file system", "/some/temporary/name")

    monkeypatch.setattr("experiments.outputs.tempfile.TemporaryFile", refuse)
    monkeypatch.setattr("sim.simulation.simulate", lambda *given, **settings: pytest.fail("it ran first"))
    assert main(["run", *LOADED, "--html", str(tmp_path / "report.html")]) == 2
    assert f"{tmp_path / 'report.html'}: cannot be written: Read-only file system" in capsys.readouterr().err


def test_a_full_disk_names_the_decision_log_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    def full(self, entry):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("experiments.decision_log.DecisionLogFile.write", full)
    log = tmp_path / "log.jsonl"
    assert main(["run", *LOADED, "--num-requests", "3", "--decision-log", str(log)]) == 2
    assert f"{log}: No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_bug_keeps_its_traceback(monkeypatch):
    def broken(*arguments, **settings):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("sim.simulation.simulate", broken)
    with pytest.raises(ZeroDivisionError):
        main(["run", *LOADED])
