"""`kvtwin compare`: files in, one table or one JSON document out."""

import json
from pathlib import Path

import pytest

from experiments.cli import main

SCENARIO = """
model = "llama-3.1-8b"
gpu = "h100-sxm-80gb"
[workload]
workload = "sharegpt"
num_requests = 40
rate = 30
[engine]
max_model_len = 4096
num_gpu_blocks_override = {blocks}
"""


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / "small.toml", tmp_path / "large.toml"]
    for path, blocks in zip(paths, (600, 20_000), strict=True):
        path.write_text(SCENARIO.format(blocks=blocks))
    return [str(path) for path in paths]


def test_json_has_the_documented_keys_and_nothing_else_is_printed(files, tmp_path, capsys):
    assert main(["compare", *files, "--replications", "2", "--workers", "1", "--json", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert {"metrics", "replications", "correlation"} <= set(document)
    for metric in document["metrics"]:
        assert {"name", "baseline", "candidate", "difference", "low", "high", "verdict"} <= set(metric)
        assert metric["low"] <= metric["difference"] <= metric["high"]
        assert metric["verdict"] in ("better", "worse", "no difference shown")
    assert json.loads((tmp_path / "compare.json").read_text()) == document


def test_the_table_names_both_scenarios_and_every_metric(files, capsys):
    assert main(["compare", *files, "--replications", "2", "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "large against small: 2 replications on the same requests" in out
    for name in ("ttft_s.p99", "num_preemptions", "output_throughput_tokens_per_s"):
        assert name in out
    assert "better" in out


def test_files_with_the_same_name_are_told_apart_by_their_folders(tmp_path, capsys):
    paths = []
    for folder, blocks in (("a", 600), ("b", 20_000)):
        (tmp_path / folder).mkdir()
        paths.append(tmp_path / folder / "chat.toml")
        paths[-1].write_text(SCENARIO.format(blocks=blocks))
    assert main(["compare", *map(str, paths), "--replications", "2", "--workers", "1"]) == 0
    assert f"{paths[1]} against {paths[0]}" in capsys.readouterr().out


def test_different_workloads_end_with_2_and_the_keys(files, tmp_path, refused):
    other = tmp_path / "other.toml"
    other.write_text(SCENARIO.format(blocks=600).replace("rate = 30", "rate = 3"))
    refused(["compare", files[0], other], "rate (30.0 and 3.0)")


def test_a_side_whose_preset_cannot_have_what_it_says_is_named(files, refused):
    with Path(files[1]).open("a", encoding="utf-8") as file:
        file.write('enable_prefix_caching = true\n[policy]\npolicy = "orca"\n')
    refused(
        ["compare", *files, "--replications", "2", "--workers", "1"],
        f"{files[1]}: [engine] enable_prefix_caching is true, but the preset orca",
    )


def test_a_pasted_seed_of_the_server_is_not_the_seed_of_the_load(files, capsys):
    for path in files:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write('vllm_args = "--seed 3"\n')
    assert main(["compare", *files, "--replications", "2", "--workers", "1", "--seed", "7"]) == 0
    assert "pasted vLLM flags that have no effect here: --seed 3" in capsys.readouterr().out
