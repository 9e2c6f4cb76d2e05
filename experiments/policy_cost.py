"""What policies cost the simulator: a stepped run under each, against the same requests under `vllm-v1`.

    python -m experiments.policy_cost [--requests 1000] [--repeats 3] [--trace FILE] [--only NAME,…] [--json FILE]

Every engine step is planned by itself (`--stepping`), so that policies are compared and not their leaps; then once more leaping, to
see how many steps a plan stands for. Times are processor seconds of the run alone, the least of the repetitions, and what counts is their
ratio to the baseline's in the same process: the machine's other work, and its speed, are in both. A policy that makes another number of
steps is judged by the time a step. The bar is 1.5.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sim
from sim.assembly import build_workload, cost_model, policy_of
from sim.core.plan import Executor, StepPlan, StepResult
from sim.core.policies import PRESETS
from sim.core.request import samples
from sim.resolve import resolve
from sim.results.files import write_json
from sim.world import run_world
from sim.world.executors import ModelExecutor

BASELINE = "vllm-v1"
BAR = 1.5
_RUNGS = [
    {"action": "no_reuse", "signal": "kv_usage", "on": 0.9, "off": 0.7},
    {"action": "pause_admission", "signal": "shortage", "on": 0.0001, "off": 0.0001, "hold_s": 0.0},
    {"action": "cap_new", "signal": "queue_s", "on": 0.5, "off": 0.25, "value": 512},
    {"action": "shed", "signal": "queue_s", "on": 20.0, "off": 20.0, "hold_s": 0.0},
]

CHANGES: dict[str, Mapping[str, Any]] = {
    **{name: {"policy": name} for name in PRESETS},
    "priority": {"scheduling_policy": "priority"},
    "lfu eviction": {"eviction": "lfu"},
    "swapping": {"num_cpu_blocks": 5000},
    "four rungs": {"scheduling_policy": "priority", "ladder": _RUNGS},
    "displacing front door": {"scheduling_policy": "priority", "max_num_queued_reqs": 400, "displace_queued": True},
    "async_scheduling": {"async_scheduling": True},
    "decode_first": {"batching": "decode_first", "continuous_decode_steps": 8},
    "separate budgets": {"max_prefill_tokens": 1024, "max_prefill_seqs": 4},
    "micro-batches of 16": {"max_decode_seqs": 16},
    "CPU tier write-through": {"num_cpu_prefix_blocks": 40000, "cpu_prefix_mode": "write_through"},
    "CPU tier write-back": {"num_cpu_prefix_blocks": 40000, "cpu_prefix_mode": "write_back"},
    "retention": {"eviction": "retention"},
}
"""What is measured, by name: the presets, and single changes to `vllm-v1`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One policy's run."""

    name: str
    stepped_s: float
    """Processor seconds of the stepped run."""
    steps: int
    ratio: float
    """Of its time a step to the baseline's."""
    leapt_s: float
    steps_a_plan: float
    """Steps that one plan stands for when leaping: 1 is a policy that must be asked at every step."""
    finished: int


class _Counted:
    """Prices plans, and counts them."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.plans = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans += 1
        return self._inner.execute(plan)


def base(requests: int, trace: str | None) -> sim.Scenario:
    """Conversations on an 8B model and an H100, a fifth of them important, at a load that fills the batch and mostly the pool."""
    source: dict[str, Any] = {"trace": trace} if trace else {"workload": "mooncake-chat", "rate": 3.0}
    return sim.Scenario(
        model="llama-3.1-8b",
        gpu="h100-sxm-80gb",
        workload={**source, "num_requests": requests, "priorities": {0: 0.2, 1: 0.8}},
        engine={"num_gpu_blocks_override": 25_000, "max_num_seqs": 128, "max_num_batched_tokens": 2048},
    )


def run(scenario: sim.Scenario, *, stepping: bool) -> tuple[float, int, int, int]:
    """Processor seconds, engine steps, plans and finished requests of one run."""
    resolved = resolve(scenario)
    config, policy = policy_of(resolved)
    sent = [sample for spec in build_workload(resolved).requests for sample in samples(spec)]
    counted = _Counted(ModelExecutor(cost_model(resolved)))
    began_s = time.process_time()
    record = run_world(
        config, cost_model(resolved), sent, policy=policy, stepping=stepping, executor=lambda core: counted
    )
    took_s = time.process_time() - began_s
    finished = sum(request.finish_reason in ("stop", "length") for request in record.requests)
    return took_s, record.recorders[0].core.steps, counted.plans, finished


def measure(scenario: sim.Scenario, names: list[str], repeats: int) -> list[Cost]:
    """The costs of policies, the baseline's among them, measured in turns."""
    stepped: dict[str, tuple[float, int, int, int]] = {}
    for _ in range(repeats):
        for name in names:
            took = run(scenario.with_(**CHANGES[name]), stepping=True)
            stepped[name] = min(took, stepped.get(name, took))
    a_step_s = {name: took[0] / took[1] for name, took in stepped.items()}
    costs = []
    for name in names:
        leapt_s, steps, plans, finished = run(scenario.with_(**CHANGES[name]), stepping=False)
        costs.append(
            Cost(
                name=name,
                stepped_s=stepped[name][0],
                steps=steps,
                ratio=a_step_s[name] / a_step_s[BASELINE],
                leapt_s=leapt_s,
                steps_a_plan=steps / plans,
                finished=finished,
            )
        )
    return costs


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if a policy is above the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trace", help="a trace instead of the built-in conversations")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names, separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    names = list(CHANGES) if options.only is None else list(dict.fromkeys([BASELINE, *options.only]))
    if unknown := [name for name in names if name not in CHANGES]:
        parser.error(f"--only names {', '.join(unknown)}; known are {', '.join(CHANGES)}")
    costs = measure(base(options.requests, options.trace), names, options.repeats)
    print(f"{'policy':26}{'stepped s':>10}{'steps':>9}{'a step':>8}{'leaping s':>11}{'steps/plan':>12}{'finished':>10}")
    for cost in costs:
        over = "  over the bar" if cost.ratio > BAR else ""
        print(
            f"{cost.name:26}{cost.stepped_s:10.2f}{cost.steps:9d}{cost.ratio:7.2f}x{cost.leapt_s:11.2f}"
            f"{cost.steps_a_plan:12.1f}{cost.finished:10d}{over}"
        )
    if options.json is not None:
        write_json(options.json, [asdict(cost) for cost in costs])
    return int(any(cost.ratio > BAR for cost in costs))


if __name__ == "__main__":
    raise SystemExit(main())
