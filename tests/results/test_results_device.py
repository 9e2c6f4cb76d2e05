"""What a run says of its GPUs' memory over time: every replica's curve, the report's figure of it, and what did not fit by line."""

from __future__ import annotations

import json
import re

import pytest

from sim import Result, Scenario, simulate
from sim.catalog.gpus import GIB

LOAD = {"workload": "uniform", "input_tokens": [500, 1500], "output_tokens": [20, 60], "num_requests": 40, "rate": 20.0}
FAULT = {"kind": "other_process", "at_s": 0.5, "gib": 7.8}


def run(**settings: object) -> Result:
    return simulate(Scenario(model="llama-3.1-8b", gpu="h100-sxm-80gb", workload=LOAD, **settings))


def figures(result: Result, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict]]:
    page = result.report(tmp_path_factory.mktemp("report") / "report.html").read_text()
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found
    return page, json.loads(found[1])


def test_every_replica_has_a_curve_of_its_own() -> None:
    result = run(run={"replicas": 3})
    memory = result.memory
    assert set(memory["replica"]) == {0, 1, 2}
    assert memory["time_s"].is_monotonic_increasing
    for replica, own in memory.groupby("replica"):
        rows = result.timeline[result.timeline["replica"] == replica]
        busy = own[own["phase"] != "idle"]
        assert len(busy) == len(rows)
        assert (own["total_bytes"] == memory["total_bytes"][0]).all()


def test_a_step_s_tokens_are_its_prompts_and_one_for_each_sequence_that_decodes() -> None:
    memory = run().memory
    busy = memory[memory["phase"] != "idle"]
    assert (busy["batch_tokens"] == busy["prefill_tokens"] + busy["decode_sequences"]).all()
    assert (busy["decode_sequences"] <= busy["active_sequences"]).all()
    assert busy["prefill_tokens"].max() >= 500
    assert not memory.loc[memory["phase"] == "idle", ["batch_tokens", "active_sequences"]].to_numpy().any()


def test_weights_and_graphs_are_the_account_s_lines() -> None:
    result = run()
    assert set(result.memory["weights_bytes"]) == {result.ledger.line("weights").bytes}
    assert set(result.memory["cuda_graphs_bytes"]) == {result.ledger.line("cuda_graphs").bytes}


def test_the_figure_stacks_the_lines_of_the_gpu_and_marks_what_did_not_fit(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    result = run(run={"faults": [FAULT]})
    page, drawn = figures(result, tmp_path_factory)
    traces = {trace["name"]: trace for trace in drawn["device"]["data"]}
    areas = [trace for trace in traces.values() if trace.get("stackgroup")]
    assert traces["weights"]["y"][0] == pytest.approx(result.ledger.line("weights").gib, rel=1e-3)
    assert traces["other processes"]["y"][-1] == pytest.approx(7.8, rel=1e-3)
    # Between steps the lines and what is left are the whole GPU: they never reach above it.
    total = result.ledger.total_bytes / GIB
    for at in range(len(areas[0]["y"])):
        assert sum(trace["y"][at] for trace in areas if "temporary" not in trace["name"]) <= total
    failed = result.summary["oom_by_line"]
    assert set(traces["out of memory"]["text"]) <= set(failed)
    assert f"{sum(failed.values())} steps ran out of memory" in page
    assert "The tightest step missed" in page


def test_without_failures_there_is_headroom_and_no_star(tmp_path_factory: pytest.TempPathFactory) -> None:
    page, drawn = figures(run(), tmp_path_factory)
    assert "out of memory" not in {trace["name"] for trace in drawn["device"]["data"]}
    assert "stayed free" in page
