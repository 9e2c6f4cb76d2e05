"""What a compiled kernel takes and how it reads memory, from its cubin: registers, stack, and the width of every access.

`cuobjdump` comes in triton's own package, so no CUDA toolkit is needed, and no GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .require import MissingExtraError, require
from .sass_walk import Instruction, Traffic, instructions, traffic

NO_TRAFFIC = Traffic(read_bytes=0, written_bytes=0, latencies=0, instructions=0, loops=False)
"""Of code that reads and writes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one kernel needs of a multiprocessor, and the accesses in its code."""

    registers: int
    """Registers a thread."""
    stack_bytes: int
    """Bytes of local memory a thread: where registers are spilled to."""
    loads: dict[int, int]
    """Instructions that read global memory, by bytes a thread; asynchronous copies to shared memory count."""
    stores: dict[int, int]
    """Instructions that write global memory, by bytes a thread."""
    copies_in_flight: int = 0
    """Groups of asynchronous copies that may still be under way where the code waits for an older one. 0: it waits for all it has
    asked for, and a loop's loads never overlap its work."""
    traffic: Traffic = NO_TRAFFIC
    """What a thread reads per latency."""

    @property
    def narrow_loads(self) -> int:
        """Instructions that read global memory fewer than 8 bytes at a time: tables and scales, but not vectors."""
        return sum(count for width, count in self.loads.items() if width < 8)

    @property
    def vector_bytes(self) -> int:
        """The widest read of global memory."""
        return max(self.loads, default=0)


def cuobjdump() -> Path:
    """Path of the tool.

    Raises:
        MissingExtraError: triton is not installed, or its package lacks the tool.
    """
    triton = require("triton", "reading compiled kernels")
    path = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not path.is_file():
        raise MissingExtraError(f"triton {triton.__version__} has no cuobjdump at {path}")
    return path


def read_cubin(cubin: bytes) -> Resources:
    """Resources of the one kernel in a cubin."""
    tool = cuobjdump()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        usage, code = (
            subprocess.run([tool, option, file], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    return parse(usage, code)


def parse(usage: str, code: str) -> Resources:
    """Resources from cuobjdump's two outputs.

    Raises:
        ValueError: the outputs name no register count: not what cuobjdump prints.
    """
    registers = re.search(r"\bREG:(\d+)", usage)
    if registers is None:
        raise ValueError(f"no register count in cuobjdump's output: {usage[:200]!r}")
    every = instructions(code)
    stack = sum(int(number) for number in re.findall(r"\b(?:STACK|LOCAL):(\d+)", usage))
    return Resources(
        registers=int(registers[1]),
        stack_bytes=stack,
        loads=_widths(every, ("LDG", "LDGSTS")),
        stores=_widths(every, ("STG",)),
        copies_in_flight=max(
            (int(left, 16) for left in re.findall(r"\bDEPBAR\.LE SB0, (0x[0-9a-f]+)", code)), default=0
        ),
        traffic=traffic(every),
    )


def _widths(code: Iterable[Instruction], names: tuple[str, ...]) -> dict[int, int]:
    """Instructions of these names by bytes a thread, counted."""
    return dict(sorted(Counter(each.width for each in code if each.name in names).items()))
