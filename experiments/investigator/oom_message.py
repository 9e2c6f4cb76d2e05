"""The out-of-memory messages of PyTorch's caching allocator, from 1.0 to today, whole, cut off or quoted in few words.

Every part is looked for by itself, because every part may be missing: memory of other processes and of this one need NVML,
`allowed` a memory fraction, private pools a CUDA graph; logs are cut off anywhere. Reports quote messages without their
sentences ("79.11 GiB total, 140.75 MiB free; 68.83 allocated"), which is read the same way; a bare number is GiB there.

The hint at the end of a message is printed whatever the cause is. It is cut off before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .sizes import Size, parse_size

_HINT = re.compile(
    r"If reserved (?:but unallocated )?memory is (?:.{0,300}?fragmentation)?[^\n]*", re.IGNORECASE | re.DOTALL
)
_PREFIX = re.compile(
    r"^(?:\([^()\n]*pid=\d+[^()\n]*\)\s*)?(?:ERROR|WARNING|INFO)\s+[\d-]+ [\d:.,]+ (?:\[[^\]]*\]\s?)?", re.MULTILINE
)

# A size with its unit, or a bare number with decimals where the words after it leave no doubt.
_SIZE = r"(?P<n>\d[\d,]*(?:\.\d+)?)\s*(?P<u>bytes|[KMGT]i?B)\b"
_LOOSE = r"(?<![\w.])(?:(?P<n>\d[\d,]*(?:\.\d+)?)\s*(?P<u>bytes|[KMGT]i?B)|(?P<b>\d+\.\d+))\s+"

_START = re.compile(
    rf"(?:tried|trying|attempt(?:ing|ed)|fail(?:ed|ing|s))\s+to\s+allocate\s+(?:memory\s+of\s+)?{_SIZE}"
    r"|(?P<n2>\d[\d,]*(?:\.\d+)?)\s*(?P<u2>bytes|[KMGT]i?B)\s+allocation\b",
    re.IGNORECASE,
)


def _compile(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern, re.IGNORECASE) for pattern in patterns)


_PARTS = {
    "total": _compile(rf"total\s+capaci?ty\s+of\s+{_SIZE}", rf"{_LOOSE}total(?!\s+by)"),
    "free": _compile(rf"of\s+which\s+{_SIZE}\s+is\s+free", rf"{_LOOSE}(?:physically\s+)?free\b"),
    "in_use": _compile(
        rf"this\s+process\s+has\s+{_SIZE}\s+memory\s+in\s+use",
        rf"this\s+process\s+{_SIZE}",
        r"this\s+process\s+(?P<b>\d+\.\d+)",
        rf"(?<!has\s){_LOOSE}in\s+use",
    ),
    "allowed": _compile(rf"{_SIZE}\s+allowed"),
    "allocated": _compile(
        rf"{_SIZE}\s+is\s+allocated\s+by\s+PyTorch",
        rf"{_LOOSE}already\s+allocated",
        rf"{_LOOSE}allocated(?!\s+in\s+private)",
    ),
    "private_pools": _compile(rf"{_SIZE}\s+allocated\s+in\s+private\s+pools", rf"{_LOOSE}(?:in\s+)?private\s+pools"),
    "unallocated": _compile(
        rf"{_SIZE}\s+is\s+reserved\s+by\s+PyTorch\s+but\s+unallocated",
        rf"{_LOOSE}reserved(?:\s+but)?[\s-]+unallocated",
    ),
    "cached": _compile(rf"{_SIZE}\s+cached"),  # up to 1.3: what is reserved less what is allocated
    "reserved": _compile(
        rf"{_SIZE}\s+reserved\s+in\s+total",
        rf"{_LOOSE}reserved\b(?!\s+(?:but|unallocated|by))",
    ),
}

_PROCESS = re.compile(
    r"(?<!this\s)\bprocess\s+(?:(?P<pid>\d+)\s+)?(?:has\s+)?(?:(?P<n>\d[\d,]*(?:\.\d+)?)\s*(?P<u>bytes|[KMGT]i?B)|(?P<b>\d+\.\d+))",
    re.IGNORECASE,
)
_LONGEST = 1200
"""Characters: the longest message, with a dozen other processes, is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomMessage:
    """The figures of one message. None where the message does not have them."""

    line: int
    """Line of the text it begins on, from 1."""
    tried: Size | None
    """What was asked of CUDA: a segment, not a tensor."""
    total: Size | None = None
    """Physical memory of the GPU."""
    free: Size | None = None
    """Free on the device at that moment."""
    in_use: Size | None = None
    """All memory of this process, its CUDA context and libraries included."""
    allowed: Size | None = None
    """The limit, where a memory fraction is set."""
    allocated: Size | None = None
    """In live tensors (and in free blocks of private pools)."""
    private_pools: Size | None = None
    """Free blocks inside the pools of CUDA graphs."""
    unallocated: Size | None = None
    """Reserved from CUDA and in no tensor."""
    others: tuple[tuple[str, Size], ...] = ()
    """Other processes: their id (or "?"), and what they hold."""
    device: str = "CUDA"
    """`CUDA`, `HIP`, ... as the message begins."""
    in_use_is_bogus: bool = False
    """The driver had no figure for this process and an impossible one was printed."""

    @property
    def has_numbers(self) -> bool:
        """Anything but the size that was tried."""
        return any((self.total, self.free, self.in_use, self.allocated, self.unallocated))

    @property
    def reserved_bytes(self) -> float | None:
        """What PyTorch holds: allocated and unallocated."""
        if self.allocated is None:
            return None
        return self.allocated.bytes + (self.unallocated.bytes if self.unallocated else 0.0)

    @property
    def non_torch_bytes(self) -> float | None:
        """This process's memory outside PyTorch: context, libraries, communication, graphs."""
        held = self.reserved_bytes
        return None if self.in_use is None or held is None else self.in_use.bytes - held

    @property
    def unattributed_bytes(self) -> float | None:
        """Used memory that the message gives to nobody it names."""
        if self.total is None or self.free is None:
            return None
        own = self.in_use.bytes if self.in_use else self.reserved_bytes
        if own is None:
            return None
        return self.total.bytes - self.free.bytes - own - sum(size.bytes for _, size in self.others)


