"""A setting means the same wherever it is typed, and in all that is made of the scenario: files, commands, twins, suggestions."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import sim
from calibration.recorded import own_run
from experiments.cli import main
from experiments.options import METAVARS
from experiments.scenario_text import scenario_text
from sim.assembly import policy_of
from sim.core.config import ConfigError
from sim.core.policies import PRESETS
from sim.preset_settings import settings_of
from sim.provenance import run_command
from sim.resolve import resolve
from sim.scenario_errors import ScenarioError
from sim.scenario_tables import TABLE_OF_KEY
from tests.support.typed_settings import VALUES, contradicted, resolved, typed

# -- wherever it is typed -----------------------------------------------------------------------------------------------------------

PASTED = {
    "block_size": "--block-size {}",
    "gpu_memory_utilization": "--gpu-memory-utilization {}",
    "max_model_len": "--max-model-len {}",
    "max_num_batched_tokens": "--max-num-batched-tokens {}",
    "max_num_seqs": "--max-num-seqs {}",
    "scheduling_policy": "--scheduling-policy {}",
    "watermark": "--watermark {}",
    "enable_prefix_caching": "--{}enable-prefix-caching",
    "enable_chunked_prefill": "--{}enable-chunked-prefill",
    "scheduler_reserve_full_isl": "--{}scheduler-reserve-full-isl",
    "async_scheduling": "--{}async-scheduling",
}
"""Flags of `vllm serve`, by key."""


def _pasted(key: str, value: object) -> str:
    return PASTED[key].format(("" if value else "no-") if isinstance(value, bool) else value)


def _flag(key: str, value: object) -> list[str]:
    flag = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]


def _written(path, preset: str, key: str, value: object):
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    table = TABLE_OF_KEY[key]
    head = f'[model]\nmodel = "llama-3.1-8b"\n[gpu]\ngpu = "h100-sxm-80gb"\n[policy]\npolicy = "{preset}"\n'
    path.write_text(head + (f"[{table}]\n" if table != "policy" else "") + f"{key} = {shown}\n")
    return path


def _outcome(make, *arguments: object, **tables: object) -> str:
    """What comes of a scenario: the settings and the policy's queue and batching, or that it is refused."""
    try:
        engine = resolved(make(*arguments, **tables))
    except (ScenarioError, ConfigError) as error:
        return f"refused: {str(error).split(', but ')[-1]}"
    return f"{engine.config} {engine.policy.queue} {engine.policy.batching}"


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("key", PASTED)
def test_a_file_flags_and_pasted_flags_mean_what_python_means(preset, key, tmp_path):
    bare = {"model": "llama-3.1-8b", "gpu": "h100-sxm-80gb", "policy": preset}
    for value in VALUES[key]:
        said = _outcome(sim.Scenario, **typed(preset, {key: value}))
        path = _written(tmp_path / "scenario.toml", preset, key, value)
        assert _outcome(sim.Scenario.load, path) == said
        assert _outcome(sim.Scenario.from_flags, {**bare, key: value}) == said
        assert _outcome(sim.Scenario, **bare, engine={"vllm_args": _pasted(key, value)}) == said


REFUSED = [
    ("orca", "enable_prefix_caching", True, "one contiguous piece"),
    ("nano-vllm", "enable_chunked_prefill", False, "has no switch"),
    ("sglang", "scheduling_policy", "priority", "not modelled"),
    ("ladder", "scheduling_policy", "fcfs", "strictly by priority"),
    ("vllm-v0", "watermark", 0.0, "keeps 1 % of the pool free"),
    ("predicted-peak", "watermark", 0.1, "its risk decides"),
    ("trtllm-max-util", "scheduler_reserve_full_isl", True, "as soon as its next step fits"),
    ("static-batch", "scheduler_reserve_full_isl", False, "its worst case fits"),
]


