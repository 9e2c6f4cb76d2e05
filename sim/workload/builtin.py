"""The built-in workloads: a name, a sentence, a table of figures. No data file is needed."""

from __future__ import annotations

from dataclasses import dataclass

from sim.workload.arrivals import Gamma, Poisson
from sim.workload.errors import UnknownWorkload, WorkloadError, whole_number
from sim.workload.on_off import OnOff
from sim.workload.streams import stream
from sim.workload.tables import AZURE_CODE, AZURE_CONV, MOONCAKE_CHAT, SHAREGPT
from sim.workload.workload_table import WorkloadTable

WORKLOADS = {
    "azure-conv": "Chat of a cloud service, 2023: prompts of 1,155 tokens on average, answers of 211, bursts that last minutes",
    "azure-code": "Code completion of a cloud service, 2023: long prompts, short answers, very bursty (gap CV 13)",
    "mooncake-chat": "Chat with long contexts, 2024: prompts of 12,000 tokens, conversations that share 37 % of their blocks",
    "sharegpt": "ShareGPT conversations with answers of 512 tokens or more, some continuing earlier ones",
    "uniform": "Independent uniform lengths (1024 in, 128 out unless given), Poisson arrivals at 1/s unless given",
}
"""Name of each built-in workload, and what it is."""

TABLES: dict[str, WorkloadTable] = {
    "azure-conv": AZURE_CONV,
    "azure-code": AZURE_CODE,
    "mooncake-chat": MOONCAKE_CHAT,
    "sharegpt": SHAREGPT,
}
"""The fitted figures, by name; `uniform` has none."""

UNIFORM_INPUT_TOKENS = 1024
UNIFORM_OUTPUT_TOKENS = 128
"""Lengths of `uniform` unless given: the defaults of `vllm bench serve --dataset-name random`."""
UNIFORM_ARRIVALS = Poisson(rate_per_s=1.0)
"""Arrivals of `uniform` unless a rate is given."""

TokenRange = int | tuple[int, int]
"""A fixed length, or the smallest and the largest of uniform ones (both included), in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bodies:
    """What requests are, without when they come: one entry a request `[n]`, in order of arrival."""

    input_tokens: list[int]
    """Prompt lengths."""
    output_tokens: list[int]
    """Output lengths."""
    content_ids: list[tuple[int, ...]]
    """Content ids of each prompt, empty where nothing is shared."""
    content_block_tokens: int
    """Tokens that one content id names; 0 where nothing is shared."""


def check_name(name: object) -> None:
    """Raises: UnknownWorkload, naming the nearest, unless `name` is in WORKLOADS; WorkloadError if it is not even text."""
    if not isinstance(name, str):
        raise WorkloadError(f"a workload is a name or a Trace, not {name!r}; read a trace file with read_trace")
    if name not in WORKLOADS:
        raise UnknownWorkload(name, WORKLOADS)


def own_arrivals(name: str) -> Poisson | Gamma | OnOff:
    """The arrival process that a workload has unless told otherwise."""
    return UNIFORM_ARRIVALS if name == "uniform" else TABLES[name].arrivals


def own_bursts(name: str) -> OnOff:
    """The on/off process fitted to the workload's bursts and drifts, where there is one. Raises: WorkloadError."""
    bursts = None if name == "uniform" else TABLES[name].bursts
    if bursts is None:
        have = ", ".join(sorted(known for known, table in TABLES.items() if table.bursts))
        raise WorkloadError(f"workload {name!r} has no on-off arrivals fitted to it; {have} have")
    return bursts


def source_note(name: str) -> str:
    """The sentence that says where the figures come from."""
    if name == "uniform":
        return "lengths are independent and uniform"
    return f"lengths{' and prefix sharing' if TABLES[name].prefixes else ''} are drawn from figures fitted to: {TABLES[name].source}"


def draw_bodies(
    name: str,
    num_requests: int,
    *,
    seed: int,
    replication: int,
    input_tokens: TokenRange | None,
    output_tokens: TokenRange | None,
) -> Bodies:
    """Lengths and contents of `num_requests` requests, each attribute from its own stream; more requests keep the earlier ones.

    `input_tokens` and `output_tokens` take the place of the workload's own lengths. Raises: WorkloadError for a bad range.
    """
    import numpy as np

    input_ranks = stream(seed, "input_tokens", replication).random(num_requests)
    output_ranks = stream(seed, "output_tokens", replication).random(num_requests)
    if name == "uniform":
        input_tokens = UNIFORM_INPUT_TOKENS if input_tokens is None else input_tokens
        output_tokens = UNIFORM_OUTPUT_TOKENS if output_tokens is None else output_tokens
        inputs = outputs = np.zeros(num_requests, dtype=np.int64)
    else:
        inputs, outputs = TABLES[name].lengths.sample(input_ranks, output_ranks)
    if input_tokens is not None:
        inputs = np.array(_uniform("input_tokens", input_tokens, input_ranks.tolist()), dtype=np.int64)
    if output_tokens is not None:
        outputs = np.array(_uniform("output_tokens", output_tokens, output_ranks.tolist()), dtype=np.int64)
    prefixes = None if name == "uniform" else TABLES[name].prefixes
    ids: list[tuple[int, ...]] = [()] * num_requests
    if prefixes is not None:
        ids = prefixes.content_ids(inputs, input_ranks, stream(seed, "prefix", replication))
    return Bodies(
        input_tokens=inputs.tolist(),
        output_tokens=outputs.tolist(),
        content_ids=ids,
        content_block_tokens=prefixes.block_tokens if prefixes else 0,
    )


def _uniform(what: str, given: TokenRange, ranks: list[float]) -> list[int]:
    """Whole numbers between the bounds, both included, at those ranks."""
    bounds = (given, given) if isinstance(given, int) else tuple(given)
    if len(bounds) != 2:
        raise WorkloadError(f"{what} is {given!r}; it must be a number of tokens, or a pair (smallest, largest)")
    low, high = (whole_number(what, bound, least=1) for bound in bounds)
    if low > high:
        raise WorkloadError(f"{what} is {given!r}; the smallest must come first")
    return [low + int(rank * (high - low + 1)) for rank in ranks]
