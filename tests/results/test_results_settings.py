"""Where settings came from: the terminal, the report and the ledger say of each whether it was typed, pasted, or is the preset's."""

import re

import sim
from experiments.cli import main
from sim.resolve import resolve
from sim.results.report_settings import settings_html, settings_text

SCENARIO = sim.Scenario(
    model="llama-3.1-8b",
    gpu="h100-sxm-80gb",
    engine={"max_model_len": 8192, "enable_prefix_caching": True, "vllm_args": "--block-size 32"},
    policy={"policy": "vllm-v0", "ladder": [{"action": "no_reuse", "on": 0.9, "off": 0.5}]},
    workload={"workload": "uniform", "num_requests": 3, "input_tokens": 20, "output_tokens": 3},
)
SAID = (
    "typed: max_model_len 8192, enable_prefix_caching on, ladder; pasted vLLM flags: block_size 32; "
    "preset: enable_chunked_prefill off, watermark 0.01"
)


def test_each_setting_that_is_no_default_is_told_with_its_place():
    assert settings_text({"settings": resolve(SCENARIO).settings()}) == SAID
    assert settings_text({}) == ""


def test_the_report_has_every_setting_once_and_defaults_folded_away():
    page = settings_html(sim.simulate(SCENARIO))
    shown, folded = page.split("<details>")
    rows = dict(re.findall(r'<td class="text">(\w+)</td>.*?<td class="text">([\w -]+)</td></tr>', shown))
    assert rows["enable_prefix_caching"] == "typed"
    assert rows["block_size"] == "pasted vLLM flags"
    assert rows["watermark"] == "preset vllm-v0"
    defaults = re.findall(
        r'<td class="text">(\w+)</td><td class="text wrap">[^<]*</td><td class="text">default</td>', folded
    )
    assert "max_num_seqs" in defaults
    assert not set(defaults) & set(rows)


def test_the_ledger_explains_them_too(capsys):
    flags = ["--model", "llama-3.1-8b", "--gpu", "h100-sxm-80gb", "--policy", "sglang", "--max-num-seqs", "8"]
    assert main(["ledger", *flags, "--explain"]) == 0
    assert re.search(r"^  settings +typed: max_num_seqs 8$", capsys.readouterr().out, re.MULTILINE)