def without_hints(text: str) -> str:
    """The text with the hints of out-of-memory messages blanked out (line numbers stay)."""
    return _HINT.sub(lambda match: "\n" * match[0].count("\n"), text)


def read_messages(text: str) -> tuple[OomMessage, ...]:
    """Every message in `text`, in its order, hints ignored."""
    plain = without_hints(text)
    starts = list(_START.finditer(plain))
    found = []
    for index, start in enumerate(starts):
        end = min(starts[index + 1].start() if index + 1 < len(starts) else len(plain), start.end() + _LONGEST)
        body = re.split(r"\n\s*(?:Traceback|During handling|The above exception)", plain[start.end() : end])[0]
        head = plain[max(0, start.start() - 80) : start.start()]
        tried = next(parse_size(start[f"n{i}"], start[f"u{i}"]) for i in ("", "2") if start[f"n{i}"])
        found.append(_message(head, _PREFIX.sub(" ", body), plain.count("\n", 0, start.start()) + 1, tried))
    return tuple(found)


def _message(head: str, body: str, line: int, tried: Size | None) -> OomMessage:
    body = re.sub(r"\s+", " ", body)
    part = {name: _first(patterns, body) for name, patterns in _PARTS.items()}
    bogus = part["in_use"] is None and bool(_PARTS["in_use"][0].search(body))
    processes = [
        (match["pid"] or "?", size)
        for match in _PROCESS.finditer(body)
        if (size := parse_size(match["n"] or match["b"], match["u"])) is not None
    ]
    reserved, allocated, unallocated = part["reserved"], part["allocated"], part["unallocated"] or part["cached"]
    if reserved is not None and allocated is not None and unallocated is None:
        # What PyTorch reserves is never less than what it allocates: a smaller figure is the unallocated part.
        gap = reserved.bytes - allocated.bytes
        unallocated = (
            reserved
            if gap < -reserved.half_bytes - allocated.half_bytes
            else Size(max(0.0, gap), reserved.half_bytes + allocated.half_bytes)
        )
    in_use = part["in_use"]
    if in_use is None and processes:
        in_use = _own(processes, allocated, unallocated)
        processes = [entry for entry in processes if entry[1] is not in_use]
    device = re.search(r"(CUDA|HIP|XPU|NPU|MUSA)\s+out of memory", head, re.IGNORECASE)
    return OomMessage(
        line=line,
        tried=tried,
        total=part["total"],
        free=part["free"],
        in_use=in_use,
        allowed=part["allowed"],
        allocated=allocated,
        private_pools=part["private_pools"],
        unallocated=unallocated,
        others=tuple(processes),
        device=device[1].upper() if device else "CUDA",
        in_use_is_bogus=bogus,
    )


def _first(patterns: Iterable[re.Pattern[str]], body: str) -> Size | None:
    for pattern in patterns:
        match = pattern.search(body)
        if match:
            groups = match.groupdict()
            number = groups.get("n") or groups.get("b")
            assert number is not None
            return parse_size(number, groups.get("u"))
    return None


def _own(processes: list[tuple[str, Size]], allocated: Size | None, unallocated: Size | None) -> Size | None:
    """Which of the listed processes is the one that failed, where the message does not say: it holds at least what PyTorch does.

    In a container the process does not know its own id, and is listed like the others. It is the one with the least to spare.
    Where the message is cut off before its own figures, a process that is listed alone is the one that failed.
    """
    if allocated is None:
        return processes[0][1] if len(processes) == 1 else None
    held = allocated.low + (unallocated.low if unallocated else 0.0)
    able = [size for _, size in processes if size.high >= held]
    return min(able, key=lambda size: size.bytes, default=None)
