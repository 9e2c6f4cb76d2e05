"""Compile a launch for a GPU that need not be there, and see what it takes.

A launch is made by the same function that would run it, on tensors of torch's `meta` device, which have shapes and strides
and no memory. So what is compiled here, down to the constants and the alignment hints, is what a launch would compile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .bandwidth import BandwidthAccount, bandwidth_account
from .kernels.launch import Launch, interpreted
from .occupancy import LIMITS
from .require import require
from .sass import Resources, read_cubin

TARGETS = {"sm_80": 80, "sm_89": 89, "sm_90": 90, "sm_100": 100, "sm_120": 120}
"""Targets by name: A100, L40S and RTX 40, H100 and H200, B200, RTX 50 and RTX PRO."""

SHARED_LIMIT = {architecture: limits.shared_limit_bytes for architecture, limits in LIMITS.items()}
"""Most shared memory a program may ask for, in bytes."""

TRITON_TYPES = {
    "torch.bfloat16": "*bf16",
    "torch.float16": "*fp16",
    "torch.float32": "*fp32",
    "torch.uint8": "*u8",
    "torch.int32": "*i32",
    "torch.int64": "*i64",
}
"""Pointer types as Triton writes them, by torch dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a kernel may take, and how wide it must read."""

    registers: int = 128
    """Most registers a thread."""
    shared_bytes: int = 49_152
    """Most shared memory a program, in bytes."""
    vector_bytes: int = 16
    """Narrowest allowed width of its widest global read, in bytes."""
    narrow_loads: int = 8
    """Most read instructions of fewer than 8 bytes: what is left for tables and scales when vectors are read whole."""
    copies_in_flight: int = 0
    """Fewest groups of copies that are under way while older ones are used."""
    hidden_ns: int = 0
    """Shortest round trip to memory that it must be able to hide at the full bandwidth of the target's card."""
    issued_share: float = 0.0
    """Least share of that bandwidth that the rate of its instructions allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """What one kernel takes on one target."""

    name: str
    """Kernel and what it was specialised for."""
    target: str
    """A key of `TARGETS`."""
    shared_bytes: int
    """Shared memory a program."""
    resources: Resources
    budget: Budget
    account: BandwidthAccount
    """What it can ask of a card's memory."""

    @property
    def problems(self) -> list[str]:
        """What does not hold, with the numbers; empty when the kernel keeps its budget."""
        found, account = self.resources, self.account
        issued = account.issued_bytes_per_s / account.gpu.memory_bandwidth_bytes_per_s
        limit = min(self.budget.shared_bytes, SHARED_LIMIT[TARGETS[self.target]])
        checks = (
            (found.stack_bytes > 0, f"{found.stack_bytes} bytes a thread are spilled"),
            (found.registers > self.budget.registers, f"{found.registers} registers of {self.budget.registers}"),
            (self.shared_bytes > limit, f"{self.shared_bytes} bytes of shared memory of {limit}"),
            (
                found.vector_bytes < self.budget.vector_bytes,
                f"reads {found.vector_bytes} bytes at a time, not {self.budget.vector_bytes}",
            ),
            (
                found.narrow_loads > self.budget.narrow_loads,
                f"{found.narrow_loads} narrow reads of {self.budget.narrow_loads}",
            ),
            (
                found.copies_in_flight < self.budget.copies_in_flight,
                f"{found.copies_in_flight} groups of copies in flight, not {self.budget.copies_in_flight}: loads do not overlap",
            ),
            (
                account.hidden_ns < self.budget.hidden_ns,
                f"{account.in_flight_bytes / 1024:.0f} KiB in flight a multiprocessor hide {account.hidden_ns:.0f} ns of "
                f"{self.budget.hidden_ns} at the bandwidth of {account.gpu.name}",
            ),
            (
                issued < self.budget.issued_share,
                f"instructions for {issued:.0%} of the bandwidth of {account.gpu.name}, not {self.budget.issued_share:.0%}",
            ),
        )
        return [text for broken, text in checks if broken]

    @property
    def ok(self) -> bool:
        """Whether the budget is kept."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "name": self.name,
            "target": self.target,
            "registers": self.resources.registers,
            "spill_bytes": self.resources.stack_bytes,
            "shared_bytes": self.shared_bytes,
            "vector_bytes": self.resources.vector_bytes,
            "ok": self.ok,
            "problems": self.problems,
            "copies_in_flight": self.resources.copies_in_flight,
            "loads_by_bytes": {str(width): count for width, count in self.resources.loads.items()},
            "stores_by_bytes": {str(width): count for width, count in self.resources.stores.items()},
            "bandwidth": self.account.as_json(),
        }


def compile_launch(name: str, launch: Launch, target: str, budget: Budget | None = None) -> CompileReport:
    """Compile `launch` for `target`.

    Raises:
        MissingExtraError: triton is not installed.
        RuntimeError: this process runs Triton in its interpreter, which cannot compile.
    """
    require("triton", "compiling kernels")
    if interpreted():
        raise RuntimeError("TRITON_INTERPRET=1 is set: this process interprets kernels and cannot compile them")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

    architecture = TARGETS[target]
    source = ASTSource(fn=launch.kernel, **launch_signature(launch, architecture))
    compiled = compile_source(
        source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": launch.num_warps}
    )
    found, shared_bytes = read_cubin(compiled.asm["cubin"]), int(compiled.metadata.shared)
    return CompileReport(
        name=name,
        target=target,
        shared_bytes=shared_bytes,
        resources=found,
        budget=Budget() if budget is None else budget,
        account=bandwidth_account(launch, architecture, found, shared_bytes),
    )


def launch_signature(launch: Launch, architecture: int) -> dict[str, Any]:
    """Types, constants and alignment hints, by the rules of a launch: an integer that is 1 is a constant, one that is a
    multiple of 16 is known to be, and so are pointers (torch aligns them to more); but for those that a kernel will not have told apart.
    """
    names = list(launch.kernel.arg_names)
    fixed = {param.name for param in launch.kernel.params if param.do_not_specialize}
    unaligned = fixed | {param.name for param in launch.kernel.params if param.do_not_specialize_on_alignment}
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    hints: dict[tuple[int], list[list[Any]]] = {}
    given = dict(zip(names, launch.arguments, strict=False)) | launch.constants
    if "NATIVE" in given:
        given["NATIVE"] = architecture >= 89  # a meta tensor cannot tell what its device can do
    for place, name in enumerate(names):
        value = given[name]
        if name in launch.constants or (isinstance(value, int) and value == 1 and name not in fixed):
            signature[name] = "constexpr"
            constants[(place,)] = value
            continue
        if isinstance(value, float):
            signature[name] = "fp32"
            continue
        if isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0
        else:
            signature[name] = TRITON_TYPES[str(value.dtype)]
            aligned = value.storage_offset() * value.element_size() % 16 == 0
        if aligned and name not in unaligned:
            hints[(place,)] = [["tt.divisibility", 16]]
    return {"signature": signature, "constexprs": constants, "attrs": hints}
