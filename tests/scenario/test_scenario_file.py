"""Scenarios as files, as Python values and as flags: one meaning, one message for each mistake."""

import math
import pickle

import numpy as np
import pytest

from sim.scenario import Scenario, ScenarioError

FILE = """
[model]
model = "llama-3.1-8b"
[gpu]
gpu = "h100-sxm-80gb"
[engine]
num_gpu_blocks_override = 2000
[workload]
workload = "azure-conv"
rate = 4
timeout = 30
[slo]
ttft_p99 = 2.0
[run]
seed = 7
"""


@pytest.fixture
def scenario_file(tmp_path):
    def write(text=FILE):
        path = tmp_path / "chat.toml"
        path.write_text(text)
        return path

    return write


def test_a_file_and_python_say_the_same(scenario_file):
    written = Scenario(
        model="llama-3.1-8b",
        gpu="h100-sxm-80gb",
        engine={"num_gpu_blocks_override": 2000},
        workload={"workload": "azure-conv", "rate": 4, "timeout": 30},
        slo="ttft_p99=2",
        run={"seed": 7},
    )
    assert Scenario.load(scenario_file()) == written


def test_a_table_may_be_given_as_its_main_value(scenario_file):
    assert Scenario.load(scenario_file('model = "m"\nworkload = "w"')) == Scenario(model="m", workload="w")


def test_name_and_preset_are_understood(scenario_file):
    text = '[model]\nname = "m"\n[gpu]\nname = "g"\n[workload]\nname = "w"\n[policy]\npreset = "vllm-v1"'
    assert Scenario.load(scenario_file(text)) == Scenario(model="m", gpu="g", workload="w", policy="vllm-v1")


def test_flags_replace_what_the_file_says(scenario_file):
    scenario = Scenario.load(scenario_file(), flags={"rate": 8.0, "slo": "tpot=0.1", "seed": 1})
    assert (scenario.workload.rate, scenario.workload.timeout, scenario.run.seed) == (8.0, 30, 1)
    assert scenario.slo.as_dict() == {"tpot_p99": 0.1}


def test_a_copy_with_changes_leaves_the_original_alone():
    scenario = Scenario(model="m", engine={"block_size": 16})
    changed = scenario.with_(block_size=32, engine={"max_num_seqs": 8}, rate=math.inf)
    assert (changed.engine.block_size, changed.engine.max_num_seqs, changed.workload.rate) == (32, 8, math.inf)
    assert (scenario.engine.block_size, scenario.engine.max_num_seqs, scenario.workload.rate) == (16, None, None)


def test_a_trace_replaces_a_built_in_workload_and_the_reverse():
    scenario = Scenario(workload={"workload": "azure-conv", "rate": 2.0}).with_(trace="t.csv")
    assert (scenario.workload.trace, scenario.workload.workload, scenario.workload.rate) == ("t.csv", None, 2.0)
    assert scenario.with_(workload="uniform").workload.trace is None


def test_a_trace_is_found_beside_its_scenario_file(scenario_file, tmp_path):
    (tmp_path / "t.csv").write_text("")
    path = scenario_file('[workload]\ntrace = "t.csv"')
    assert Scenario.load(path).workload.trace == str(tmp_path / "t.csv")
    assert Scenario.load(path, flags={"trace": "other.csv"}).workload.trace == "other.csv"


def test_numbers_of_numpy_are_numbers():
    assert Scenario(engine={"block_size": np.int64(32)}, workload={"rate": np.float64(2)}) == Scenario(
        engine={"block_size": 32}, workload={"rate": 2.0}
    )


def test_an_infinite_rate_may_be_spelt_as_vllm_does():
    assert Scenario(workload={"rate": "inf"}).workload.rate == math.inf


