"""`build_requests`: from a workload's name or a trace to the requests of one run, every attribute drawn in advance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from sim.core.request import RequestSpec
from sim.workload.arrival_choice import MOST_REQUESTS, arrival_times_s, choose_arrivals
from sim.workload.arrivals import ArrivalProcess, Batch, Poisson
from sim.workload.builtin import TokenRange, check_name, draw_bodies, own_arrivals, own_bursts, source_note
from sim.workload.errors import WorkloadError, whole_number
from sim.workload.on_off import OnOff
from sim.workload.senders import drawn, with_senders
from sim.workload.streams import stream
from sim.workload.trace import Trace, mean_rate_per_s

DEFAULT_NUM_REQUESTS = 1000
"""Requests of a built-in workload when neither a number nor a duration is given."""
DEFAULT_CANCEL_AGE_MEAN_S = 10.0
"""Mean age at which a client that cancels goes away."""
LEAST_PRIORITY = -(2**31)
"""Most important priority that can be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltWorkload:
    """The requests of one run."""

    name: str
    """Name of the built-in workload, or of the trace file."""
    requests: tuple[RequestSpec, ...]
    """In order of arrival."""
    notes: tuple[str, ...]
    """What a result should say about the workload, one sentence each."""
    offered_rate_per_s: float
    """Mean arrivals a second that the workload offers; infinite when all arrive at once."""


def build_requests(
    source: str | Trace,
    *,
    num_requests: int | None = None,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    burstiness: float | None = None,
    arrival: ArrivalProcess | str | None = None,
    seed: int = 0,
    replication: int = 0,
    cancel_rate: float = 0.0,
    cancel_age_mean_s: float = DEFAULT_CANCEL_AGE_MEAN_S,
    timeout_s: float | None = None,
    priorities: Mapping[int, float] | None = None,
    tenants: Mapping[str, float] | None = None,
    loras: Mapping[str, float] | None = None,
    input_tokens: TokenRange | None = None,
    output_tokens: TokenRange | None = None,
    spread_ticks: bool = True,
) -> BuiltWorkload:
    """The requests of one run.

    `source` is a name in `WORKLOADS` or a Trace. A trace keeps its recorded arrivals, a built-in workload its fitted
    arrival process, unless one of these says otherwise: `rate_per_s` alone plays a built-in's own pattern faster or
    slower, and draws Poisson arrivals for a trace; `burstiness` draws gamma gaps of that shape (1 is Poisson);
    an infinite rate puts everything at time 0; `arrival` is an arrival process of your own, or a name in `ARRIVALS`.

    `num_requests` and `duration_s` each bound the workload (with both, whichever comes first): a built-in has 1,000
    requests unless one is given; of a trace the first so many, or those that arrive in `[0, duration_s)`, are taken.

    A share `cancel_rate` of the clients goes away at an age that is exponentially distributed with mean
    `cancel_age_mean_s`; raising the share adds cancelling clients and changes no other. `timeout_s` is set on every
    request. `priorities` maps a priority (smaller is more important) to the share of requests that have it,
    `tenants` and `loras` a sender and an adapter likewise; what adapters leave of 1 asks for the base model.
    `input_tokens` and `output_tokens` take the place of a built-in's own lengths: one length, or (smallest, largest).
    Replications of one seed are independent of each other; the same seed and replication give the same requests,
    whatever else changes.

    `max_tokens` equals `output_tokens` on every request: lengths are replayed as given (EOS ignored).

    Raises: WorkloadError for a value that makes no workload, UnknownWorkload for an unknown name.
    """
    _check(num_requests, duration_s, rate_per_s, burstiness, cancel_rate, cancel_age_mean_s, timeout_s)
    if isinstance(source, Trace):
        if input_tokens is not None or output_tokens is not None:
            raise WorkloadError(
                "a trace has its own lengths; input_tokens and output_tokens can be given to built-in workloads only"
            )
        built = _from_trace(
            source, num_requests, duration_s, rate_per_s, burstiness, arrival, seed, replication, spread_ticks
        )
    else:
        check_name(source)
        process = choose_arrivals(
            own_arrivals(source),
            lambda: own_bursts(source),
            rate_per_s=rate_per_s,
            burstiness=burstiness,
            arrival=arrival,
        )
        times_s = arrival_times_s(process, num_requests, duration_s, DEFAULT_NUM_REQUESTS, seed, replication)
        bodies = draw_bodies(
            source,
            len(times_s),
            seed=seed,
            replication=replication,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
        )
        requests = tuple(
            RequestSpec(
                request_id=str(i),
                arrival_s=time_s,
                input_tokens=bodies.input_tokens[i],
                output_tokens=bodies.output_tokens[i],
                max_tokens=bodies.output_tokens[i],
                content_ids=bodies.content_ids[i],
                content_block_tokens=bodies.content_block_tokens,
            )
            for i, time_s in enumerate(times_s)
        )
        built = BuiltWorkload(
            name=source,
            requests=requests,
            notes=(source_note(source), process.describe()),
            offered_rate_per_s=process.rate_per_s,
        )
    built = _with_clients(built, cancel_rate, cancel_age_mean_s, timeout_s, priorities, seed, replication)
    sent, notes = with_senders(built.requests, tenants, loras, seed, replication)
    return replace(built, requests=sent, notes=(*built.notes, *notes))