@pytest.mark.parametrize(("preset", "key", "value", "because"), REFUSED)
def test_a_refusal_says_what_where_why_and_who_would_take_it(preset, key, value, because, tmp_path, capsys):
    """One message, exit 2; and the presets that it names take it."""
    path = _written(tmp_path / "scenario.toml", preset, key, value)
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    assert main(["ledger", str(path)]) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert f"scenario.toml: [{TABLE_OF_KEY[key]}] {key} is {shown}, but the preset {preset} has it at " in said
    assert because in said
    named = said.split("or use ")[1].replace(" or ", ", ").split(", ")
    others = [each for each in PRESETS if each != preset] if named == ["any other preset"] else named
    for other in others:
        assert contradicted(resolved(sim.Scenario(**typed(other, {key: value}))), key, value) is None
    for other in {*PRESETS} - {*others}:
        with pytest.raises(ScenarioError, match=key):
            sim.Scenario(**typed(other, {key: value}))


@pytest.mark.parametrize(("preset", "key", "value", "because"), [each for each in REFUSED if each[1] in METAVARS])
def test_a_flag_and_a_pasted_flag_are_named_as_they_were_typed(preset, key, value, because, capsys):
    base = ["ledger", "--model", "llama-3.1-8b", "--gpu", "h100-sxm-80gb", "--policy", preset]
    flag = "--" + key.replace("_", "-")
    assert main([*base, *_flag(key, value)]) == 2
    typed_flag = capsys.readouterr().err
    assert main([*base, "--vllm-args", _pasted(key, value)]) == 2
    pasted_flag = capsys.readouterr().err
    assert because in typed_flag
    assert because in pasted_flag
    assert f"{flag} is " in typed_flag
    assert f"{flag} of the pasted vLLM flags is " in pasted_flag


def test_a_budget_below_whole_prompts_is_refused_and_says_who_wants_them_whole():
    """V0 leaves chunked prefill off up to 32,768 tokens, and above them has it on."""
    given = {"max_model_len": 16_384, "max_num_batched_tokens": 8192}
    with pytest.raises(ScenarioError, match=r"the preset vllm-v0 computes prompts whole at this length.*8192.*16384"):
        resolved(sim.Scenario(**typed("vllm-v0", given)))
    chunked = resolved(sim.Scenario(**typed("vllm-v0", {**given, "enable_chunked_prefill": True})))
    assert (chunked.config.max_num_batched_tokens, chunked.policy.batching.value) == (8192, "mixed")
    long = resolved(sim.Scenario(**typed("vllm-v0", {**given, "max_model_len": 32_769})))
    assert (long.config.enable_chunked_prefill, long.config.max_num_batched_tokens) == (True, 8192)
    whole = resolved(sim.Scenario(**typed("vllm-v0", {"max_model_len": 32_768})))
    assert (whole.config.enable_chunked_prefill, whole.config.max_num_batched_tokens) == (False, 32_768)
    assert whole.policy.batching.value == "prefill_first"


def test_the_memory_account_is_that_of_the_settings_that_run():
    """A step of whole prompts holds 32,768 tokens, four times vLLM V1's 8192, and the account keeps room for its activations."""
    whole = resolved(sim.Scenario(**typed("vllm-v0", {"max_model_len": 32_768}))).ledger
    assert whole.max_num_batched_tokens == 32_768
    assert (
        whole.num_gpu_blocks
        < resolved(sim.Scenario(**typed("vllm-v1", {"max_model_len": 32_768}))).ledger.num_gpu_blocks
    )


@pytest.mark.parametrize(
    ("asked", "order"), [("fcfs", "priority"), ("fcfs", "shortest-predicted"), ("priority", "fair")]
)
def test_two_orders_of_one_queue_are_refused(asked, order):
    given = {"scheduling_policy": asked, "queue": order}
    with pytest.raises(
        ScenarioError, match=f"scheduling_policy is '{asked}', but .* gives the order '{order}'; leave one"
    ):
        sim.Scenario(**typed("vllm-v1", given))
    pasted = sim.Scenario(policy={"queue": order}, engine={"vllm_args": f"--scheduling-policy {asked}"})
    with pytest.raises(ScenarioError, match="of the pasted vLLM flags"):
        resolve(pasted)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_run_says_of_its_settings_can_be_typed_again(preset):
    """The scenario of a summary spells everything out, defaults of the preset included, and means the same."""
    first = resolve(sim.Scenario(**typed(preset, {"max_model_len": 8192})))
    again = resolve(sim.Scenario(**first.what_was_run()))
    assert again.what_was_run() == first.what_was_run()
    assert policy_of(again)[0] == policy_of(first)[0]


