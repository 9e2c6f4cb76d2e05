"""`kvtwin ledger`: the account adds up, and says how."""

import json

import pytest

from experiments.cli import main
from experiments.ledger import ledger as draw
from sim.scenario import Scenario
from tests.support.pages import loads_nothing

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


def test_a_pool_larger_than_the_gpu_is_drawn_to_its_edge(capsys):
    out = ledger(capsys, "--num-gpu-blocks-override", "99999999")
    bars = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ") and line.strip()}
    assert bars["kv_pool"].endswith("█→")
    assert max(len(line) for line in out.split("KV pool")[0].splitlines()) <= 80


def test_a_release_that_is_newer_than_what_is_known_is_said(capsys):
    assert "9.9 is newer than 0.29" in ledger(capsys, "--engine-version", "9.9")
    assert "newer than" not in ledger(capsys, "--engine-version", "0.29.1")


def test_a_target_longer_than_the_model_s_context_is_refused(refused):
    refused(["ledger", *NAMED, "--fit", "2 requests x 1000000 tokens"], "llama-3.1-8b takes at most 131,072 tokens")


@pytest.mark.parametrize("flag", ["--max-num-seqs=64", "--max-num-batched-tokens=1024", "--max-model-len=2048"])
def test_engine_settings_reach_the_account(capsys, flag):
    assert json.loads(ledger(capsys, "--json", flag)) != json.loads(ledger(capsys, "--json"))


def test_it_can_be_kept_as_a_file(capsys, tmp_path):
    out = ledger(capsys, "--out", str(tmp_path))
    assert f"wrote {tmp_path / 'ledger.json'}" in out
    assert json.loads((tmp_path / "ledger.json").read_text()) == json.loads(ledger(capsys, "--json"))


def scenario(**flags):
    return Scenario.from_flags({"model": "llama-3.1-8b", "gpu": "h100-sxm-80gb", **flags})


def test_json_keeps_requested_allocated_and_reserved_bytes_apart(capsys):
    document = json.loads(ledger(capsys, "--json"))
    (peak,) = (line for line in document["lines"] if line["name"] == "peak_activation")
    assert sum(op["allocated_bytes"] for op in peak["ops"]) == peak["bytes"]
    (copy,) = (op for op in peak["ops"] if op["name"] == "fp32 copy")
    # 1,024 rows x 128,256 x 4 B are 501 MiB; the allocator gives a segment of 502 and keeps its end.
    assert (copy["requested_bytes"], copy["allocated_bytes"], copy["reserved_bytes"]) == (
        501 << 20,
        502 << 20,
        502 << 20,
    )
    assert {"prefill", "decode", "logits", "sampler", "prompt_logprobs"} == {
        phase["phase"] for phase in document["phases"]
    }


def test_explain_names_every_operator_of_every_phase(capsys):
    explained = ledger(capsys, "--explain")
    for words in ("QKV, rotated query and key", "MLP gate, up and product", "exponential noise", "fp32 log-softmax"):
        assert words in explained


def test_a_target_that_fits_says_so_and_exits_0(capsys):
    assert draw(scenario(max_model_len=8192), fit="32 requests x 8192 tokens") == 0
    assert "it fits" in capsys.readouterr().out


def test_a_target_that_does_not_fit_exits_1_with_ordered_changes(capsys):
    assert draw(scenario(), fit="64 requests x 8192 tokens", json=True) == 1
    fit = json.loads(capsys.readouterr().out)["fit"]
    assert not fit["fits"] and fit["shortage_bytes"] > 0
    fitting = [one["fits"] for one in fit["suggestions"]]
    assert fitting == sorted(fitting, reverse=True) and fitting[0]
    assert fit["suggestions"][0]["change"] == "--kv-cache-dtype fp8"


def test_a_model_that_does_not_start_still_gets_its_changes(capsys):
    assert draw(scenario(model="llama-3.1-70b"), fit="16 x 8192") == 1
    out = capsys.readouterr().out
    assert "no memory is left" in out and "--tensor-parallel-size 4" in out


def test_the_waterfall_is_one_self_contained_page(capsys, tmp_path):
    assert draw(scenario(), html=tmp_path / "ledger.html") == 0
    text = (tmp_path / "ledger.html").read_text()
    assert "waterfall" in text and "Peak activation" in text
    assert loads_nothing(text)


def test_a_release_in_the_scenario_reaches_the_account():
    from sim.resolve import resolve

    old = resolve(Scenario.model_validate({"model": {"model": "llama-3.1-8b"}, "gpu": {"gpu": "rtx-4090"}, "engine": {
        "engine_version": "0.19", "max_model_len": 32768}}))  # fmt: skip
    assert old["engine"]["gpu_memory_utilization"] == 0.9  # that release's default
    assert old.ledger.num_gpu_blocks == pytest.approx(2588, rel=0.02)
