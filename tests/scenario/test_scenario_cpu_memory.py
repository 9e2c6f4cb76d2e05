"""CPU memory in a scenario: what of it goes together, what is refused when it is read, and that it runs the same leapt and stepped."""

from __future__ import annotations

import json

import pytest

from sim.core.config import ConfigError
from sim.scenario import Scenario, ScenarioError
from sim.simulation import simulate

BASE = {
    "model": "llama-3.1-8b",
    "gpu": "h100-sxm-80gb",
    "engine": {"num_gpu_blocks_override": 1500, "max_model_len": 16_384},
    "workload": {"workload": "mooncake-chat", "num_requests": 30, "rate": 20.0, "priorities": {0: 0.3, 1: 0.7}},
}
TIER = {"num_cpu_prefix_blocks": 5000}
SHRINK = {"action": "shrink_step", "signal": "workspace", "on": 0.01, "off": 0.005, "hold_s": 0.0, "value": 0.5}


def scenario(**tables: object) -> Scenario:
    return Scenario(**{**BASE, **tables})


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"policy": TIER, "engine": {"enable_prefix_caching": False}}, "prefix caching is off"),
        ({"policy": {"cpu_prefix_mode": "write_back"}}, "there is no CPU prefix tier"),
        ({"policy": {"retention": [{"priority": 50}]}}, "is 'lru', which ignores it"),
        ({"policy": {"cpu_token_s": 0.1}}, "no room for KV"),
        ({"policy": {"cpu_max_num_seqs": 4}}, "there is no CPU executor"),
        (
            {"policy": {"ladder": [SHRINK]}, "run": {"memory_limit": False}},
            "only a device with a memory limit",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_when_it_is_read(tables, words):
    with pytest.raises(ScenarioError, match=words):
        scenario(**tables)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"eviction": "retention", "retention": [{"prio": 50}]}, "has a key 'prio'; known are priority"),
        ({"eviction": "retention", "retention": [{"start": 4}]}, "has no 'priority'"),
        ({"eviction": "retention", "retention": [{"priority": 50.5}]}, "must be a whole number"),
        ({"eviction": "retention", "retention": [{"priority": 500}]}, "from 0"),
        ({"ladder": [{"action": "offload_cache", "on": 0.9, "off": 0.5}]}, "no CPU prefix tier to save to"),
        ({"ladder": [{"action": "run_on_cpu", "on": 0.9, "off": 0.5, "value": 0.5}]}, "there is no CPU executor"),
        ({"policy": "orca", **TIER}, r"prefix caching is off \(the preset orca\)"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_before_it_runs(policy, words):
    with pytest.raises((ScenarioError, ConfigError), match=words):
        simulate(scenario(policy=policy))


def ran(stepping: bool, **policy: object) -> tuple[dict, list[str]]:
    log: list[str] = []
    result = simulate(
        scenario(policy=policy), check=True, stepping=stepping, decision_log=lambda entry: log.append(json.dumps(entry))
    )
    summary = {
        key: value for key, value in result.summary.items() if not key.endswith("time_s") or key == "simulated_time_s"
    }
    return summary, log


@pytest.mark.parametrize("mode", ["write_through", "write_back"])
def test_a_tier_serves_what_the_device_has_forgotten(mode):
    tier = {**TIER, "cpu_prefix_mode": mode}
    (leapt, log), stepped = ran(False, **tier), ran(True, **tier)
    assert (leapt, log) == stepped
    plain, _ = ran(False)
    assert leapt["loaded_blocks"] > 0
    assert leapt["finished"] == plain["finished"]
    assert leapt["prefix_hit_rate"] + leapt["cpu_prefix_hit_rate"] > plain["prefix_hit_rate"]
    assert leapt["kv_blocks_at_end"]["owned"] == leapt["kv_blocks_at_end"]["quarantined"] == 0
    assert "cpu_prefix_hit_rate" not in plain


def test_a_rung_that_watches_the_workspace_moves_and_leaps_like_it_steps():
    (leapt, log), stepped = ran(False, ladder=[SHRINK]), ran(True, ladder=[SHRINK])
    assert (leapt, log) == stepped
    assert leapt["degraded_by_rung"].get("shrink_step", 0) > 0
    assert any(json.loads(entry)["ladder"] for entry in log)


def test_rungs_that_never_move_leave_the_log_of_the_base_policy():
    """Byte for byte, with a CPU executor, a tier that is never asked for, and every rung out of reach."""
    base = ran(False, num_cpu_blocks=20_000)[1]
    never = [
        {"action": "offload_cache", "signal": "queue_s", "on": 1e6, "off": 1.0},
        {"action": "run_on_cpu", "signal": "queue_s", "on": 1e6, "off": 1.0, "value": 0.5},
        {"action": "shrink_step", "signal": "workspace", "on": 99.0, "off": 1.0, "value": 0.5},
    ]
    cpu = {"num_cpu_blocks": 20_000, "cpu_token_s": 0.1}
    assert ran(False, **cpu, ladder=never[1:])[1] == base
    with_tier = ran(False, **cpu, **TIER)[1]
    assert ran(False, **cpu, **TIER, ladder=never)[1] == with_tier