def _from_trace(
    trace: Trace,
    num_requests: int | None,
    duration_s: float | None,
    rate_per_s: float | None,
    burstiness: float | None,
    arrival: ArrivalProcess | str | None,
    seed: int,
    replication: int,
    spread_ticks: bool,
) -> BuiltWorkload:
    rows = len(trace.requests)
    if num_requests is not None and num_requests > rows:
        raise WorkloadError(
            f"num_requests is {num_requests}, but the trace {trace.name} has {rows} requests; ask for at most {rows}"
        )
    wanted = rows if num_requests is None else num_requests
    if rate_per_s is None and burstiness is None and arrival is None:
        trace = trace.with_ticks(spread=spread_ticks, seed=seed, replication=replication)
        kept = trace.requests[:wanted]
        if duration_s is not None:
            kept = tuple(spec for spec in kept if spec.arrival_s < duration_s)
        notes, offered = trace.notes, mean_rate_per_s(kept)
    else:
        own = Poisson(rate_per_s=trace.rate_per_s) if math.isfinite(trace.rate_per_s) else Batch()
        process = choose_arrivals(own, _no_bursts, rate_per_s=rate_per_s, burstiness=burstiness, arrival=arrival)
        times_s = arrival_times_s(process, wanted, duration_s, rows, seed, replication)
        kept = tuple(replace(spec, arrival_s=time_s) for spec, time_s in zip(trace.requests, times_s, strict=False))
        redrawn = f"recorded arrivals were replaced: {process.describe()}; lengths are in the order of the trace"
        notes, offered = (*trace.file_notes, redrawn), process.rate_per_s
    if len(kept) < rows:
        notes = (*notes, f"the first {len(kept):,} of {rows:,} requests of the trace")
    return BuiltWorkload(name=trace.name, requests=kept, notes=notes, offered_rate_per_s=offered)


def _no_bursts() -> OnOff:
    raise WorkloadError(
        "on-off arrivals are fitted to built-in workloads; for a trace give an OnOff process, or another arrival"
    )


def _with_clients(
    built: BuiltWorkload,
    cancel_rate: float,
    cancel_age_mean_s: float,
    timeout_s: float | None,
    priorities: Mapping[int, float] | None,
    seed: int,
    replication: int,
) -> BuiltWorkload:
    """The same workload with clients that cancel, time out, or have priorities."""
    notes = list(built.notes)
    count = len(built.requests)
    cancels: Iterable[float | None] = [None] * count
    ranks: Iterable[int] = [spec.priority for spec in built.requests]
    if cancel_rate > 0:
        leaves = stream(seed, "cancel", replication).random(count) < cancel_rate
        ages_s = stream(seed, "cancel_age", replication).standard_exponential(count) * cancel_age_mean_s
        cancels = [age_s if leaving else None for age_s, leaving in zip(ages_s.tolist(), leaves.tolist(), strict=True)]
        notes.append(
            f"{int(leaves.sum()):,} of {count:,} clients cancel (share {cancel_rate:g}), at an exponentially distributed age of mean "
            f"{cancel_age_mean_s:g} s, if they are not served by then"
        )
    if timeout_s is not None:
        notes.append(f"every client gives up after {timeout_s:g} s")
    if priorities is not None:
        for priority in priorities:
            whole_number("a priority", priority, least=LEAST_PRIORITY)
        ranks = drawn("priority", priorities, seed, replication, count)
        notes.append(
            "priorities were drawn: "
            + ", ".join(f"{priority} for {share:.0%}" for priority, share in sorted(priorities.items()))
        )
    if cancel_rate == 0 and timeout_s is None and priorities is None:
        return built
    requests = tuple(
        replace(spec, cancel_after_s=cancel_s, timeout_s=timeout_s, priority=rank)
        for spec, cancel_s, rank in zip(built.requests, cancels, ranks, strict=True)
    )
    return replace(built, requests=requests, notes=tuple(notes))


def _check(
    num_requests: int | None,
    duration_s: float | None,
    rate_per_s: float | None,
    burstiness: float | None,
    cancel_rate: float,
    cancel_age_mean_s: float,
    timeout_s: float | None,
) -> None:
    """Raises: WorkloadError for the first value that makes no workload."""
    if num_requests is not None and whole_number("num_requests", num_requests, least=1) > MOST_REQUESTS:
        raise WorkloadError(f"num_requests is {num_requests:,}; it must be at most {MOST_REQUESTS:,}")
    if rate_per_s is not None and not rate_per_s > 0:
        raise WorkloadError(f"rate_per_s is {rate_per_s}; it must be above 0 (infinite: everything at time 0)")
    for name, value in (
        ("duration_s", duration_s),
        ("burstiness", burstiness),
        ("cancel_age_mean_s", cancel_age_mean_s),
        ("timeout_s", timeout_s),
    ):
        if value is not None and not 0 < value < math.inf:
            raise WorkloadError(f"{name} is {value}; it must be a finite number above 0")
    if not 0 <= cancel_rate <= 1:
        raise WorkloadError(f"cancel_rate is {cancel_rate}; it is a share of the requests, from 0 to 1")