DOCUMENT = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("preset", PRESETS)
def test_the_table_in_the_docs_is_what_a_preset_has(preset):
    """Bold is what nobody can change."""
    section = DOCUMENT.split("### What you set is what runs")[1]
    head, row = (
        next(line for line in section.splitlines() if line.startswith(start)) for start in ("| preset", f"| `{preset}`")
    )
    (_, *keys), (_, *cells) = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in (head, row))
    short, long = (resolve(sim.Scenario(**typed(preset, {"max_model_len": tokens}))) for tokens in (32_768, 32_769))
    for key, cell in zip(keys, cells, strict=True):
        had, later = (found[TABLE_OF_KEY[key]][key] for found in (short, long))
        words = ("on" if had else "off") if isinstance(had, bool) else f"{had:g}" if isinstance(had, float) else had
        words += " up to 32,768 tokens" if later != had else ""
        setting = settings_of(preset).get(key)
        fixed = setting is not None and setting.because is not None
        assert cell == (f"**{words}**" if fixed else words)


# -- what is made of a scenario says the same ----------------------------------------------------------------------------------------


def test_an_account_suggests_no_step_that_the_preset_would_refuse(capsys):
    """V0 computes prompts of up to 16,384 tokens whole, so no step can be limited to fewer."""
    asked = ["--fit", "600 requests x 8192 tokens", "--max-model-len", "16384", "--max-num-seqs", "600"]
    base = ["ledger", "--model", "llama-3.1-8b", "--gpu", "h100-sxm-80gb", "--max-num-batched-tokens", "32768", *asked]
    for preset, budget in (("vllm-v0", 16_384), ("vllm-v1", 2048)):
        assert main([*base, "--policy", preset]) == 1
        said = capsys.readouterr().out
        assert f"--max-num-batched-tokens {budget} " in said
        resolved(sim.Scenario(**typed(preset, {"max_model_len": 16_384, "max_num_batched_tokens": budget})))


TYPED_AGAINST_ITS_PRESET = [
    ("vllm-v0", {"enable_prefix_caching": True, "max_model_len": 4096}),
    ("vllm-v0", {"enable_chunked_prefill": True, "max_model_len": 4096}),
    ("sglang", {"enable_chunked_prefill": False, "max_model_len": 4096}),
]


@pytest.mark.parametrize(("preset", "given"), TYPED_AGAINST_ITS_PRESET)
def test_a_file_made_of_a_scenario_keeps_what_was_typed(preset, given, tmp_path):
    """Also where that is the usual default, which the preset would not have."""
    scenario = sim.Scenario(**typed(preset, given))
    for tables in (scenario.given(), resolve(scenario).what_was_run()):
        path = tmp_path / "again.toml"
        path.write_text(scenario_text({name: keys for name, keys in tables.items() if name != "slo"}))
        assert policy_of(resolve(sim.Scenario.load(path)))[0] == policy_of(resolve(scenario))[0]


@pytest.mark.parametrize(("preset", "given"), TYPED_AGAINST_ITS_PRESET)
def test_the_command_that_repeats_a_run_keeps_what_was_typed(preset, given):
    words = shlex.split(run_command(resolve(sim.Scenario(**typed(preset, given)))))
    for key, value in given.items():
        assert _flag(key, value)[0] in words or value == settings_of(preset, 4096)[key].value


@pytest.mark.parametrize(("preset", "given"), TYPED_AGAINST_ITS_PRESET)
def test_the_twin_of_a_recorded_run_keeps_what_was_typed(preset, given, tmp_path):
    scenario = sim.Scenario(**typed(preset, given))
    twin = own_run._scenario(resolve(scenario).what_was_run(), tmp_path)
    assert policy_of(resolve(twin))[0] == policy_of(resolve(scenario))[0]
