"""The token and sequence budgets of a step: defaults where none were given, and their contradictions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from .scenario_errors import ScenarioError

if TYPE_CHECKING:
    from sim.memory.releases import EngineRelease


def why_whole(tables: Mapping[str, dict[str, Any]], given: Collection[str], release: EngineRelease) -> str:
    """Who said that prompts are computed whole, where nobody typed it; as a clause in brackets."""
    if "enable_chunked_prefill" in given:
        return ""
    who = "engine_version" if release.whole_prompts_up_to else f"the preset {tables['policy']['policy']}"
    return f" ({who} computes prompts whole at this length unless told otherwise)"


def fill_budgets(
    engine: dict[str, Any], longest: int, default_tokens: int, default_seqs: int, gpu_name: str, why_whole: str
) -> None:
    """The step's token and sequence budgets, and their contradictions. Source: vLLM 0.29, `SchedulerConfig` and `EngineArgs`."""
    tokens, seqs = engine["max_num_batched_tokens"], engine["max_num_seqs"]
    whole_prompts = not engine["enable_chunked_prefill"]
    if tokens is None:
        engine["max_num_batched_tokens"] = max(default_tokens, longest) if whole_prompts else default_tokens
    elif whole_prompts and tokens < longest:
        raise ScenarioError(
            f"without chunked prefill{why_whole} a whole prompt must fit in one step, but max_num_batched_tokens ({tokens}) is below "
            f"max_model_len ({longest}); raise the first, lower the second, or enable chunked prefill"
        )
    if seqs is None:
        engine["max_num_seqs"] = min(default_seqs, engine["max_num_batched_tokens"])
    elif engine["max_num_batched_tokens"] < seqs:
        origin = f"the default on {gpu_name}" if tokens is None else "given"
        raise ScenarioError(
            f"max_num_batched_tokens ({engine['max_num_batched_tokens']}, {origin}) is below max_num_seqs ({seqs}): every running "
            "sequence needs one token of the budget; raise the first or lower the second"
        )
