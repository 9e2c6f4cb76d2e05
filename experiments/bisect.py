"""`kvtwin bisect`: the smallest part of a load that still fails, with the shortest lengths and the smallest batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bisect_probe import PREDICATES, Probe
from .bisect_search import smallest_number, smallest_part
from .scenario_text import scenario_text
from .terminal import Progress, complain, print_json, say

if TYPE_CHECKING:
    from sim.core.request import RequestSpec
    from sim.scenario import Scenario

_DRAWN = ("num_requests", "duration", "rate", "burstiness", "arrival", "priorities")
"""Keys of `[workload]` that say how a load is drawn."""


def bisect(
    requests: Path,
    scenario: Scenario,
    *,
    fails: str = "any",
    state: Path | None = None,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Reduce the load in `requests`; `out` gets requests.csv, scenario.toml and bisect.json, `state` every answer so far.

    Returns 0 with a result, 1 when the whole load does not fail. Raises ConfigError, ScenarioError, TraceError.
    """
    # The log is the load, with its own times: what the scenario says of another load does not count.
    scenario = scenario.with_(trace=str(requests), **dict.fromkeys(_DRAWN))
    with Progress("kvtwin bisect") as progress:
        doing = ["reading"]
        probe = Probe(scenario, fails, state, lambda runs: progress.say(f"run {runs}: {doing[0]}"))
        doing[0] = f"the whole load of {len(probe.requests):,} requests"
        if not probe.fails(probe.requests):
            meaning = PREDICATES.get(fails, fails)
            complain("kvtwin bisect", f"{requests}: the whole load does not fail here ({meaning}); nothing to reduce")
            return 1
        found, batch = reduce_load(probe, doing)
    document = _document(probe, scenario, found, batch, requests)
    if out is not None:
        _write(out, document, found)
    if json:
        print_json(document)
        return 0
    _show(document, out)
    return 0


def reduce_load(probe: Probe, doing: list[str]) -> tuple[list[RequestSpec], int]:
    """The smallest part of the probe's load that fails, made as plain, short and slow as it can be; and the smallest batch."""
    doing[0] = "which requests"
    found = smallest_part(probe.requests, probe.fails)
    plain = [_plain(spec) for spec in found]
    if probe.fails(plain):  # neither prefixes nor impatient clients have to do with it
        found = plain
    doing[0] = "how long"
    for index in range(len(found)):
        for name in ("output_tokens", "input_tokens"):
            found = _shortened(probe, found, index, name)
    doing[0] = "how many at once"
    # The batch decides over more than who runs together: with it grow the graphs and the profile, and the room for a step shrinks.
    batch = smallest_number(1, probe.max_num_seqs, lambda seqs: probe.fails(found, **_batch(probe, seqs)))
    if not probe.fails(found, **_batch(probe, batch)):
        batch = probe.max_num_seqs
    return found, batch


def _batch(probe: Probe, seqs: int) -> dict[str, Any]:
    return {"max_num_seqs": seqs, "num_gpu_blocks_override": probe.num_gpu_blocks}


def _shortened(probe: Probe, found: list[RequestSpec], index: int, name: str) -> list[RequestSpec]:
    """`found` with one length of one request as small as it may be."""

    def with_length(tokens: int) -> list[RequestSpec]:
        spec = found[index]
        length: dict[str, Any] = {name: tokens}
        if name == "output_tokens" and spec.max_tokens is not None:
            length["max_tokens"] = min(spec.max_tokens, tokens)
        return [*found[:index], replace(spec, **length), *found[index + 1 :]]

    return with_length(smallest_number(1, getattr(found[index], name), lambda tokens: probe.fails(with_length(tokens))))


def _plain(spec: RequestSpec) -> RequestSpec:
    """The request as a requests.csv can say it: without shared content, cancellation or time-out."""
    return replace(
        spec,
        content_ids=(),
        content_block_tokens=0,
        cancel_after_s=None,
        timeout_s=None,
        max_tokens=spec.target_tokens,
        output_tokens=spec.target_tokens,
    )


def _document(
    probe: Probe, scenario: Scenario, found: Sequence[RequestSpec], batch: int, requests: Path
) -> dict[str, Any]:
    start_s = found[0].arrival_s
    rows = [
        {
            "request_id": spec.request_id,
            "arrival_s": spec.arrival_s - start_s,
            "input_tokens": spec.input_tokens,
            "output_tokens": spec.output_tokens,
            "priority": spec.priority,
        }
        for spec in found
    ]
    faults = scenario.run.faults
    # Times are exact now, not ticks of a coarse clock, and nobody is drawn to be impatient.
    kept = scenario.with_(
        trace="requests.csv",
        cancel_rate=0.0,
        timeout=found[0].timeout_s,
        cancel_age_mean_s=None,
        spread_ticks=False,
        # A trace begins at zero when it is read: what happens at a time happens that much earlier.
        faults=[_earlier(fault, start_s) for fault in faults] if faults else None,
        **_batch(probe, batch),
    )
    tables = kept.resolved()
    if kept.gpu.gpu is None:  # the device is the machine itself, which is not in the catalogue
        tables["gpu"].pop("gpu", None)
    comments = [f"The smallest part of {requests.name} that still fails, found by kvtwin bisect in {probe.runs} runs."]
    return {
        "requests": rows,
        "scenario": scenario_text({name: tables[name] for name in tables if name != "slo"}, comments),
        "runs": probe.runs,
        "max_num_seqs": batch,
        "total_requests": len(probe.requests),
        "reproduces": probe.fails_in(kept, [_as_read(spec, start_s) for spec in found]),
    }


def _as_read(spec: RequestSpec, start_s: float) -> RequestSpec:
    """The request as it will be read from the file that is written."""
    return replace(_plain(spec), arrival_s=spec.arrival_s - start_s, timeout_s=spec.timeout_s)


def _earlier(fault: dict[str, str | float], by_s: float) -> dict[str, str | float]:
    return {key: max(0.0, float(value) - by_s) if key in ("at_s", "until_s") else value for key, value in fault.items()}


def _write(out: Path, document: dict[str, Any], found: Sequence[RequestSpec]) -> None:
    from sim.results.files import write_csv, write_json, write_text

    rows = document["requests"]
    names: dict[str, str] = {name: name for name in ("request_id", "arrival_s", "input_tokens", "priority")}
    columns = {title: [row[name] for row in rows] for title, name in names.items()}
    columns["output_tokens_requested"] = [row["output_tokens"] for row in rows]
    write_csv(out / "requests.csv", columns)
    write_text(out / "scenario.toml", document["scenario"])
    write_json(out / "bisect.json", document)


def _show(document: dict[str, Any], out: Path | None) -> None:
    rows = document["requests"]
    say(f"{len(rows)} of {document['total_requests']:,} requests are enough ({document['runs']} runs):")
    for row in rows:
        say(
            f"  {row['request_id']}: at {row['arrival_s']:.6f} s, {row['input_tokens']:,} tokens in, {row['output_tokens']:,} out"
        )
    say(f"with max_num_seqs {document['max_num_seqs']}")
    if not document["reproduces"]:
        say(
            "the scenario alone does not fail: what its file cannot say (shared content, cancellations, faults' times) has a part"
        )
    if out is not None:
        say(f"wrote {out}")
