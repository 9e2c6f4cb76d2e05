"""`[workload]` of a scenario file: the requests, and the clients that send them."""

from __future__ import annotations

from pydantic import Field

from .scenario_keys import Length, Priorities, Table, file_only


class WorkloadTable(Table):
    """`[workload]`: the requests, and the clients that send them."""

    trace: str | None = Field(None, min_length=1, description="a trace file; its format is recognised")
    workload: str | None = Field(None, min_length=1, description="a built-in workload, for example azure-conv")
    rate: float | None = Field(
        None, gt=0, description="mean arrivals a second; inf sends all at once; default: the workload's own"
    )
    burstiness: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="shape of Gamma gaps: 1 is Poisson, below 1 is burstier, above 1 more even",
    )
    max_concurrency: int | None = Field(None, ge=1, description="most requests in flight (closed loop)")
    num_requests: int | None = Field(None, ge=1, description="how many requests; default: 1000, or the whole trace")
    duration: float | None = Field(None, gt=0, allow_inf_nan=False, description="seconds during which requests arrive")
    cancel_rate: float = Field(0.0, ge=0, le=1, description="share of requests whose client goes away at a random age")
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False, description="seconds after which a client gives up")
    input_tokens: Length = file_only(
        None, description="prompt length in tokens, or [smallest, largest], for the workload uniform"
    )
    output_tokens: Length = file_only(
        None, description="output length in tokens, or [smallest, largest], for the workload uniform"
    )
    ignore_eos: bool = file_only(
        True,
        description="each request's cap is its output length, as when a trace is replayed; off: no caps, the model stops by itself",
    )
    n: int = file_only(1, ge=1, description="samples of each prompt; all share its blocks and leave together")
    beam_width: int = file_only(1, ge=1, description="beams of each request; 1 is no beam search")
    beam_change: float | None = file_only(
        None,
        ge=0,
        lt=1,
        description="probability that a beam is replaced by a copy of another one at a token; default 0.1, an assumption",
    )
    arrival: str | None = file_only(
        None,
        min_length=1,
        description="arrival process: poisson, on-off, deterministic or batch; burstiness makes gamma ones",
    )
    priorities: Priorities | None = file_only(
        None, description="share of requests by priority (smaller is more important), for example {0 = 0.2, 1 = 0.8}"
    )
    tenants: dict[str, float] | None = file_only(
        None, description="share of requests by tenant, for example {acme = 0.9, other = 0.1}"
    )
    loras: dict[str, float] | None = file_only(
        None, description="share of requests by LoRA adapter; what is left of 1 asks for the base model"
    )
    cancel_age_mean_s: float | None = file_only(
        None, gt=0, allow_inf_nan=False, description="mean age in seconds at which cancelling clients go away"
    )
    spread_ticks: bool = file_only(
        True, description="spread requests that a coarse clock stamped with the same time over its tick"
    )
