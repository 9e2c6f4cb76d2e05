"""How many bytes a program asks for before it waits, read from its machine code by walking through it.

The walk goes down the code as the hardware would if nothing but memory took time: an instruction costs none, a read of global memory
one latency, and only an instruction that needs what a read brings waits for it. So what a program reads per latency is what it keeps
in flight, whatever the means: reads into registers that are used later, or groups of asynchronous copies of which some may be under way
at a wait. Of a program with a loop the loop is what counts, gone through until each turn is like the one before.

Of two branches the one that falls through is taken, calls are passed over, and every thread is taken to make every access. Registers are
compared by name: a program that reads a register early only to overwrite it is thought to wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
"""Width suffixes of SASS memory instructions, in bytes; without one it is 4."""
DATA_BYTES = 8
"""What is narrower is a table or a scale, and not counted as data."""
TURNS = 240
"""Turns of a loop, of which the second half is looked at: a multiple of the buffers that a ring may have."""

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_REGISTER = re.compile(r"\bR(\d+)\b")
_ADDRESS = re.compile(r"0x([0-9a-f]+)\s*$")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction."""

    address: int
    guard: str
    """Its predicate, such as `@!P0`; empty when it is always carried out."""
    opcode: str
    """With its suffixes."""
    operands: str

    @property
    def name(self) -> str:
        """The opcode without suffixes."""
        return self.opcode.partition(".")[0]

    @property
    def width(self) -> int:
        """Bytes a thread of a memory instruction. Suffixes like LTC128B are prefetch hints, not widths."""
        return next((WIDTHS[part] for part in reversed(self.opcode.split(".")) if part in WIDTHS), 4)

    @property
    def target(self) -> int | None:
        """Where a branch leads; None for anything else."""
        found = _ADDRESS.search(self.operands.strip()) if self.name == "BRA" else None
        return int(found[1], 16) if found else None

    @property
    def conditional(self) -> bool:
        """Whether a branch, or an end, may not be taken."""
        return bool(self.guard) or "," in self.operands

    @property
    def registers(self) -> set[int]:
        """Every register that is named."""
        return {int(number) for number in _REGISTER.findall(self.operands)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one thread does from one latency to the next, and in all that was walked through: a turn of the loop, or the program."""

    read_bytes: float
    """Bytes of data read from global memory; tables and scales, which are read fewer than 8 bytes at a time, not counted."""
    written_bytes: float
    """Bytes written to it."""
    latencies: float
    """How often it waits for a whole latency, one after the other."""
    instructions: float
    """Instructions carried out."""
    loops: bool
    """Whether this is a turn of a loop."""

    @property
    def in_flight_bytes(self) -> float:
        """Bytes read per latency."""
        return self.read_bytes / self.latencies if self.latencies else 0.0


@dataclass(slots=True)
class _Walker:
    """The state of a walk; time is counted in latencies."""

    now: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    instructions: int = 0
    pending: dict[int, float] = field(default_factory=dict)
    """By register: when what is read into it is there."""
    open_group: float = 0.0
    """When the copies are there that no group holds yet."""
    groups: list[float] = field(default_factory=list)
    """When each group of copies is there."""

    def step(self, each: Instruction) -> None:
        """Carry out one instruction."""
        if each.guard == "@!PT":  # never carried out: room between dependent instructions
            return
        self.instructions += 1
        if each.name in ("LDG", "LDGSTS", "STG"):
            self._access(each)
            return
        if each.name == "LDGDEPBAR":
            self.groups.append(self.open_group)
            return
        if each.name == "DEPBAR" and "SB0" in each.operands:
            left = int(each.operands.rpartition(",")[2].strip(), 16)
            done = self.groups[: max(len(self.groups) - left, 0)]
            self.now = max([self.now, *done])
            self.groups = self.groups[len(done) :]
        self._wait_for(each.registers)

    def _access(self, each: Instruction) -> None:
        destinations, addresses = _split(each)
        self._wait_for(addresses if each.name != "STG" else each.registers)
        if each.name == "STG":
            self.written_bytes += each.width
            return
        self.read_bytes += each.width if each.width >= DATA_BYTES else 0
        if each.name == "LDGSTS":
            self.open_group = self.now + 1
        for register in destinations:
            self.pending[register] = self.now + 1

    def _wait_for(self, registers: set[int]) -> None:
        for register in registers & self.pending.keys():
            self.now = max(self.now, self.pending.pop(register))

    def ended(self) -> float:
        """When all is there that was asked for."""
        return max([self.now, self.open_group, *self.groups, *self.pending.values()])


def instructions(code: str) -> list[Instruction]:
    """The instructions in `cuobjdump --dump-sass`, in order."""
    return [
        Instruction(int(found[1], 16), found[2] or "", found[3], found[4].strip())
        for found in _INSTRUCTION.finditer(code)
    ]


def traffic(every: Sequence[Instruction]) -> Traffic:
    """What a thread reads per latency: in the loop that reads most data, or, without one, from its first instruction to its last."""
    loop = max(_loops(every), key=_data_reads, default=[])
    if not _data_reads(loop):
        walker = _walked(_path(every))
        return Traffic(
            read_bytes=walker.read_bytes,
            written_bytes=walker.written_bytes,
            latencies=walker.ended(),
            instructions=walker.instructions,
            loops=False,
        )
    path, half, walker = list(_path(loop)), TURNS // 2, _Walker()
    for _ in range(half):
        _walked(path, walker)
    before = (walker.now, walker.read_bytes, walker.written_bytes, walker.instructions)
    for _ in range(half):
        _walked(path, walker)
    latencies, read, written, carried_out = (
        (now - then) / half
        for now, then in zip(
            (walker.now, walker.read_bytes, walker.written_bytes, walker.instructions), before, strict=True
        )
    )
    return Traffic(read_bytes=read, written_bytes=written, latencies=latencies, instructions=carried_out, loops=True)


def _walked(path: Iterator[Instruction] | Sequence[Instruction], walker: _Walker | None = None) -> _Walker:
    walker = _Walker() if walker is None else walker
    for each in path:
        walker.step(each)
    return walker


def _path(code: Sequence[Instruction]) -> Iterator[Instruction]:
    """Down the code: conditional branches fall through, others are followed forwards, an end that is certain ends it."""
    skipped_to = -1
    for each in code:
        if each.address < skipped_to:
            continue
        yield each
        if each.name == "EXIT" and not each.conditional:
            return
        if each.target is not None and each.target > each.address and not each.conditional:
            skipped_to = each.target


def _loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """The innermost stretches that a branch goes back over."""
    spans = [(each.target, each.address) for each in code if each.target is not None and each.target < each.address]
    inner = [
        span
        for span in spans
        if not any(other != span and span[0] <= other[0] and other[1] <= span[1] for other in spans)
    ]
    return [[each for each in code if start <= each.address <= end] for start, end in inner]


def _data_reads(code: Sequence[Instruction]) -> int:
    """Bytes of data that a stretch of code reads."""
    return sum(each.width for each in code if each.name in ("LDG", "LDGSTS") and each.width >= DATA_BYTES)


def _split(each: Instruction) -> tuple[set[int], set[int]]:
    """Registers that a read fills, and those that its address is made of."""
    first, _, rest = each.operands.partition(",")
    addresses = {int(number) for number in _REGISTER.findall(rest)}
    if each.name == "LDGSTS":
        return set(), each.registers
    wanted = _REGISTER.search(first)
    if wanted is None:  # into RZ: a prefetch
        return set(), addresses
    start, count = int(wanted[1]), max(each.width // 4, 1)
    if each.width == 32:  # two groups of four: the second is the second operand
        second, _, rest = rest.partition(",")
        more = _REGISTER.search(second)
        groups = {*range(start, start + 4)} | ({*range(int(more[1]), int(more[1]) + 4)} if more else set())
        return groups, {int(number) for number in _REGISTER.findall(rest)}
    return {*range(start, start + count)}, addresses
