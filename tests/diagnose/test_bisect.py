"""`kvtwin bisect`: the smallest part of a load that still fails, found again every time."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.bisect_search import smallest_number, smallest_part
from experiments.cli import main
from experiments.scenario_text import scenario_text
from sim import Scenario, simulate
from tests.support.refusals import Refusals

# -- the search, without an engine ---------------------------------------------------------------------------------------


class Asked:
    """Fails when all of `culprits` are in the load; counts different questions."""

    def __init__(self, *culprits: int) -> None:
        self.culprits = set(culprits)
        self.questions: set[tuple[int, ...]] = set()

    def __call__(self, items: Sequence[int]) -> bool:
        self.questions.add(tuple(items))
        return self.culprits <= set(items)


@given(st.sets(st.integers(0, 1999), min_size=1, max_size=4))
def test_the_culprits_are_found_whichever_they_are(culprits: set[int]) -> None:
    asked = Asked(*culprits)
    assert smallest_part(range(2000), asked) == sorted(culprits)
    assert len(asked.questions) <= 14 * len(culprits) + 16


def test_an_alternative_that_is_enough_is_not_taken_with_the_other() -> None:
    """Either 3 and 4 or 7 alone: a load that is minimal has one of them."""
    found = smallest_part(range(10), lambda items: {3, 4} <= set(items) or 7 in items)
    assert found in ([3, 4], [7])


def test_when_more_load_can_help_the_result_still_fails_and_is_minimal() -> None:
    """Item 5 fails only without item 2 or with item 8: prefixes mislead, ddmin does not."""

    def fails(items: Sequence[int]) -> bool:
        return 5 in items and (2 not in items or 8 in items)

    found = smallest_part(range(10), fails)
    assert fails(found)
    assert not any(fails([other for other in found if other != item]) for item in found)


@given(st.integers(1, 100), st.integers(1, 100))
def test_the_smallest_number_is_where_it_begins_to_fail(first: int, beyond: int) -> None:
    assert smallest_number(1, first + beyond, lambda value: value >= first) == first


# -- in an engine --------------------------------------------------------------------------------------------------------

FLAGS = (
    "--model",
    "llama-3.1-8b",
    "--gpu",
    "h100-sxm-80gb",
    "--max-num-batched-tokens",
    "8192",
    "--max-num-seqs",
    "64",
)
CULPRITS = ("700", "701", "702")


@pytest.fixture
def planted(tmp_path: Path) -> tuple[Path, Path]:
    """2,000 small requests, and in their middle three prompts that fit in one step but not in its memory; the scenario has
    another process that leaves 700 MiB of workspace. A prompt of 2,500 tokens needs 286 MB, two 540 MB and three 793 MB."""
    rows = []
    for number in range(2000):
        at_s = 0.05 * number if str(number) not in CULPRITS else 0.05 * 700
        length = 2500 if str(number) in CULPRITS else 20 + number % 50
        rows.append([str(number), repr(at_s), length, 4])
    trace = tmp_path / "requests.csv"
    with trace.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["request_id", "arrival_s", "input_tokens", "output_tokens_requested"])
        writer.writerows(rows)
    engine = {"max_num_batched_tokens": 8192, "max_num_seqs": 64}
    scenario = Scenario(model="llama-3.1-8b", gpu="h100-sxm-80gb", engine=engine, workload={"trace": str(trace)})
    tight = scenario.with_(faults=[{"kind": "other_process", "gib": workspace_gib(scenario) - 700 / 1024}])
    file = tmp_path / "server.toml"
    tables = tight.resolved()
    file.write_text(scenario_text({name: tables[name] for name in ("model", "gpu", "engine", "run")}))
    return trace, file


def workspace_gib(scenario: Scenario) -> float:
    from sim.assembly import device
    from sim.resolve import resolve

    return device(resolve(scenario)).workspace_bytes / 2**30


def bisected(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    assert main(["bisect", *map(str, arguments), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    document: dict[str, object] = json.loads(captured.out)
    return document


@pytest.mark.slow
def test_a_planted_culprit_of_three_is_found_among_two_thousand(
    planted: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace, server = planted
    state, out = tmp_path / "state.json", tmp_path / "culprit"
    document = bisected(capsys, trace, server, "--fails", "oom", "--state", state, "--out", out)
    assert [row["request_id"] for row in document["requests"]] == list(CULPRITS)
    assert document["runs"] <= 200
    assert document["reproduces"] is True
    lengths = [row["input_tokens"] for row in document["requests"]]
    assert all(row["output_tokens"] == 1 for row in document["requests"])
    assert sum(lengths) < 7500

    # Nothing can be taken away: a token less in any prompt, and it does not fail.
    written = Scenario.load(out / "scenario.toml")
    assert simulate(written).summary["oom_events"] > 0
    shorter = (out / "requests.csv").read_text().replace(f",{lengths[0]},", f",{lengths[0] - 1},", 1)
    (out / "requests.csv").write_text(shorter)
    assert simulate(written).summary["oom_events"] == 0

    # With every answer known, nothing is run again and the same comes out; without any, too.
    kept = state.read_text()
    assert bisected(capsys, trace, server, "--fails", "oom", "--state", state) == document
    assert state.read_text() == kept
    half = json.loads(kept)
    half["answers"] = dict(list(half["answers"].items())[: len(half["answers"]) // 2])
    state.write_text(json.dumps(half))
    assert bisected(capsys, trace, server, "--fails", "oom", "--state", state) == document
    assert json.loads(state.read_text()) == json.loads(kept)


def small_load(tmp_path: Path) -> Path:
    trace = tmp_path / "small.csv"
    trace.write_text("request_id,arrival_s,input_tokens,output_tokens_requested\na,0.0,100,4\nb,0.1,100,4\n")
    return trace


def test_a_load_that_does_not_fail_is_said_and_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bisect", str(small_load(tmp_path)), *FLAGS, "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "does not fail here (a step runs out of memory or a request fails)" in captured.err


def test_a_request_that_is_too_long_is_its_own_culprit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "long.csv"
    trace.write_text("request_id,arrival_s,input_tokens,output_tokens_requested\na,0.0,100,4\nb,0.1,3000,4\n")
    document = bisected(capsys, trace, *FLAGS, "--max-model-len", "2048", "--fails", "rejected")
    assert document["requests"] == [
        {"request_id": "b", "arrival_s": 0.0, "input_tokens": 2048, "output_tokens": 1, "priority": 0}
    ]
    assert document["max_num_seqs"] == 1


def test_a_scenario_made_for_another_load_lends_its_engine_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rate would draw other arrivals, and its 300 requests are not there: the log's own two are replayed, 0.1 s apart."""
    trace, server = tmp_path / "pair.csv", tmp_path / "server.toml"
    trace.write_text("request_id,arrival_s,input_tokens,output_tokens_requested\na,0.0,1600,60\nb,0.1,1600,60\n")
    workload = {"workload": "azure-conv", "rate": 0.001, "num_requests": 300}
    scenario = Scenario(
        model="llama-3.1-8b", gpu="h100-sxm-80gb", engine={"num_gpu_blocks_override": 205}, workload=workload
    ).resolved()
    server.write_text(scenario_text({name: scenario[name] for name in ("model", "gpu", "engine", "workload")}))
    document = bisected(capsys, trace, server, "--fails", "preempted")
    assert [row["request_id"] for row in document["requests"]] == ["a", "b"]
    assert document["max_num_seqs"] == 2
    assert document["reproduces"] is True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--fails", "omo"), "nearest is oom"),
        (("--fails", "nowhere:to_be_found"), "cannot be loaded"),
        (("--fails", ".relative:to_nothing"), "cannot be loaded"),
        (("--fails", "math:pi"), "is no function, but a float"),
        (("--state", "STATE"), "not a state file"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    arguments: tuple[str, ...], said: str, tmp_path: Path, refused: Refusals
) -> None:
    (tmp_path / "STATE").write_text("[]")
    given_ = [str(tmp_path / word) if word == "STATE" else word for word in arguments]
    refused(["bisect", small_load(tmp_path), *FLAGS, *given_], said)


def test_the_state_of_another_load_is_refused(tmp_path: Path, refused: Refusals) -> None:
    trace, state = small_load(tmp_path), tmp_path / "state.json"
    assert main(["bisect", str(trace), *FLAGS, "--state", str(state)]) == 1
    trace.write_text(trace.read_text().replace("b,0.1,100", "b,0.1,101"))
    refused(["bisect", trace, *FLAGS, "--state", state], "belongs to another load")