def test_a_scenario_can_be_sent_to_another_process():
    scenario = Scenario(model="m", slo="ttft=1", run={"seed": 3})
    assert pickle.loads(pickle.dumps(scenario)) == scenario


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[engine]\nblok_size = 16", ["chat.toml", "[engine] blok_size", "nearest is block_size"]),
        ("[enigne]\nblock_size = 16", ["chat.toml", "enigne", "nearest is [engine]"]),
        ("seed = 1", ["chat.toml", "seed", "[run] seed"]),
        ("[engine]\nseed = 1", ["chat.toml", "[engine] seed", "belongs in [run]"]),
        ('[run]\nout = "here"', ["[run] out", "command line: --out"]),
        ('[engine]\nblock_size = "16"', ["[engine] block_size", "'16' (text)", "whole number, at least 1"]),
        ("[engine]\nblock_size = 0", ["[engine] block_size is 0", "at least 1"]),
        ("[engine]\nblock_size = 1000000000", ["block_size is 1000000000", "at most 65536"]),
        ("[engine]\nblock_size = 1.5", ["[engine] block_size is 1.5", "whole number"]),
        ("[engine]\nblock_size = true", ["[engine] block_size is true", "whole number"]),
        ("[engine]\nnum_gpu_blocks_override = 0", ["num_gpu_blocks_override is 0", "at least 1"]),
        ("[engine]\ngpu_memory_utilization = 1.2", ["gpu_memory_utilization is 1.2", "above 0 and at most 1"]),
        ("[engine]\nblock_size = 0\nmax_num_seqs = -1", ["block_size is 0", "max_num_seqs is -1"]),
        ("engine = 3", ["[engine] is 3", "table"]),
        ('[policy]\nscheduling_policy = "lifo"', ["scheduling_policy is 'lifo'", "one of fcfs, priority"]),
        ('[policy]\npolicy = "sglong"', ["[policy] policy is 'sglong'", "sglang"]),
        ('[run]\nexecutor = "tensorrt"', ["[run] executor is 'tensorrt'", "there are model, torch"]),
        ('[run]\nexecutor = "torhc"', ["[run] executor is 'torhc'", "nearest is torch (there are model, torch)"]),
        ('[run]\nexecutor = "torch"\ndevice = "tpu"', ["[run] device is 'tpu'", "cuda:N"]),
        ('[run]\ndevice = "cuda"', ["[run] device is 'cuda'", "leave it out"]),
        ('[workload]\ntrace = "a"\nworkload = "b"', ["[workload] trace (a)", "[workload] workload (b)", "both"]),
        ('[workload]\ntrace = "a"\nburstiness = 0.5', ["burstiness", "replayed at its own times", "rate"]),
        ("[workload]\nn = 2\nbeam_width = 3", ["[workload] n (2)", "[workload] beam_width (3)", "not both"]),
        ("[workload]\nbeam_change = 0.2", ["[workload] beam_change (0.2)", "give beam_width too"]),
        ("[workload]\nbeam_width = 2\nbeam_change = 1.0", ["beam_change is 1.0", "below 1"]),
        ("[workload]\nrate = -1", ["[workload] rate is -1", "above 0"]),
        ("[workload]\nrate = nan", ["[workload] rate is nan"]),
        ("[workload]\ntimeout = inf", ["[workload] timeout is inf"]),
        ("[workload]\ncancel_rate = 2", ["cancel_rate is 2", "at most 1"]),
        ("[workload]\ninput_tokens = [1, 2, 3]", ["input_tokens", "[smallest, largest]"]),
        (
            '[workload]\ninput_tokens = ["a", 3]',
            ["[workload] input_tokens[0] is 'a' (text); it must be a whole number ("],
        ),
        ('[workload]\ninput_tokens = "many"', ["[workload] input_tokens is 'many' (text)", "a whole number or a list"]),
        ("[workload]\ninput_tokens = 0", ["input_tokens is 0; it must be at least 1 or a list"]),
        ("[workload]\ninput_tokens = [1, 2, 3]", ["input_tokens is [1, 2, 3]", "a list of 2"]),
        ('[workload]\npriorities = {0 = "a"}', ["[workload] priorities.0 is 'a' (text); it must be a number ("]),
        (
            "[workload]\npriorities = {high = 1.0}",
            ["priorities has the key 'high' (text); a whole number was expected"],
        ),
        ("[workload]\ntenants = {acme = true}", ["[workload] tenants.acme is true; it must be a number ("]),
        ('[policy]\nladder = [{action = ["x"]}]', ["[policy] ladder[0].action is ['x']", "text in quotes or a number"]),
        ("[policy]\nladder = [{on = 1.0}, 3]", ["[policy] ladder[1] is 3; it must be a table ("]),
        (
            '[policy]\nretention = [{priority = "high"}]',
            ["retention[0].priority is 'high' (text)", "a number or true or false"],
        ),
        ("[policy]\nadmission = [3]", ["[policy] admission[0] is 3; it must be text in quotes or a table ("]),
        (
            '[run]\nfaults = [{kind = "leak", at_s = [1]}]',
            ["[run] faults[0].at_s is [1]", "text in quotes or a number"],
        ),
        ("[slo]\nttft_p98 = 1", ["[slo]", "'ttft_p98'", "nearest is ttft_p9"]),
        ("slo = 3", ["[slo] is 3"]),
        ('[model]\nname = "a"\nmodel = "b"', ["[model] name", "[model] model", "same"]),
        ("x = = 3", ["chat.toml", "not valid TOML", "line 1"]),
    ],
)
def test_a_mistake_in_a_file_is_one_message_that_says_where_and_what_is_right(scenario_file, text, says):
    with pytest.raises(ScenarioError) as error:
        Scenario.load(scenario_file(text))
    message = str(error.value)
    assert "\n" not in message
    for part in says:
        assert part in message


