"""From requests to the sequences that an engine runs: samples and beams, as the scenario asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sim.core.config import EngineConfig
from sim.core.forking import Forking
from sim.core.request import RequestSpec, samples

from .scenario_errors import ScenarioError

BEAM_CHANGE = 0.1
"""Probability that a beam is replaced by a copy of another one at a token, where the scenario gives none. An assumption, not a
measurement: it depends on model and prompt. It decides how many blocks beams share, not how long they are."""


def sequences(
    tables: Mapping[str, Mapping[str, Any]], config: EngineConfig, requests: Sequence[RequestSpec], replication: int = 0
) -> list[RequestSpec]:
    """Every request as the samples or beams that `[workload]` asks for, in order; `tables` are those of a resolved scenario.

    Raises ScenarioError where the engine that `[policy]` asks for could not run them.
    """
    workload, policy, seed = tables["workload"], tables["policy"], tables["run"]["seed"]
    width, change = workload["beam_width"], workload["beam_change"]
    forking = None
    if width > 1:
        forking = Forking(
            width=width, change=BEAM_CHANGE if change is None else change, seed=(seed << 16) + replication
        )
    elif policy["fork_samples"] and workload["n"] > 1:
        forking = Forking(width=workload["n"])
    if forking is not None:
        _check(forking, policy["policy"], config)
    changes: dict[str, Any] = {}
    if max(width, workload["n"]) > 1:
        changes = {"n": width if width > 1 else workload["n"], "forking": forking}
    if not workload["ignore_eos"]:
        changes["max_tokens"] = None
    if changes:
        requests = [replace(spec, **changes) for spec in requests]
    return [sample for spec in requests for sample in samples(spec)]


def _check(forking: Forking, preset: str, config: EngineConfig) -> None:
    what = "beams" if forking.change else "forked samples"
    if preset == "orca":
        raise ScenarioError(
            f"{what} share blocks, but [policy] policy orca keeps every sequence in one contiguous piece and shares nothing; choose "
            "another policy"
        )
    if forking.width > config.max_num_seqs:
        raise ScenarioError(
            f"{forking.width} {what} of a request run together, but [engine] max_num_seqs is {config.max_num_seqs}; raise it to at least "
            f"{forking.width}"
        )
