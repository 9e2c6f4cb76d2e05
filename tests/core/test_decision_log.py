"""The decision log, read on its own, accounts for every block, rejection and release."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings

from sim.world import run_world
from tests.support.pressed_engines import COST, STEP, Load, loads, watched
from tests.support.roomy import TICK_S, engine, request


@settings(max_examples=150)
@given(loads(windows=[None], hybrid=False))
def test_the_log_accounts_for_every_block_it_hands_out(load: Load) -> None:
    """Read on its own: a block given as new is held by nobody, a released one is held, and an admission may share what others hold."""
    log: list[dict[str, object]] = []
    load.run(decision_log=log.append)
    held: dict[str, list[int]] = {}
    for entry in log:
        for name, blocks in entry["released"]:
            table = held.setdefault(name, [])
            assert set(table) <= set(blocks), "a request ends and keeps blocks"
            held[name] = []
        for name, _, blocks in entry["scheduled"]:
            if name not in entry["admitted"]:
                everybody = {block for table in held.values() for block in table}
                assert not everybody & set(blocks), "a block is handed out while somebody holds it"
            held[name] = held.get(name, []) + [block for block in blocks if block]


def test_the_log_tells_of_blocks_that_slid_out_of_the_window() -> None:
    """A window of 4 over blocks of 4: of a request's five blocks no more than two are held at once, and all five are given back."""
    log: list[dict[str, object]] = []
    config = engine(num_gpu_blocks=3, block_size=4, sliding_window=4, max_num_seqs=1, max_num_batched_tokens=4)
    specs = [request("a", 0.0, 4, 16), request("after", 0.0, 1, 1)]
    run_world(config, STEP, specs, check=True, decision_log=log.append)
    given_out = Counter(
        block for entry in log for name, _, blocks in entry["scheduled"] if name == "a" for block in blocks
    )
    given_back = Counter(
        block for entry in log for name, blocks in entry["released"] if name == "a" for block in blocks
    )
    assert sum(given_out.values()) == 5
    assert given_back == given_out


@pytest.mark.parametrize(
    "arrival_ticks", [0, 4, 100], ids=["before any step", "during the last step", "after the last step"]
)
def test_the_log_has_every_rejection(arrival_ticks: int) -> None:
    log: list[dict[str, object]] = []
    specs = [request("runs", 0.0, 4, 1), request("too long", arrival_ticks * TICK_S, 5000, 1)]
    record = run_world(engine(max_model_len=4096), COST, specs, check=True, decision_log=log.append)
    reason = record.requests[1].reason
    assert [rejected for entry in log for rejected in entry["rejected"]] == [("too long", reason)]


def test_the_log_has_the_release_of_the_last_request() -> None:
    log: list[dict[str, object]] = []
    run_world(engine(), COST, [request("a", 0.0, 40, 3)], check=True, decision_log=log.append)
    assert [released for entry in log for released in entry["released"]] == [("a", [1, 2, 3])]


@settings(max_examples=100)
@given(loads(planned_ahead=[False]))
def test_a_plan_says_the_same_as_the_log(load: Load) -> None:
    log: list[dict[str, object]] = []
    _, watcher = watched(load, decision_log=log.append)
    for plan, entry in zip(watcher.plans, [entry for entry in log if entry["scheduled"]], strict=True):
        assert plan.step == entry["step"]
        assert list(plan.admitted) == entry["admitted"]
        assert list(plan.preempted) == entry["preempted"]
        assert [(name, list(blocks)) for name, blocks in plan.releases] == entry["released"]
