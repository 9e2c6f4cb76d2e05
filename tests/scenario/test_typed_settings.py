"""What is typed is what runs, under every preset, or it is refused, wherever it was typed: never a third thing.

The values are read where they act (`EngineConfig`, `Policy`, the memory account), not from the scenario's own tables.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim
from experiments.cli import main
from experiments.options import METAVARS
from sim.assembly import policy_of
from sim.core.config import ConfigError
from sim.core.policies import PRESETS, MaxInFlight, MaxQueuedTokens
from sim.core.policies.caps import MaxRunning
from sim.core.preemption import VICTIMS
from sim.core.waiting import FcfsQueue, priority_queue
from sim.preset_settings import settings_of
from sim.resolve import resolve
from sim.scenario_errors import ScenarioError
from sim.scenario_tables import TABLE_OF_KEY, EngineTable, PolicyTable

RUNG = {"action": "no_reuse", "signal": "kv_usage", "on": 0.9, "off": 0.5}
VALUES = {
    "tensor_parallel_size": (1, 2, 4),
    "pipeline_parallel_size": (1, 2),
    "kv_cache_dtype": ("auto", "fp8"),
    "block_size": (8, 16, 64),
    "num_gpu_blocks_override": (9_000, 20_000),
    "gpu_memory_utilization": (0.5, 0.92),
    "max_model_len": (512, 4096, 65_536),
    "max_num_seqs": (1, 8, 256),
    "max_num_batched_tokens": (512, 8192, 65_536),
    "kv_cache_memory_bytes": (2 << 30,),
    "enforce_eager": (False, True),
    "engine_version": ("0.29", "0.9-v0", "sglang-0.5"),
    "speculative_model": ("llama-3.2-1b",),
    "num_speculative_tokens": (0, 3),
    "draft_tensor_parallel_size": (1,),
    "max_loras": (0, 2),
    "max_lora_rank": (16, 64),
    "encoder_tokens": (0, 1000),
    "plain_attention": (False, True),
    "other_processes_bytes": (0, 1 << 30),
    "enable_prefix_caching": (False, True),
    "enable_chunked_prefill": (False, True),
    "async_scheduling": (False, True),
    "scheduling_policy": ("fcfs", "priority"),
    "watermark": (0.0, 0.01, 0.1),
    "scheduler_reserve_full_isl": (False, True),
    "eviction": ("lru", "lfu", "retention"),
    "retention": ([{"priority": 80, "end": 64}],),
    "num_cpu_prefix_blocks": (0, 500),
    "cpu_prefix_mode": ("write_through", "write_back"),
    "cpu_token_s": (0.1,),
    "cpu_max_num_seqs": (8, 3),
    "num_cpu_blocks": (0, 300),
    "max_num_queued_reqs": (0, 7),
    "max_num_queued_tokens": (900,),
    "displace_queued": (False, True),
    "batching": ("mixed", "prefill_first", "decode_first", "static"),
    "max_prefill_tokens": (256, 70_000),
    "max_prefill_seqs": (1,),
    "max_decode_seqs": (1,),
    "continuous_decode_steps": (3,),
    "admission": ({"policy": "max-running", "limit": 3},),
    "queue": ("fcfs", "priority", "shortest-predicted"),
    "victim": ("last-admitted", "largest-holder"),
    "fork_samples": (False, True),
    "guard_priority": (0, 2),
    "ladder": ([RUNG],),
}
"""Admissible values of every key of `[engine]` and `[policy]`."""
DECIDED = (
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "max_num_batched_tokens",
    "max_model_len",
    "scheduling_policy",
    "watermark",
    "scheduler_reserve_full_isl",
)
"""Those of them that some preset has a say in."""
_QUEUES = {"fcfs": FcfsQueue, "priority": priority_queue}


def typed(preset: str, given: dict[str, object]) -> dict[str, object]:
    """The arguments of a scenario in which these keys were typed."""
    tables: dict[str, dict[str, object]] = {"engine": {}, "policy": {"policy": preset}}
    for key, value in given.items():
        tables[TABLE_OF_KEY[key]][key] = value
    return {"model": "llama-3.1-8b", "gpu": "h100-sxm-80gb", **tables}


def resolved(scenario: sim.Scenario) -> SimpleNamespace:
    """All that an engine is made of."""
    found = resolve(scenario)
    config, policy = policy_of(found)
    doors = policy.admission(config).policies
    return SimpleNamespace(found=found, ledger=found.ledger, config=config, policy=policy, doors=_flat(doors))


def _flat(policies: tuple[object, ...]) -> list[object]:
    return [each for policy in policies for each in _flat(getattr(policy, "policies", ())) or [policy]]


def _limit(engine: SimpleNamespace, kind: type, name: str) -> object:
    return next((getattr(door, name) for door in engine.doors if isinstance(door, kind)), None)


def _pool_bytes(engine: SimpleNamespace) -> int:
    """A pool of whole blocks, in as many bytes as were ordered."""
    return engine.ledger.num_gpu_blocks * engine.ledger.block_bytes


HAD = {
    "kv_cache_dtype": lambda e: "auto" if e.ledger.kv_bytes_per_token == 131_072 // _ranks(e) else "fp8",
    "block_size": lambda e: e.config.block_size,
    "num_gpu_blocks_override": lambda e: e.config.num_gpu_blocks,
    "scheduler_reserve_full_isl": lambda e: e.config.reserve_full_prompt,
    "retention": lambda e: [{"priority": each.priority, "end": each.end} for each in e.policy.retention],
    "eviction": lambda e: e.policy.eviction,
    "cpu_token_s": lambda e: e.policy.cpu_executor.token_s,
    "cpu_max_num_seqs": lambda e: 8 if e.policy.cpu_executor is None else e.policy.cpu_executor.max_num_seqs,
    "max_num_queued_reqs": lambda e: _limit(e, MaxInFlight, "limit"),
    "max_num_queued_tokens": lambda e: _limit(e, MaxQueuedTokens, "limit"),
    "displace_queued": lambda e: _limit(e, MaxInFlight, "_places") is not None,
    "batching": lambda e: e.policy.batching.value,
    "admission": lambda e: {"policy": "max-running", "limit": _limit(e, MaxRunning, "limit")},
    "victim": lambda e: next(name for name, victim in VICTIMS.items() if e.policy.victim is victim),
    "guard_priority": lambda e: e.policy.ladder.guard_priority if e.policy.ladder else e.found["policy"]["guard_priority"],
    "ladder": lambda e: [{key: getattr(rung, key) for key in RUNG} for rung in e.policy.ladder.rungs],
    "tensor_parallel_size": lambda e: e.ledger.tensor_parallel_size,
    "pipeline_parallel_size": lambda e: e.ledger.pipeline_parallel_size,
    "gpu_memory_utilization": lambda e: e.ledger.gpu_memory_utilization,
    "engine_version": lambda e: e.ledger.engine_version,
}  # fmt: skip
"""What an engine has of a key, where it acts under another name than in `EngineConfig`."""
ACCOUNT = (
    "enforce_eager",
    "speculative_model",
    "num_speculative_tokens",
    "draft_tensor_parallel_size",
    "max_loras",
    "max_lora_rank",
    "encoder_tokens",
    "plain_attention",
    "other_processes_bytes",
    "fork_samples",
)
"""Keys that presets have no say in: they act in the memory account and the workload, which read them from the resolved tables."""


def _ranks(engine: SimpleNamespace) -> int:
    return engine.ledger.tensor_parallel_size * engine.ledger.pipeline_parallel_size


def had(engine: SimpleNamespace, key: str) -> object:
    """The value of a key where it acts."""
    if key in ACCOUNT:
        return engine.found[TABLE_OF_KEY[key]][key]
    if key in HAD:
        return HAD[key](engine)
    return getattr(engine.policy.limits if hasattr(engine.policy.limits, key) else engine.config, key)


def contradicted(engine: SimpleNamespace, key: str, value: object) -> str | None:
    """How an engine differs from what was typed, in words."""
    if key == "kv_cache_memory_bytes":
        if any("kv_cache_memory_bytes" in said and "num_gpu_blocks_override" in said for said in engine.found.warnings):
            return None
        left = value - _pool_bytes(engine)
        return None if 0 <= left < engine.ledger.block_bytes else f"a pool of {_pool_bytes(engine)} bytes"
    if key in ("scheduling_policy", "queue") and value in _QUEUES:
        orders = [_QUEUES[value]] if value == "priority" or key == "queue" else None
        if orders is None:  # first come, first served: whatever the place of those who gave way
            return "by priority" if engine.policy.queue is priority_queue else None
        return None if engine.policy.queue in orders else f"another queue: {engine.policy.queue}"
    if key == "queue":
        return None if engine.policy.queue.__name__ == value.replace("-", "_") + "_queue" else "another queue"
    found = had(engine, key)
    equal = math.isclose(found, value) if isinstance(value, float) and isinstance(found, float) else found == value
    return None if equal else f"{key} is {found!r}"


def test_every_key_of_engine_and_policy_has_admissible_values_here():
    keys = {*EngineTable.model_fields, *PolicyTable.model_fields} - {"vllm_args", "policy"}
    assert set(VALUES) == keys
    assert {key for preset in PRESETS for key in settings_of(preset)} <= set(DECIDED)


@st.composite
def _scenarios(draw: st.DrawFn) -> tuple[str, dict[str, object]]:
    keys = draw(st.lists(st.sampled_from(DECIDED), min_size=1, max_size=3, unique=True))
    keys += draw(st.lists(st.sampled_from(sorted(set(VALUES) - set(DECIDED))), max_size=3, unique=True))
    return draw(st.sampled_from(sorted(PRESETS))), {key: draw(st.sampled_from(VALUES[key])) for key in keys}


@settings(max_examples=400)
@given(_scenarios())
def test_an_engine_has_every_value_that_was_typed_or_there_is_no_engine(drawn):
    preset, given = drawn
    try:
        engine = resolved(sim.Scenario(**typed(preset, given)))
    except (ScenarioError, ConfigError):
        return
    for key, value in given.items():
        assert contradicted(engine, key, value) is None


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("key", VALUES)
def test_each_value_by_itself_is_had_or_refused_with_its_name(preset, key):
    for value in VALUES[key]:
        said, engine = "", None
        try:
            engine = resolved(sim.Scenario(**typed(preset, {key: value})))
        except (ScenarioError, ConfigError) as error:
            said = str(error)
        assert key in said if engine is None else contradicted(engine, key, value) is None


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
