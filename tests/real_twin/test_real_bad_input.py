"""What a run for real refuses before it makes anything: models that are none, weights that cannot be read, memory that is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from experiments.cli import main
from experiments.real_progress import RealProgress
from gpu.decoder_config import DecoderConfig
from gpu.executor import TorchExecutor
from gpu.machine import _container_available_bytes
from gpu.real_settings import RealSettings, threads_of
from gpu.run_room import check_parts, largest_model
from gpu.weight_files import weights_folder
from gpu.weights import DecoderWeights
from sim.catalog.models import model_shape
from sim.core.config import ConfigError

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64, "torch_dtype": "float32",
}  # fmt: skip
RUN = ["run", "--executor", "torch", "--workload", "uniform", "--num-requests", "1", "--num-gpu-blocks-override", "20"]


def folder_with(path: Path, **changes: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes), encoding="utf-8")
    return path


def tensors() -> dict[str, torch.Tensor]:
    """The weights of CONFIG under their Hugging Face names, all zero."""
    shapes = {
        "q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64),
        "gate_proj": (128, 64), "up_proj": (128, 64), "down_proj": (64, 128),
    }  # fmt: skip
    found = {
        "model.embed_tokens.weight": torch.zeros(128, 64),
        "model.norm.weight": torch.zeros(64),
        "lm_head.weight": torch.zeros(128, 64),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        found |= {
            f"{prefix}self_attn.{part}.weight": torch.zeros(shapes[part])
            for part in ("q_proj", "k_proj", "v_proj", "o_proj")
        }
        found |= {
            f"{prefix}mlp.{part}.weight": torch.zeros(shapes[part]) for part in ("gate_proj", "up_proj", "down_proj")
        }
        found |= {f"{prefix}{part}.weight": torch.zeros(64) for part in ("input_layernorm", "post_attention_layernorm")}
    return found


def refused(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    """The one message of a command that finds its input bad."""
    assert main([*line]) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert message.count("\n") == 1
    return message


# -- the configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'; a number above 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; a number above 0"),
        ({"rope_theta": "x"}, "rope_theta is 'x'; a number above 0"),
        ({"rope_theta": True}, "rope_theta is True; a number above 0"),
        ({"rope_scaling": 3}, "rope_scaling is 3; an object such as"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn' cannot be computed here; default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0; a number above 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "factor is 'x'; a number above 0"),
        ({"torch_dtype": "float64"}, "torch_dtype is 'float64': unknown dtype"),
        ({"hidden_act": "gelu"}, "its activation is gelu, not silu"),
        ({"model_type": "t5"}, "its architecture is t5; llama, mistral, qwen2, qwen3 can be"),
        ({"quantization_config": {"quant_method": "awq"}}, "its weights are quantised (awq)"),
        ({"hidden_size": -64}, "hidden_size is -64; it cannot be negative"),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_be_run_is_refused_with_its_file_and_key(changes, says, tmp_path, capsys):
    folder = folder_with(tmp_path / "m", **changes)
    message = refused(capsys, *RUN, "--model", str(folder))
    assert says in message
    assert "model m" in message or f"{folder / 'config.json'}: " in message


@pytest.mark.parametrize(
    ("name", "says"),
    [("notes.txt", "a file, and no config.json"), ("nowhere/", "no folder"), ("./nowhere", "no folder")],
)
def test_a_path_that_is_no_model_is_told_as_a_path(name, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    assert f"{name}: {says}; a model is a catalogue name, or the path of a config.json" in refused(
        capsys, *RUN, "--model", name
    )


# -- files of weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"garbage", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_file_of_weights_that_is_none_is_named(content, tmp_path, capsys):
    folder = folder_with(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    message = refused(capsys, *RUN, "--model", str(folder))
    assert f"{folder / 'model.safetensors'}, {len(content)} bytes: cannot be read as safetensors" in message
    assert "cut off, or not downloaded" in message


def test_a_file_that_is_cut_off_is_named(tmp_path, capsys):
    folder = folder_with(tmp_path / "m")
    save_file(tensors(), folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert f"{len(whole) // 2:,} bytes: cannot be read as safetensors" in refused(capsys, *RUN, "--model", str(folder))


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("[]", "not an index of weights"),
        ("{", "not an index of weights"),
        ('{"weight_map": {"a": "model-2.safetensors", "b": "model-3.safetensors"}}', "model-2.safetensors is missing, one of 2 files"),
    ],
)  # fmt: skip
def test_an_index_that_is_none_or_names_what_is_not_there_is_refused(index, says, tmp_path, capsys):
    folder = folder_with(tmp_path / "m")
    save_file(tensors(), folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    assert says in refused(capsys, *RUN, "--model", str(folder))


def test_tensors_that_are_missing_misshapen_or_quantised_are_named(tmp_path, capsys):
    folder, down = folder_with(tmp_path / "m"), "model.layers.1.mlp.down_proj.weight"
    for changed, says in (
        (None, f"have no {down}; they hold {len(tensors()) - 1} tensors"),
        (torch.zeros(64, 127), f"{down} is [64, 127]; m needs [64, 128]"),
        (torch.zeros(64, 128, dtype=torch.int8), f"{down} is stored as int8; executor torch runs plain weights only"),
    ):
        kept = {name: tensor for name, tensor in tensors().items() if name != down}
        save_file(kept if changed is None else kept | {down: changed}, folder / "model.safetensors")
        assert says in refused(capsys, *RUN, "--model", str(folder))


def test_weights_of_a_folder_are_copied_out_of_their_files(tmp_path):
    """So that a step never waits for the disk, and the account of weights counts what is held."""
    folder = folder_with(tmp_path / "m")
    given = {name: torch.randn_like(tensor) for name, tensor in tensors().items()}
    save_file(given, folder / "model.safetensors")
    config = DecoderConfig.of(model_shape(str(folder)), folder)
    told: list[tuple[int, int]] = []
    weights = DecoderWeights.from_folder(
        config, folder, dtype=torch.float32, device="cpu", progress=lambda done, of: told.append((done, of))
    )
    assert told == [(1, 2), (2, 2)]
    assert torch.equal(weights.layers[1].down, given["model.layers.1.mlp.down_proj.weight"])
    assert weights.num_bytes == config.shape.weight_bytes("float32")


def test_weights_that_lie_about_are_not_those_of_a_catalogue_name(tmp_path, monkeypatch):
    """A hub name is looked up in the catalogue; a folder that happens to hold weights has nothing to do with it."""
    monkeypatch.chdir(tmp_path)
    save_file(tensors(), tmp_path / "model.safetensors")
    assert weights_folder("meta-llama/Llama-3.1-8B") is None
    assert weights_folder("Llama-3.1-8B") is None
    assert weights_folder("tiny-llama-test") is None
    assert weights_folder(str(folder_with(tmp_path / "m"))) is None
    assert weights_folder(str(folder_with(tmp_path) / "config.json")) == tmp_path


# -- memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--num-cpu-blocks", "99999999"], "lower num_cpu_blocks or num_cpu_prefix_blocks"),
        (["--max-num-batched-tokens", "99999999"], "lower max_num_batched_tokens, or set micro_batch_tokens"),
        (["--num-gpu-blocks-override", "99999999"], "lower num_gpu_blocks_override"),
        (["--replicas", "4"], "tiny-llama-test for 4 replicas needs"),
    ],
)
def test_each_part_that_is_too_large_has_its_own_remedy(flags, says, monkeypatch, capsys):
    monkeypatch.setattr("gpu.run_room.available_bytes", lambda: 14 << 20)
    monkeypatch.setattr(DecoderWeights, "random", lambda *given, **settings: pytest.fail("weights were made"))
    message = refused(capsys, *RUN, "--model", "tiny-llama-test", *flags)
    assert says in message
    assert "but this machine has 14.00 MiB free" in message


def test_the_largest_model_that_fits_is_named(monkeypatch):
    """Llama-3.2-1B has 1,235,814,400 parameters of two bytes: the largest of what runs in 2.4 GiB."""
    monkeypatch.setattr("gpu.run_room.available_bytes", lambda: int(2.4 * 2**30))
    with pytest.raises(ConfigError, match=r"weights in bfloat16 14\.96 GiB.*\(llama-3\.2-1b, 2\.30 GiB, fits\)"):
        check_parts(
            RealSettings(shape=model_shape("llama-3.1-8b")), "cpu", weights=model_shape("llama-3.1-8b").weight_bytes()
        )
    assert largest_model("bfloat16", 1000) is None


def test_a_container_s_limit_counts_less_what_it_uses_and_could_drop(tmp_path):
    for name, text in (
        ("memory.max", "1000\n"),
        ("memory.current", "700\n"),
        ("memory.stat", "anon 500\ninactive_file 150\n"),
    ):
        (tmp_path / name).write_text(text, encoding="ascii")
    assert _container_available_bytes(tmp_path) == 1000 - 700 + 150
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    assert _container_available_bytes(tmp_path) is None
    assert _container_available_bytes(tmp_path / "nowhere") is None


def test_large_weights_are_announced_before_they_are_made_and_small_ones_are_not():
    told: list[str] = []
    progress = RealProgress(note=told.append)
    progress.making(RealSettings(shape=model_shape("tiny-llama-test")))
    assert told == []
    progress.making(RealSettings(shape=model_shape("llama-3.2-1b")))
    (line,) = told
    assert line.startswith("making random weights of llama-3.2-1b: 1.24 billion numbers, 2.30 GiB in bfloat16, about ")


# -- clocks --------------------------------------------------------------------------------------------------------------


def test_the_clock_of_a_run_is_checked_first_and_recorded(tmp_path, capsys):
    run = [*RUN, "--model", "tiny-llama-test"]
    assert "clock is 'sun'; it must be one of wall, thread" in refused(capsys, *run, "--clock", "sun")
    simulated = ["run", "--model", "llama-3.1-8b", "--gpu", "h100", "--workload", "uniform", "--clock", "wall"]
    assert "--clock looks at a device, but executor model" in refused(capsys, *simulated)
    for flags, clock in (([], "wall"), (["--clock", "thread"], "thread")):
        assert main([*run, *flags, "--out", str(tmp_path / clock)]) == 0
        assert json.loads((tmp_path / clock / "provenance.json").read_text(encoding="utf-8"))["clock"] == clock


def test_a_thread_s_clock_means_one_thread():
    large, small = model_shape("llama-3.2-1b"), model_shape("tiny-llama-test")
    assert threads_of("cpu", large, "thread") == threads_of("cpu", small, "wall") == 1
    assert threads_of("cpu", large, "wall") is threads_of("cuda", small, "wall") is None


# -- stopped, and too late -----------------------------------------------------------------------------------------------


def test_an_interrupted_run_leaves_no_file(tmp_path, monkeypatch, capsys):
    steps: list[object] = []
    execute = TorchExecutor.execute

    def interrupted(self: TorchExecutor, plan: Any) -> Any:
        steps.append(plan)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return execute(self, plan)

    monkeypatch.setattr(TorchExecutor, "execute", interrupted)
    out = tmp_path / "out"
    files = ["--out", str(out), "--decision-log", str(out / "log.jsonl"), "--html", str(tmp_path / "report.html")]
    run = [*RUN[:-2], "--model", "tiny-llama-test", "--stepping", *files]
    assert main(run) == 130
    assert capsys.readouterr().err == "kvtwin run: interrupted\n"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_step_beyond_the_run_is_told_by_the_steps_that_it_had(tmp_path, capsys):
    run = [*RUN[:-2], "--model", "tiny-llama-test", "--peak-step", "1000000", "--out", str(tmp_path / "out")]
    message = refused(capsys, *run)
    steps = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))["engine_steps"]
    assert (
        f"--peak-step is 1000000, but the run had {steps} steps, numbered from 0; give a number below {steps}"
        in message
    )


def test_a_run_of_no_step_claims_no_memory(tmp_path, capsys):
    """Its requests are longer than the model takes: nothing was computed, so nothing was measured."""
    folder, out = folder_with(tmp_path / "m"), tmp_path / "out"
    assert main([*RUN, "--model", str(folder), "--out", str(out)]) == 0
    assert "Step memory" not in capsys.readouterr().out
    assert "peak_workspace_bytes" not in json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert "The engine never ran a step." in (out / "report.html").read_text(encoding="utf-8")
