"""Every policy of docs/policies.md can be chosen from a scenario file, with its arguments, and what makes no sense is refused."""

import re
import sys
import textwrap
from pathlib import Path

import pytest

import sim
from sim.assembly import policy_of
from sim.core import ConfigError, EngineConfig, EngineCore
from sim.core.admission import AdmissionBase, Every
from sim.core.batching import Batching
from sim.core.eviction import EVICTIONS
from sim.core.policies import PRESETS
from sim.core.policies.names import ADMISSIONS, QUEUES
from sim.core.preemption import VICTIMS
from sim.resolve import resolve
from sim.scenario_errors import ScenarioError

DOCUMENT = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
NEEDED = {
    "max-in-flight": {"limit": 8, "displace": True},
    "max-queued-tokens": {"limit": 500},
    "max-running": {"limit": 2},
    "max-kv-blocks": {"limit": 150},
    "new-token-ratio": {"start": 0.5, "decay_steps": 100},
    "predicted-peak": {"risk": 0.1, "quantiles": [[0.5, 20], [1.0, 60]]},
    "ttft-deadline": {"deadline_s": {"0": 5.0, "1": 0.5}},
    "token-bucket": {"tokens_per_s": 5000, "burst_tokens": 2000.0, "count_output": True},
    "lora-slots": {"max_loras": 1, "give_up_after_s": 5},
    "priority-shares": {"shares": {"0": 0.3, "1": 0.2}},
    "aging": {"s_per_level": 0.25},
    "fair": {"input_weight": 2, "output_weight": 1},
    "deadline": {"deadline_s": 0.5, "late_last": False},
}
FILE = """
[model]
model = "llama-3.1-8b"
[gpu]
gpu = "h100-sxm-80gb"
[engine]
num_gpu_blocks_override = 200
max_model_len = 1024
max_num_seqs = 4
max_loras = 2
[policy]
{policy}
[workload]
workload = "uniform"
rate = 40.0
num_requests = 60
input_tokens = [20, 400]
output_tokens = [1, 40]
priorities = {{0 = 0.5, 1 = 0.5}}
tenants = {{big = 0.8, small = 0.2}}
loras = {{x = 0.3, y = 0.3, z = 0.2}}
"""
WORKLOAD = {"workload": "uniform", "num_requests": 3, "input_tokens": 20, "output_tokens": 5}


