"""Small scenarios that push an engine into every corner in which memory management could change an answer.

Each kind (`scenario_kinds`) puts pressure on one thing and exists in three seeded sizes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sim.catalog.models import model_shape
from sim.core.config import EngineConfig
from sim.core.request import RequestSpec

from .scenario_kinds import BLOCK_SIZE, HYBRID, KINDS, MAX_MODEL_LEN, MODEL, POLICIES, windowed

if TYPE_CHECKING:
    from sim.catalog.shape import ModelShape

VARIANTS = 3
"""Scenarios of each kind."""
SEEDS = {"leavers-1": 4}
"""Roots of prompts and weights where the variant's number will not do: with 1, two logits of an answer are 1e-6 apart, and sums made in
another order, as a GPU makes them in batches of another size, draw the other token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallScenario:
    """Requests and an engine that is too small for them."""

    name: str
    requests: tuple[RequestSpec, ...]
    engine: EngineConfig
    shape: ModelShape
    """The model; with a window where the scenario has one."""
    policy: dict[str, Any] = field(default_factory=dict)
    """Keys of `[policy]` that go with every preset."""
    seed: int
    """Root of prompts and weights."""

    @property
    def roomy(self) -> SmallScenario:
        """The same requests with nothing in the way: room for all at once, whole prompts, nobody leaves. With several attention groups
        also one table for all layers, which keeps every token: the windows are in the model alone.
        """
        patient = tuple(replace(spec, cancel_after_s=None, timeout_s=None) for spec in self.requests)
        engine = EngineConfig(
            num_gpu_blocks=len(patient) * MAX_MODEL_LEN // BLOCK_SIZE + 1,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=len(patient),
            max_num_batched_tokens=len(patient) * MAX_MODEL_LEN,
            enable_prefix_caching=False,
            sliding_window=self.engine.sliding_window,
        )
        return replace(self, requests=patient, engine=engine, policy={})


def _make(kind: str, variant: int) -> SmallScenario:
    requests, engine = KINDS[kind](random.Random(f"{kind}-{variant}"))
    shape = model_shape(HYBRID if engine.kv_groups else MODEL)
    for group in engine.groups:
        if group.window is not None:
            shape = windowed(shape, group.window)
    name = f"{kind}-{variant}"
    return SmallScenario(
        name=name,
        requests=tuple(requests),
        engine=engine,
        shape=shape,
        seed=SEEDS.get(name, variant),
        policy=POLICIES.get(kind, {}),
    )


SCENARIOS: dict[str, SmallScenario] = {
    scenario.name: scenario for kind in KINDS for scenario in (_make(kind, variant) for variant in range(VARIANTS))
}
"""Every scenario by name."""