def test_a_file_that_cannot_be_read_says_so(tmp_path):
    with pytest.raises(ScenarioError, match=r"nope\.toml: cannot read"):
        Scenario.load(tmp_path / "nope.toml")
    with pytest.raises(ScenarioError, match="cannot read"):
        Scenario.load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScenarioError, match="not UTF-8"):
        Scenario.load(tmp_path / "binary.toml")


def test_a_mistake_in_a_flag_names_the_flag_and_not_the_file(scenario_file):
    with pytest.raises(ScenarioError, match=r"^--block-size is 0; it must be a whole number, at least 1"):
        Scenario.load(scenario_file(), flags={"block_size": 0})


def test_an_unknown_name_in_python_names_the_nearest():
    with pytest.raises(ScenarioError, match="'modle'.*nearest is .model."):
        Scenario(modle="llama-3.1-8b")
    with pytest.raises(ScenarioError, match="'blck_size'.*block_size in .engine."):
        Scenario().with_(blck_size=16)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[engine]\nzzz = 1", "[engine] zzz is not a key of [engine]; there are tensor_parallel_size, "),
        ("[motor]\nzzz = 1", "motor is neither a table nor a key; tables are [model] [gpu] "),
        ('[policy]\npolicy = "foo"', "[policy] policy is 'foo'; there are vllm-v1, "),
        (
            "[slo]\nqqq = 1.0",
            "'qqq' is not an objective; an objective is a metric, _ and a statistic, such as ttft_p99",
        ),
    ],
)
def test_nothing_is_suggested_for_a_name_that_is_like_no_other(scenario_file, text, says):
    with pytest.raises(ScenarioError) as error:
        Scenario.load(scenario_file(text))
    assert says in str(error.value)
    assert "nearest" not in str(error.value)


def test_priorities_of_a_file_are_whole_numbers_though_toml_keys_are_text(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('[workload]\nworkload = "azure-conv"\npriorities = { 0 = 0.25, -1 = 0.75 }\n')
    assert Scenario.load(file).workload.priorities == {0: 0.25, -1: 0.75}
