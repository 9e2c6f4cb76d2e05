"""What the engine was serving when it failed, by dimension: requests, tokens of the step, prompts in it, decoding sequences.

Read off the last line before the failure that says it: the scheduler's own lines of SGLang and vLLM, the dump of a failed step
that vLLM prints, and kvtwin's log.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        # kvtwin's own log
        r"step \d+: (?P<batch_tokens>\d+) tokens in (?P<prompts>\d+) prompt chunks.*?; (?P<decode_sequences>\d+) sequences decode"
        r"; (?P<usage_percent>[\d.]+)% of the KV blocks",
        # SGLang
        r"Prefill batch[.,][^\n]*?#new-seq: (?P<prompts>\d+), #new-token: (?P<prefill_tokens>\d+)"
        r"(?:[^\n]*?token usage: (?P<usage>[\d.]+))?(?:[^\n]*?#running-req: (?P<requests>\d+))?(?:[^\n]*?#queue-req: (?P<waiting>\d+))?",
        r"Decode batch[.,][^\n]*?#running-req: (?P<decode_sequences>\d+), #token: (?P<kv_tokens>\d+)"
        r"(?:[^\n]*?token usage: (?P<usage>[\d.]+))?(?:[^\n]*?#queue-req: (?P<waiting>\d+))?",
        # vLLM: the line of its scheduler, and the dump of a step that failed
        r"Running: (?P<requests>\d+) reqs?, [^\n]*?(?:Waiting|Pending): (?P<waiting>\d+) reqs?[^\n]*?GPU KV cache usage: "
        r"(?P<usage_percent>[\d.]+)%",
        r"total_num_scheduled_tokens=(?P<batch_tokens>\d+)",
        r"num_running_reqs=(?P<requests>\d+), num_waiting_reqs=(?P<waiting>\d+)[^\n]*?kv_cache_usage=(?P<usage>[\d.]+)",
        # TGI
        r"(?:prefill|decode)\{[^}\n]*size=(?P<requests>\d+)\}",
    )
)
_NEAR_LINES = 200
"""A line further from the failure than this tells of another time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLoad:
    """The load at the failure; None where the log does not say."""

    requests: int | None = None
    """Running requests."""
    waiting: int | None = None
    batch_tokens: int | None = None
    """Tokens of the step."""
    prompts: int | None = None
    """Prompts, or chunks of them, in the step: its prefill micro-batch."""
    prefill_tokens: int | None = None
    """Their tokens."""
    decode_sequences: int | None = None
    kv_tokens: int | None = None
    """Tokens in the KV cache."""
    usage: float | None = None
    """Share of the KV pool in use, 0 to 1."""

    @property
    def sentence(self) -> str:
        """All that is known, in words."""
        words = (
            ("{:,} requests run", self.requests),
            ("{:,} wait", self.waiting),
            ("{:,} tokens in the step", self.batch_tokens),
            ("{:,} prompts in it", self.prompts),
            ("{:,} prompt tokens", self.prefill_tokens),
            ("{:,} sequences decode", self.decode_sequences),
            ("{:,} tokens in the KV cache", self.kv_tokens),
            ("{:.0%} of the KV pool in use", self.usage),
        )
        return "the load at the failure: " + ", ".join(text.format(value) for text, value in words if value is not None)


def read_load(text: str, failure_line: int | None) -> LogLoad | None:
    """The load by the last lines up to the failure (None: the end of the text); None where no line says anything of it."""
    lines = text.split("\n")
    until = (
        len(lines) if failure_line is None else min(failure_line + 2, len(lines))
    )  # a TGI line carries the message itself
    found: dict[str, float] = {}
    for line in reversed(lines[max(0, until - _NEAR_LINES) : until]):
        values = _values(line)
        # The newest line that says anything decides; older ones only add what it leaves out of the same moment.
        if values and not found:
            found = values
        elif values and not set(values) & set(found) and len(found) < 3:
            found |= values
    if not found:
        return None
    whole = {f.name for f in fields(LogLoad)} - {"usage"}
    decode, batch = found.get("decode_sequences"), found.get("batch_tokens")
    if "prefill_tokens" not in found and decode is not None and batch is not None:
        found["prefill_tokens"] = max(0.0, batch - decode)
    return LogLoad(**{name: int(found[name]) for name in whole if name in found}, usage=found.get("usage"))


def _values(line: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for pattern in _PATTERNS:
        match = pattern.search(line)
        if match:
            found |= {name: float(value.rstrip(".")) for name, value in match.groupdict().items() if value}
    if "usage_percent" in found:
        found["usage"] = found.pop("usage_percent") / 100
    return found
