"""`kvtwin ledger`: the memory account of a GPU before anything runs on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .terminal import number, print_json, say

if TYPE_CHECKING:
    from sim.memory import Ledger
    from sim.resolve import Resolved
    from sim.scenario import Scenario

GIB = 2**30


def ledger(scenario: Scenario, *, explain: bool = False, out: Path | None = None, json: bool = False) -> int:
    """Draw up the account and print it. Returns the exit code."""
    from sim.resolve import resolve
    from sim.results.files import write_json

    resolved = resolve(scenario)
    document = as_document(resolved.ledger, warnings=resolved.warnings)
    if out is not None:
        write_json(out / "ledger.json", document)
    if json:
        print_json(document)
        return 0
    say(as_text(resolved, document, explain=explain))
    if out is not None:
        say(f"wrote {out / 'ledger.json'}")
    return 0


def as_document(account: Ledger, warnings: Sequence[str]) -> dict[str, Any]:
    """The account as JSON values: bytes are those of one rank, the poorest, which sizes the pool of all."""
    return {
        "num_gpu_blocks": account.num_gpu_blocks,
        "block_size": account.block_size,
        "kv_tokens": account.kv_tokens,
        "max_model_len": account.max_model_len,
        "max_concurrency": account.max_concurrency,
        "kv_bytes_per_token": account.kv_bytes_per_token,
        "engine_version": account.engine_version,
        "lines": [
            {
                "name": line.name,
                "bytes": line.bytes,
                "formula": line.formula,
                "numbers": line.numbers,
                "inside_budget": line.inside_budget,
            }
            for line in account.lines
        ],
        "warnings": list(warnings),
    }


def as_text(resolved: Resolved, document: dict[str, Any], *, explain: bool) -> str:
    """The account as a table; with `explain`, each line is followed by its formula with the numbers in it."""
    engine = resolved["engine"]
    ranks = engine["tensor_parallel_size"] * engine["pipeline_parallel_size"]
    width = max(len(line["name"]) for line in document["lines"]) + 2
    text = [
        f"{resolved.model.name} on {ranks if ranks > 1 else 'one'} {resolved.gpu.name}, vLLM {document['engine_version']}: GiB a rank",
        "",
    ]
    for line in document["lines"]:
        mark = "" if line["inside_budget"] else "   outside the engine's share"
        text.append(f"  {line['name']:<{width}}{line['bytes'] / GIB:>10.3f}{mark}")
        if explain:
            text += [f"      = {line['formula']}", f"      = {line['numbers']}"]
    text.append(f"  {'total':<{width}}{sum(line['bytes'] for line in document['lines']) / GIB:>10.3f}")
    text += [
        "",
        f"  KV pool            {number(document['num_gpu_blocks'])} blocks of {document['block_size']} tokens = "
        f"{number(document['kv_tokens'])} tokens at {number(document['kv_bytes_per_token'])} bytes a token",
        f"  maximum concurrency {document['max_concurrency']:.2f} requests of {number(document['max_model_len'])} tokens",
    ]
    return "\n".join([*text, *(f"  note: {warning}" for warning in document["warnings"])])
