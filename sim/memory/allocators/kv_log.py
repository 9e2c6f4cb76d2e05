"""The KV memory of a run as an allocation log, under four ways of holding it: the answer to "why paged?"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from .events import AllocationEvent, EventKind

KvScheme = Literal["contiguous_max", "contiguous_exact", "realloc_copy", "paged"]
"""How the KV cache of a request is held.

`contiguous_max`: one range for the longest sequence the request may become, from its start to its end.
`contiguous_exact`: one range for exactly the length it will reach; needs to know the future, so it is a bound.
`realloc_copy`: one range for what it holds now; to grow, a larger range is allocated and the old one copied and freed.
`paged`: one block at a time, wherever there is room.
"""

KV_SCHEMES: tuple[KvScheme, ...] = ("contiguous_max", "contiguous_exact", "realloc_copy", "paged")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpan:
    """The life of one request's KV cache, as a run recorded it.

    Raises ValueError if times run backwards, tokens shrink or exceed `max_tokens`.
    """

    request_id: str
    """Name of the request."""
    growth: tuple[tuple[float, int], ...]
    """`(time in seconds, tokens held from then on)`, ascending; the first entry is the start of the request."""
    end_s: float
    """When its memory is given back."""
    max_tokens: int
    """The longest sequence that had to be reckoned with: `min(max_model_len, prompt + max_tokens)`."""

    def __post_init__(self) -> None:
        if not self.growth or self.growth[0][1] < 1:
            raise ValueError(f"request {self.request_id!r} holds no token at its start")
        times = [time_s for time_s, _ in self.growth]
        tokens = [count for _, count in self.growth]
        if times != sorted(times) or self.end_s < times[-1]:
            raise ValueError(f"request {self.request_id!r}: time runs backwards in {times} … {self.end_s}")
        if tokens != sorted(tokens):
            raise ValueError(f"request {self.request_id!r}: the number of tokens shrinks")
        if tokens[-1] > self.max_tokens:
            raise ValueError(f"request {self.request_id!r} holds {tokens[-1]} tokens, more than its {self.max_tokens}")

    @classmethod
    def steady(
        cls,
        request_id: str,
        *,
        start_s: float,
        prompt_tokens: int,
        output_tokens: int,
        seconds_per_token: float,
        max_tokens: int,
        tokens_per_point: int = 1,
    ) -> KvSpan:
        """A request that holds its prompt at `start_s`, grows by one token every `seconds_per_token` and ends after its last.

        The keys and values of the last token are never needed, so it ends holding `prompt_tokens + output_tokens − 1`.
        `tokens_per_point` makes a shorter log: only every so many tokens become an event.
        """
        last = output_tokens - 1
        counts = dict.fromkeys([*range(0, last, tokens_per_point), last])
        growth = tuple((start_s + count * seconds_per_token, prompt_tokens + count) for count in counts)
        return cls(
            request_id=request_id,
            growth=growth,
            end_s=start_s + output_tokens * seconds_per_token,
            max_tokens=max_tokens,
        )


def kv_log(
    spans: Iterable[KvSpan], scheme: KvScheme, *, bytes_per_token: int, block_size: int = 16
) -> list[AllocationEvent]:
    """The log of the KV allocations of a run under one scheme.

    Every event is tagged with its request. Of two events at one moment, the end of a request comes first, as engines free
    before they schedule. `bytes_per_token` is summed over layers; `block_size` is in tokens, and used by `paged` only.
    """
    events: list[tuple[float, int, AllocationEvent]] = []
    for span in spans:
        if scheme == "paged":
            lived = _paged(span, bytes_per_token, block_size)
        elif scheme == "realloc_copy":
            lived = _reallocated(span, bytes_per_token)
        else:
            reserved = span.max_tokens if scheme == "contiguous_max" else span.growth[-1][1]
            lived = _reserved(span, bytes_per_token, reserved)
        ends = [_event(span, span.end_s, "free", allocation_id) for allocation_id in _alive_after(lived)]
        events += [(event.time_s, 1, event) for event in lived]
        # A request that ends at the very moment of its last growth must still grow before it ends.
        events += [(event.time_s, 0 if span.end_s > lived[-1].time_s else 1, event) for event in ends]
    events.sort(key=lambda item: item[:2])  # stable: the events of one request at one moment keep their order
    return [event for _, _, event in events]


def _event(
    span: KvSpan, time_s: float, kind: EventKind, allocation_id: str, size_bytes: int = 0, used_bytes: int | None = None
) -> AllocationEvent:
    return AllocationEvent(
        time_s=time_s, kind=kind, id=allocation_id, size_bytes=size_bytes, used_bytes=used_bytes, tag=span.request_id
    )


def _alive_after(events: Sequence[AllocationEvent]) -> list[str]:
    alive: dict[str, None] = {}
    for event in events:
        if event.kind == "alloc":
            alive[event.id] = None
        elif event.kind == "free":
            del alive[event.id]
    return list(alive)


def _reserved(span: KvSpan, bytes_per_token: int, reserved_tokens: int) -> list[AllocationEvent]:
    """One range of `reserved_tokens`, filled up as the request grows."""
    sizes = [(time_s, tokens * bytes_per_token) for time_s, tokens in span.growth]
    (start_s, first), *grown = sizes
    return [
        _event(span, start_s, "alloc", span.request_id, reserved_tokens * bytes_per_token, first),
        *(_event(span, time_s, "use", span.request_id, used) for time_s, used in grown),
    ]


def _reallocated(span: KvSpan, bytes_per_token: int) -> list[AllocationEvent]:
    """A new range for each growth; the old one is freed after the new one is there, because it is copied from."""
    events: list[AllocationEvent] = []
    before = ""
    for version, (time_s, tokens) in enumerate(span.growth):
        current = f"{span.request_id}/{version}"
        events.append(_event(span, time_s, "alloc", current, tokens * bytes_per_token))
        if before:
            events.append(_event(span, time_s, "free", before))
        before = current
    return events


def _paged(span: KvSpan, bytes_per_token: int, block_size: int) -> list[AllocationEvent]:
    """A block whenever the last one is full; of a block that is not full, only the tokens in it are in use."""
    events: list[AllocationEvent] = []
    held = 0
    for time_s, tokens in span.growth:
        needed = -(-tokens // block_size)
        for block in range(max(0, held - 1), needed):
            used = min(block_size, tokens - block * block_size) * bytes_per_token
            name = f"{span.request_id}/{block}"
            if block >= held:
                events.append(_event(span, time_s, "alloc", name, block_size * bytes_per_token, used))
            else:
                events.append(_event(span, time_s, "use", name, used))
        held = needed
    return events
