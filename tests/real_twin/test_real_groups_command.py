"""Models with several attention groups from a name or a configuration file to the end of a run, and those that are refused."""

from __future__ import annotations

import json

import pytest

from experiments.cli import main
from experiments.real_run import run_scenario
from experiments.validation.scenario_kinds import ANY_GPU
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from sim import Scenario
from sim.catalog.models import model_shape
from sim.core.config import ConfigError, EngineConfig
from sim.core.engine import EngineCore
from sim.core.request import RequestSpec
from sim.memory import build_ledger


def test_a_hybrid_model_runs_from_the_command_line(capsys):
    flags = ["--workload", "uniform", "--num-requests", "6", "--rate", "50", "--max-model-len", "1600"]
    flags += ["--num-gpu-blocks-override", "300", "--check", "--json"]
    assert main(["run", "--executor", "torch", "--device", "cpu", "--model", "tiny-hybrid-test", *flags]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["finished"], summary["failed"]) == (6, 0)
    (report,) = summary["executors"]
    assert report["fallbacks"] == []
    # 301 blocks of two places of 16 tokens, K and V of two heads of 16 float32; and two scales for each of five layers.
    assert report["bytes"]["kv_cache"] == 301 * 2 * 16 * 2 * 2 * 16 * 4 + 5 * 2 * 4
    assert report["blocks"] == {"allocated": 0, "quarantined": 0, "free": 300}
    assert report["bytes"]["kv_cache"] - 40 == 301 * build_ledger("tiny-hybrid-test", ANY_GPU).layout.block_bytes


@pytest.mark.parametrize(
    ("model", "why"), [("gpt-oss-20b", "attention sinks"), ("gemma-2-9b", "capped attention scores")]
)
def test_other_hybrid_families_are_refused_with_what_they_need(model, why, capsys):
    flags = [
        "--workload",
        "uniform",
        "--num-requests",
        "2",
        "--max-model-len",
        "256",
        "--num-gpu-blocks-override",
        "64",
    ]
    assert main(["run", "--executor", "torch", "--device", "cpu", "--model", model, *flags]) == 2
    message = capsys.readouterr().err
    assert f"model {model} cannot be run for real" in message
    assert why in message
    assert "llama, mistral, qwen2, qwen3 can be" in message


def test_a_release_that_keeps_every_token_serves_the_same_file_from_one_table(tmp_path):
    """One window layer and one that sees everything: two block tables a request in vLLM since 0.10, one before."""
    values = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128, "torch_dtype": "float32",
        "max_position_embeddings": 256, "tie_word_embeddings": True, "sliding_window": 19, "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    path = tmp_path / "hybrid.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    scenario = Scenario(
        model=str(path),
        workload={"workload": "uniform", "input_tokens": 60, "output_tokens": 30, "num_requests": 4, "rate": 1.0},
        engine={"num_gpu_blocks_override": 64, "max_num_batched_tokens": 64, "max_num_seqs": 4},
        run={"executor": "torch", "device": "cpu", "check": True},
    )
    hybrid, plain = run_scenario(scenario), run_scenario(scenario.with_(engine_version="0.9.2"))
    assert hybrid.summary["finished"] == plain.summary["finished"] == 4
    # In two tables, whose blocks have half the bytes: 4 + 4 blocks for the prompt. When 80 are computed both need a sixth for the next
    # token, and of the window (80 - 18) // 16 = 3 are gone: 6 + 3, the most they ever hold.
    assert set(plain.requests["peak_blocks"]) == {6}
    assert set(hybrid.requests["peak_blocks"]) == {6 + 3}


def test_an_engine_that_keeps_less_than_the_model_sees_is_refused():
    spec = RequestSpec(request_id="r", arrival_s=0.0, input_tokens=9, output_tokens=3)
    engine = RealEngine(RealSettings(shape=model_shape("tiny-llama-test")), [spec])
    config = EngineConfig(num_gpu_blocks=8, block_size=4, max_num_batched_tokens=16, max_num_seqs=2, sliding_window=8)
    with pytest.raises(
        ConfigError, match="keeps a window of 8 tokens, but tiny-llama-test has layers that see all tokens"
    ):
        engine.executor(EngineCore(config))
