"""One run, leapt and stepped, and all that each way leaves behind."""

from __future__ import annotations

import json
from dataclasses import dataclass

from sim.core.config import EngineConfig
from sim.core.policy import Policy
from sim.core.request import RequestSpec
from sim.costs.constant import FixedCost
from sim.costs.protocol import CostModel
from sim.results.bill import bill_of
from sim.results.recorder import RunRecord
from sim.results.summary import mark_columns, request_columns, summarize, timeline_columns
from sim.world import run_world
from tests.support.results import without_clock
from tests.support.roomy import TICK_S

STEP_TICKS = 8
"""Length of a step in the cases written by hand."""


@dataclass(frozen=True)
class Scenario:
    """One run, but for how time passes in it."""

    config: EngineConfig
    cost: CostModel
    requests: tuple[RequestSpec, ...]
    replicas: int = 1
    router: str = "round-robin"
    max_concurrency: int | None = None
    policy: Policy | None = None

    def run(self, *, stepping: bool, **hooks: object) -> RunRecord:
        return run_world(
            self.config,
            self.cost,
            self.requests,
            replicas=self.replicas,
            router=self.router,
            max_concurrency=self.max_concurrency,
            policy=self.policy,
            stepping=stepping,
            check=True,
            **hooks,
        )


def everything(scenario: Scenario, *, stepping: bool, **hooks: object) -> dict[str, object]:
    """All that a run leaves behind, without what a clock on the wall says."""
    log: list[str] = []
    record = scenario.run(stepping=stepping, decision_log=lambda entry: log.append(json.dumps(entry)), **hooks)
    slots_per_block = record.config.slots_per_block
    bills = [bill_of(request, slots_per_block) for request in record.requests]
    used = [recorder.integrals for recorder in record.recorders]
    assert sum(bill.owed_fs for bill in bills) == sum(integrals.block_fs for integrals in used)
    assert sum(bill.held_fs for bill in bills) * slots_per_block == sum(whole.table_slots for whole in used)
    assert sum(bill.unfilled_slot_fs for bill in bills) == sum(integrals.unfilled_slots for integrals in used)
    summary = summarize(record, scenario={}, seed=0, version="", limits_s={"ttft": 0.1, "tpot": 0.02})
    return {
        "decision log": log,
        "summary": json.dumps(without_clock(summary)),
        "requests": request_columns(record),
        "timeline": timeline_columns(record),
        "marks": mark_columns(record),
        "memory": [row.memory for recorder in record.recorders for row in recorder.rows],
        "bills": bills,
        "ooms": [recorder.memory.ooms for recorder in record.recorders if recorder.memory],
    }


def assert_leap_equals_step(scenario: Scenario, **hooks: object) -> None:
    leaping, stepping = (everything(scenario, stepping=stepping, **hooks) for stepping in (False, True))
    for part in stepping:
        assert leaping[part] == stepping[part], part


def at(ticks: int, name: str, input_tokens: int, output_tokens: int, **fields: object) -> RequestSpec:
    """A request that arrives after `ticks`."""
    return RequestSpec(
        request_id=name, arrival_s=ticks * TICK_S, input_tokens=input_tokens, output_tokens=output_tokens, **fields
    )


def by_hand(*requests: RequestSpec, cost: CostModel | None = None, **settings: object) -> Scenario:
    """A scenario on a roomy engine with steps of eight ticks, unless something else is asked for."""
    config = {"num_gpu_blocks": 100, "block_size": 4, "max_model_len": 2048, "max_num_seqs": 8} | settings
    config.setdefault("max_num_batched_tokens", 2048)
    return Scenario(EngineConfig(**config), cost or FixedCost(STEP_TICKS * TICK_S), requests)
