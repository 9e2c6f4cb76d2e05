"""`kvtwin ledger`: the account adds up, and says how."""

import json

import pytest

from experiments.cli import main

NAMED = ["--model", "llama-3.1-8b", "--gpu", "h100-sxm-80gb"]


def ledger(capsys, *arguments):
    assert main(["ledger", *NAMED, *arguments]) == 0
    return capsys.readouterr().out


def test_json_has_the_documented_keys_and_its_lines_add_up_to_the_gpu(capsys):
    document = json.loads(ledger(capsys, "--json"))
    keys = (
        "num_gpu_blocks",
        "block_size",
        "kv_tokens",
        "max_model_len",
        "max_concurrency",
        "kv_bytes_per_token",
        "engine_version",
        "lines",
    )
    assert set(keys) <= set(document)
    assert all({"name", "bytes", "formula", "inside_budget"} <= set(line) for line in document["lines"])
    assert sum(line["bytes"] for line in document["lines"]) == 85_029_615_043  # what CUDA reports for this GPU
    assert document["kv_tokens"] == document["num_gpu_blocks"] * document["block_size"]


def test_kv_bytes_per_token_are_the_textbook_s(capsys):
    # 2 (K and V) x 32 layers x 8 KV heads x 128 x 2 bytes
    assert json.loads(ledger(capsys, "--json"))["kv_bytes_per_token"] == 131_072
    assert json.loads(ledger(capsys, "--json", "--tensor-parallel-size", "2"))["kv_bytes_per_token"] == 65_536
    assert json.loads(ledger(capsys, "--json", "--kv-cache-dtype", "fp8"))["kv_bytes_per_token"] == 65_536


def test_the_pool_that_the_ledger_promises_is_the_pool_of_the_run(capsys):
    promised = json.loads(ledger(capsys, "--json"))["num_gpu_blocks"]
    assert main(["run", *NAMED, "--workload", "uniform", "--num-requests", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_gpu_blocks"] == promised


def test_explain_shows_each_formula_with_its_numbers(capsys):
    plain, explained = ledger(capsys), ledger(capsys, "--explain")
    document = json.loads(ledger(capsys, "--json"))
    for line in document["lines"]:
        assert line["name"] in plain
        assert f"= {line['formula']}" in explained
        assert f"= {line['numbers']}" in explained


@pytest.mark.parametrize("flag", ["--max-num-seqs=64", "--max-num-batched-tokens=1024", "--max-model-len=2048"])
def test_engine_settings_reach_the_account(capsys, flag):
    assert json.loads(ledger(capsys, "--json", flag)) != json.loads(ledger(capsys, "--json"))


def test_it_can_be_kept_as_a_file(capsys, tmp_path):
    out = ledger(capsys, "--out", str(tmp_path))
    assert f"wrote {tmp_path / 'ledger.json'}" in out
    assert json.loads((tmp_path / "ledger.json").read_text()) == json.loads(ledger(capsys, "--json"))
