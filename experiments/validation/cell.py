"""A cell: one scenario under one preset on one device, with the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sim.core.plan import Executor
from sim.memory import build_ledger

from .scenario_kinds import ANY_GPU
from .scenarios import SmallScenario
from .worlds import changed_answers, first_difference, preset, reference_answers, replay, run_for_real

TOLERANCES = {"weights": 0.0, "kv_cache": 0.001}
"""Share by which the device may take more or less than the account says: the pool has two scales a layer, which nobody counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What was compared, and what came of it."""

    scenario: str
    preset: str
    device: str
    decisions_equal: bool
    """The simulated world, given the real durations, decided the same in every step."""
    tokens_equal: bool
    """Every request got the tokens that it gets with unlimited memory."""
    leaked_blocks: int
    """Blocks held when all was over."""
    fallbacks: int
    """Calls that were not served as meant."""
    error: str | None
    """What ended the run, or how the worlds differ; None when all is well."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Steps, outcomes, preemptions, swaps: what the cell exercised."""

    @property
    def ok(self) -> bool:
        """Whether nothing differs, leaked or fell back."""
        return (
            self.decisions_equal
            and self.tokens_equal
            and not self.leaked_blocks
            and not self.fallbacks
            and self.error is None
        )


def check_cell(
    scenario: SmallScenario,
    name: str,
    device: str,
    reference: dict[str, list[int]] | None = None,
    wrap: Callable[[Any], Executor] | None = None,
) -> Cell:
    """Run `scenario` under preset `name` in both worlds.

    `reference` saves computing the roomy run again; `wrap` is that of `run_for_real`.
    """
    where: dict[str, Any] = {"scenario": scenario.name, "preset": name, "device": device}
    try:
        if reference is None:
            reference = reference_answers(scenario, device=device)
        chosen = preset(name, **scenario.policy)
        real = run_for_real(scenario, chosen, device=device, wrap=wrap)
        difference = first_difference(real.decisions, replay(scenario, chosen, real.recording))
    except Exception as error:  # whatever it is, it is this cell's verdict, and the others go on
        message = f"{type(error).__name__}: {error}"
        return Cell(**where, decisions_equal=False, tokens_equal=False, leaked_blocks=0, fallbacks=0, error=message)
    changed = changed_answers(real, reference)
    problems = [
        difference and f"decisions: {difference}",
        changed and f"answers of {', '.join(changed)} differ from those with unlimited memory",
        real.leaked_blocks and f"{real.leaked_blocks} blocks leaked",
        real.fallbacks and f"{real.fallbacks} calls fell back: {real.report['fallbacks']}",
    ]
    problems += account_errors(scenario, real.report["bytes"])
    found = [problem for problem in problems if problem]
    return Cell(
        **where,
        decisions_equal=difference is None,
        tokens_equal=not changed,
        leaked_blocks=real.leaked_blocks,
        fallbacks=real.fallbacks,
        error="; ".join(found) or None,
        facts={
            "steps": len(real.decisions),
            "outcomes": real.outcomes,
            "preemptions": sum(request.num_preemptions for request in real.requests),
            "prefix_hit_tokens": sum(request.prefix_hit_tokens for request in real.requests),
            "swapped_out_blocks": real.report["swapped_out_blocks"],
            "moved_to_cpu": real.report["moved_to_cpu"],
        },
    )


def account_errors(scenario: SmallScenario, measured: Mapping[str, int]) -> list[str]:
    """Where the account is off from what the device really took, by more than `TOLERANCES` allow; in sentences with numbers.

    Predicted with the ledger's own functions: weights, and the bytes of a block times the blocks of the pool, NO_BLOCK included.
    """
    shape, engine = scenario.shape, scenario.engine
    ledger = build_ledger(shape, ANY_GPU, block_size=engine.block_size, max_model_len=engine.max_model_len)
    predicted = {
        "weights": shape.weight_bytes(shape.dtype),
        "kv_cache": ledger.layout.block_bytes * (engine.num_gpu_blocks + 1),
    }
    return [
        f"the account of {name} is {predicted[name]:,} B and the device took {measured[name]:,} B, {error:+.2%} (allowed: {allowed:.2%})"
        for name, allowed in TOLERANCES.items()
        if abs(error := measured[name] / predicted[name] - 1) > allowed
    ]