def literal(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def entry(main, name):
    return f"{{ {main} = '{name}'" + "".join(f", {k} = {literal(v)}" for k, v in NEEDED.get(name, {}).items()) + " }"


def run(tmp_path, policy, **changes):
    file = tmp_path / "scenario.toml"
    file.write_text(FILE.format(policy=policy))
    return sim.simulate(sim.Scenario.load(file), check=True, **changes)


def choose(**given):
    """The policy of a scenario with this [policy]."""
    engine = {"num_gpu_blocks_override": 200, "max_model_len": 512, "max_num_seqs": 8}
    return policy_of(resolve(sim.Scenario(model="llama-3.1-8b", gpu="h100-sxm-80gb", engine=engine, policy=given)))[1]


# -- nothing that is documented is out of reach -----------------------------------------------------------------------------------


def named_in(header, column):
    """The names in a column of the table of the document that begins with `header`."""
    rows = DOCUMENT[DOCUMENT.index(header) :].splitlines()[2:]
    cells = []
    for row in rows:
        if not row.startswith("|"):
            break
        cells.append(re.fullmatch(r"`([a-z0-9_-]+)`", row.split("|")[column].strip()).group(1))
    return cells


@pytest.mark.parametrize(
    ("header", "column", "registry"),
    [
        ("| policy | in a scenario file |", 2, ADMISSIONS),
        ("| `Policy.queue` |", 2, QUEUES),
        ("| `Policy.victim` |", 2, VICTIMS),
        ("| `eviction` | taken first |", 1, EVICTIONS),
        ("| `[policy] batching` |", 1, [each.value for each in Batching]),
        ("| preset | admission |", 1, PRESETS),
    ],
)
def test_the_document_lists_all_names_and_no_other(header, column, registry):
    assert named_in(header, column) == list(registry)


@pytest.mark.parametrize("name", ADMISSIONS)
def test_every_admission_policy_runs_from_a_file_and_leaps_as_it_steps(tmp_path, name):
    policy = f"admission = {entry('policy', name)}"
    stepped, leapt = (run(tmp_path, policy, stepping=stepping) for stepping in (True, False))
    assert stepped.requests.equals(leapt.requests)
    assert leapt.summary["finished"] + leapt.summary["rejected"] == 60
    assert leapt.summary["scenario"]["policy"]["admission"] is not None


@pytest.mark.parametrize("name", QUEUES)
def test_every_order_runs_from_a_file_and_leaps_as_it_steps(tmp_path, name):
    policy = f"queue = {entry('order', name)}"
    stepped, leapt = (run(tmp_path, policy, stepping=stepping) for stepping in (True, False))
    assert stepped.requests.equals(leapt.requests)
    assert leapt.summary["finished"] == 60


@pytest.mark.parametrize("name", VICTIMS)
def test_every_victim_can_be_chosen(name):
    assert choose(victim=name).victim is VICTIMS[name]


# -- they do what they say --------------------------------------------------------------------------------------------------------


def adapters_at_once(result, shares):
    """Most adapters that ran at the same time."""
    rows = result.requests
    lora_of = {sample.request_id: sample.namespace.lora for sample in shares}
    events = []
    for row in rows[rows.outcome == "finished"].itertuples():
        if lora := lora_of[str(row.request_id)]:
            events += [(row.scheduled_s, 1, lora), (row.finished_s, 0, lora)]
    running, most = [], 0
    for _, starts, lora in sorted(events):
        running.append(lora) if starts else running.remove(lora)
        most = max(most, len(set(running)))
    return most


@pytest.mark.parametrize(("policy", "most"), [("", 2), ("admission = {policy = 'lora-slots', max_loras = 1}", 1)])
def test_adapters_run_as_many_at_once_as_the_engine_holds_or_the_policy_says(tmp_path, policy, most):
    from sim.assembly import build_workload
    from sim.resolve import resolve

    result = run(tmp_path, policy)
    sent = build_workload(resolve(sim.Scenario.load(tmp_path / "scenario.toml"))).requests
    counts = [sum(spec.namespace.lora == name for spec in sent) for name in ("x", "y", "z", "")]
    assert counts == [18, 18, 12, 12] or all(count > 3 for count in counts)
    assert {spec.tenant for spec in sent} == {"big", "small"}
    assert result.summary["finished"] == 60
    assert adapters_at_once(result, sent) == most


def test_a_token_bucket_turns_away_the_tenant_that_sends_more(tmp_path):
    result = run(tmp_path, "admission = {policy = 'token-bucket', tokens_per_s = 3000, burst_tokens = 1500}")
    assert result.summary["rejected_by_reason"].keys() == {"tenant_rate"}
    assert set(result.requests[result.requests.outcome == "rejected"].reason.str.extract(r"tenant '(\w+)'")[0]) == {
        "big"
    }


def test_a_class_of_your_own_takes_arguments_and_the_settings(tmp_path, monkeypatch):
    (tmp_path / "my_policies.py").write_text(
        textwrap.dedent(
            """
            from sim.core.admission import AdmissionBase, Deferral
            from sim.core.waiting import KeyedQueue

            class Rest(AdmissionBase):
                may_defer = True
                def __init__(self, config, above_tokens: int = 100, note="-"):
                    if note == "x":
                        raise ValueError("no such note")
                    self.limit = min(above_tokens, config.max_model_len)
                def may_start(self, request, need_blocks, view):
                    if request.spec.input_tokens <= self.limit or not view.num_running:
                        return True
                    return Deferral(reason="long", why="it is long", give_up_after_s=60.0)

            class LongestFirst(KeyedQueue):
                def __init__(self, view, sign: float = -1):
                    super().__init__(lambda request: sign * request.spec.input_tokens, view)

            def oldest(running, known):
                return next(iter(running.values()))
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    policy = """
admission = ["max-running", { policy = "my_policies:Rest", above_tokens = 200 }]
queue = { order = "my_policies:LongestFirst", sign = -1.0 }
victim = "my_policies:oldest"
"""
    with pytest.raises(ScenarioError, match="'max-running' cannot be made without arguments: missing.*'limit'"):
        run(tmp_path, policy)
    result = run(tmp_path, policy.replace('"max-running"', '{ policy = "max-running", limit = 3 }'))
    assert result.summary["finished"] == 60
    with pytest.raises(ScenarioError, match="has no argument 'over'; it takes above_tokens, note"):
        choose(admission={"policy": "my_policies:Rest", "over": 3})
    with pytest.raises(ScenarioError, match="above_tokens is 'many'; it must be a whole number"):
        choose(admission={"policy": "my_policies:Rest", "above_tokens": "many"})
    with pytest.raises(ScenarioError, match="cannot be made with above_tokens = 100, note = 'x': no such note"):
        choose(admission={"policy": "my_policies:Rest", "above_tokens": 100, "note": "x"})
    mine = choose(queue="my_policies:LongestFirst", victim="my_policies:oldest")
    core = EngineCore(EngineConfig(num_gpu_blocks=8), policy=mine)
    assert type(core._scheduler.waiting._queue).__name__ == "LongestFirst"


BROKEN = """
from sim.core.admission import AdmissionBase, Deferral
from sim.core.waiting import KeyedQueue

class Breaks(AdmissionBase):
    def __init__(self):
        {}["lost"]

class SaysYes(AdmissionBase):
    def arrive(self, spec, view):
        return True

class DefersUnsaid(AdmissionBase):
    def may_start(self, request, need_blocks, view):
        return Deferral(reason="long", why="it is long", give_up_after_s=60.0)

def nobody(running, known):
    return None

class HeadForAll(KeyedQueue):
    def __init__(self, view):
        super().__init__(lambda request: 0, view)
    def head(self):
        return super().head()
"""


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("admission = 'broken:Breaks'", "'broken:Breaks' cannot be made without arguments: KeyError: 'lost'"),
        (
            "admission = 'broken:SaysYes'",
            "says True of the arrival '0'; it must be None, a Rejection or a Displacement",
        ),
        ("admission = 'broken:DefersUnsaid'", r"defers '0' \(long\), but its may_defer is not True"),
        ("victim = 'broken:nobody'", "the policy's victim is None; it must be one of the 4 running requests"),
        ("queue = 'broken:HeadForAll'", "'broken:HeadForAll': its head must take important = True"),
        ("admission = 'unreadable:Any'", "'unreadable:Any' cannot be loaded: SyntaxError: "),
    ],
)
def test_a_plug_in_that_answers_what_it_may_not_is_named(tmp_path, monkeypatch, policy, words):
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "unreadable.py").write_text("class Any\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises((ScenarioError, ConfigError), match=words):
        run(tmp_path, policy, num_gpu_blocks_override=64, rate=10_000.0, output_tokens=200, loras=None)


def test_a_yes_in_other_words_is_a_yes_and_the_next_policy_is_asked() -> None:
    """`a and b` may be 1: that is no objection, and no reason not to ask the others."""

    class One(AdmissionBase):
        def may_start(self, request, need_blocks, view):
            return 1

    class No(AdmissionBase):
        def may_start(self, request, need_blocks, view):
            return False

    assert Every([One(), No()]).may_start(None, 0, None) is False
    assert Every([One(), One()]).may_start(None, 0, None) is True


@pytest.mark.parametrize(
    ("policy", "more", "words"),
    [
        ({"admission": {"policy": "lora-slots", "max_loras": 2}}, {}, "lora-slots sets nobody aside"),
        ({"eviction": "lfu"}, {"enable_prefix_caching": False}, "eviction lfu orders nothing"),
        ({"eviction": "lfu", "policy": "vllm-v0"}, {}, "eviction lfu orders nothing"),
        (
            {"ladder": [{"action": "no_reuse", "on": 0.9, "off": 0.5}]},
            {"enable_prefix_caching": False},
            "no_reuse can do",
        ),
        ({"guard_priority": 2}, {}, "guard_priority is 2, but there is no ladder"),
        ({"max_num_queued_reqs": 2, "displace_queued": True}, {}, "displace_queued sends nobody away"),
        ({"fork_samples": True}, {}, "fork_samples forks nobody"),
        ({"num_cpu_blocks": 50, "policy": "trtllm-no-evict"}, {}, "nobody gives way, so nothing is saved there"),
    ],
)
def test_what_can_do_nothing_is_pointed_out(policy, more, words):
    """And what can do something is not: the same words do not come where the key has an effect."""
    scenario = sim.Scenario(model="llama-3.1-8b", gpu="h100-sxm-80gb", workload=WORKLOAD, policy=policy)
    said = sim.simulate(scenario.with_(**more)).summary["warnings"]
    assert sum(words in text for text in said) == 1
    useful = scenario.with_(
        workload={**WORKLOAD, "num_requests": 20, "priorities": {0: 0.5, 1: 0.5}, "loras": {"a": 0.5}, "n": 2},
        max_loras=2,
    )
    if "guard_priority" in policy:
        useful = useful.with_(ladder=[{"action": "pause_admission", "on": 0.9, "off": 0.5}])
    if "policy" not in policy:
        assert not any(words in text for text in sim.simulate(useful).summary["warnings"])


# -- what is refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"admission": "lora-slot"}, "'lora-slot'; nearest is lora-slots .there are .*module:Class"),
        ({"admission": {"max_loras": 3}}, "a table needs policy = a name"),
        ({"admission": [{"policy": "max-running", "limit": 2.5}]}, "limit is 2.5; it must be a whole number"),
        ({"admission": [{"policy": "max-running", "limit": 0}]}, "limit on running requests is 0"),
        ({"admission": {"policy": "max-running", "limit": 2, "most": 3}}, "has no argument 'most'; it takes limit"),
        ({"admission": {"policy": "token-bucket", "tokens_per_s": 9}}, "cannot be made with tokens_per_s = 9: missing"),
        ({"admission": {"policy": "priority-shares", "shares": {"0": 0.8, "1": 0.5}}}, "at most 1 together"),
        ({"admission": {"policy": "priority-shares", "shares": {"high": 0.8}}}, "a table of numbers by priority"),
        ({"admission": {"policy": "ttft-deadline", "deadline_s": "2"}}, "deadline_s is '2'; it must be a number"),
        ({"admission": {"policy": "max-in-flight", "limit": 3}, "max_num_queued_reqs": 4}, "leave one of them out"),
        (
            {"admission": {"policy": "max-queued-tokens", "limit": 3}, "max_num_queued_tokens": 4},
            "leave one of them out",
        ),
        (
            {"admission": [{"policy": "max-running", "limit": 3}, {"policy": "max-running", "limit": 2}]},
            "max-running 2 times",
        ),
        ({"admission": {"policy": "free-blocks", "watermark_blocks": -1}}, "'free-blocks': the watermark is -1 blocks"),
        ({"admission": {"policy": "free-blocks", "watermark_blocks": 200}}, "200 blocks of a pool of 200: only one"),
        ({"admission": {"policy": "ttft-deadline", "deadline_s": {}}}, "'ttft-deadline': deadlines .* for none"),
        ({"queue": {"order": "deadline", "deadline_s": {}}}, "at least one; got {}"),
        ({"ladder": [{"action": "no_reuse", "on": -0.5, "off": -1}]}, "no_reuse goes off below -1; no signal is ever"),
        ({"victim": "os:sep"}, "'os:sep' cannot be called: it is a str"),
        (
            {"policy": "sglang", "scheduler_reserve_full_isl": False},
            "the preset sglang .* only if its whole prompt fits",
        ),
        (
            {"policy": "vllm-v0", "scheduler_reserve_full_isl": False},
            "leave it out, or use vllm-v1, trtllm-max-util or ladder",
        ),
        ({"queue": "fifo"}, "queue is 'fifo'; there are fcfs"),
        ({"queue": {"order": "aging"}}, "cannot be made without arguments: missing"),
        ({"queue": {"order": "aging", "s_per_level": 0}}, "above 0"),
        ({"queue": {"order": "fair", "input_weight": -1}}, "at least 0"),
        ({"queue": "json:JSONDecoder"}, "has no steady"),
        ({"queue": "fair", "scheduling_policy": "priority"}, "leave one of them out"),
        ({"victim": "youngest"}, "there are last-admitted"),
        ({"victim": "os:getcwd"}, "cannot be called with the running requests"),
        ({"victim": "largest-holder", "policy": "trtllm-no-evict"}, "nobody gives way; leave victim out"),
        ({"victim": "largest-holder", "policy": "orca"}, "nobody gives way"),
        ({"victim": "largest-holder", "admission": "full-reservation"}, "admission full-reservation reserves"),
    ],
)
def test_what_makes_no_sense_is_refused_when_the_scenario_is_read(given, words):
    with pytest.raises((ScenarioError, ConfigError), match=words):
        choose(**given)


def test_more_adapters_than_the_engine_holds_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"lets 3 adapters run at once, but \[engine\] max_loras is 2"):
        run(tmp_path, "admission = { policy = 'lora-slots', max_loras = 3 }")
    with pytest.raises(ScenarioError, match="names 3 adapters, but .* max_loras is 0"):
        run(tmp_path, "", max_loras=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tenants": {"a": 0.5}}, "add up to 1"),
        ({"loras": {"a": 0.7, "b": 0.7}}, "at most 1"),
        ({"loras": {"": 1.0}}, "names"),
    ],
)
def test_shares_that_do_not_add_up_are_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        run(tmp_path, "", workload={**WORKLOAD, **change})
