"""What servers write down about memory: the account at start-up, and the scheduler's state line by line.

Covers vLLM V0 and V1, and SGLang. SGLang prints GB and means GiB.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .table_file import Table

_NUMBER = r"(-?[\d.]+)"
_ACCOUNT = {
    "weights_gib": (
        rf"[Mm]odel weights take {_NUMBER} ?GiB",
        rf"Model loading took {_NUMBER} ?Gi?B",
        rf"Loading (?:model )?weights took {_NUMBER} ?GB",
        rf"Load weight end\.[^\n]*mem usage={_NUMBER} GB",
        rf"\bweights {_NUMBER} G",
        rf"{_NUMBER} GiB for (?:model )?weights?\b",
    ),
    "non_torch_gib": (rf"non_torch_memory takes {_NUMBER} ?GiB", rf"{_NUMBER} ?GiB (?:for|in) non-torch"),
    "peak_activation_gib": (
        rf"activation peak memory takes {_NUMBER} ?GiB",
        rf"{_NUMBER} ?GiB (?:for|as) peak activation",
        rf"peak activation {_NUMBER} GiB",
    ),
    "kv_gib": (rf"reserved for KV Cache is {_NUMBER} ?GiB", rf"Available KV cache memory: {_NUMBER} GiB"),
    "graphs_gib": (
        rf"Graph capturing finished in [^\n]*took {_NUMBER} GiB",
        rf"Capture cuda graph end\.[^\n]*mem usage={_NUMBER} GB",
        rf"{_NUMBER} GiB for CUDA ?[Gg]raph memory",
    ),
    "graphs_estimate_gib": (
        rf"[Ee]stimated CUDA ?graph memory:? (?:is |usage )?{_NUMBER} GiB",
        rf"CUDA ?graph memory \(estimated\): {_NUMBER}",
    ),
    "total_gib": (rf"total_gpu_memory \({_NUMBER} ?GiB\)", rf"Free memory on device \S*\s*\([\d.]+/{_NUMBER} GiB\)"),
    "kv_tokens": (
        r"GPU KV cache size: ([\d,]+) tokens",
        r"KV Cache is allocated\. #tokens: ([\d,]+)",
        r"max_total_num_tokens=(\d+)",
    ),
    "gpu_blocks": (r"# (?:GPU|cuda) blocks: ([\d,]+)",),
    "free_after_pool_gib": (rf"Memory pool end\. avail mem={_NUMBER} GB",),
}
_COMPILED = {name: tuple(re.compile(pattern) for pattern in patterns) for name, patterns in _ACCOUNT.items()}

_VLLM_STATS = re.compile(
    r"Running: (?P<running>\d+) reqs?, (?:Swapped: (?P<swapped>\d+) reqs?, )?(?:Pending|Waiting): (?P<waiting>\d+) reqs?"
    r"(?:, [^\n]*?Deferred: \d+ reqs?)?, GPU KV cache usage: (?P<usage>[\d.]+)%"
)
_SGLANG_STATS = re.compile(
    r"Decode batch[.,] #running-req: (?P<running>\d+), #token: \d+, token usage: (?P<usage>[\d.]+)[^\n]*?#queue-req: (?P<waiting>\d+)"
)
_SPEED = re.compile(r"(?:Avg generation throughput|gen throughput \(token/s\)): ([\d.]+)")
_PREEMPTED = re.compile(
    r"is preempted by|[Pp]reempted request|retract(?:ed)? requests?|Retract requests", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """One line of the scheduler."""

    running: int
    waiting: int
    usage: float
    """Share of the KV pool in use, 0 to 1."""
    tokens_per_s: float | None = None
    """Generation throughput, where the line has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLog:
    """The memory lines and scheduler lines of one text."""

    account: dict[str, float]
    """By name of the line, e.g. `weights_gib`; the first rank that printed it."""
    stats: tuple[Stats, ...] = ()
    """In the order of the text."""
    preemptions: int = 0
    """Lines that report one."""

    @property
    def sentence(self) -> str:
        """The account for the evidence; empty when nothing was printed."""
        names = (
            "total_gib",
            "weights_gib",
            "non_torch_gib",
            "peak_activation_gib",
            "graphs_estimate_gib",
            "kv_gib",
            "graphs_gib",
        )
        found = [
            f"{name.removesuffix('_gib').replace('_', ' ')} {self.account[name]:.2f} GiB"
            for name in names
            if name in self.account
        ]
        if "kv_tokens" in self.account:
            found.append(f"KV pool {self.account['kv_tokens']:,.0f} tokens")
        return "the engine's own account: " + ", ".join(found) if found else ""


def is_timeline(table: Table) -> bool:
    """True for a table with the scheduler's state over time, as kvtwin's own timeline.csv."""
    return table.has("time_s", "running", "waiting", "used_blocks", "free_blocks")


def read_timeline(table: Table) -> tuple[Stats, ...]:
    """The rows in which requests waited, as scheduler lines: what limits a run shows while somebody waits.

    Raises DiagnoseError where a cell is no number.
    """
    columns = [table.counts(name) for name in ("running", "waiting", "used_blocks", "free_blocks")]
    columns.append(table.counts("cached_blocks") if table.has("cached_blocks") else [0.0] * len(table.rows))
    stats = []
    for running, waiting, used, free, cached in zip(*columns, strict=True):
        if waiting > 0:
            share = used / max(1.0, used + free + cached)
            stats.append(Stats(running=int(running), waiting=int(waiting), usage=share))
    return tuple(stats)


def read_engine_log(text: str) -> EngineLog:
    """Everything of it that `text` has."""
    account: dict[str, float] = {}
    for name, patterns in _COMPILED.items():
        for pattern in patterns:
            match = pattern.search(text)
            if match:
                account[name] = float(match[1].replace(",", "").rstrip("."))
                break
    stats = []
    for line in text.splitlines():
        match = _VLLM_STATS.search(line) or _SGLANG_STATS.search(line)
        if not match:
            continue
        share = float(match["usage"]) / (1.0 if match.re is _SGLANG_STATS else 100.0)
        speed = _SPEED.search(line)
        stats.append(
            Stats(
                running=int(match["running"]),
                waiting=int(match["waiting"]),
                usage=share,
                tokens_per_s=float(speed[1]) if speed else None,
            )
        )
    return EngineLog(account=account, stats=tuple(stats), preemptions=len(_PREEMPTED.findall(text)))
