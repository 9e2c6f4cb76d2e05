"""Ops: every operation of the forward pass and of the pool, served by a Triton kernel or by its torch twin, on record.

On CUDA the kernels serve; a twin there is a fallback, which is slower and takes other memory, so it is recorded with its
reason and never silent. On the CPU the twins are what is meant to serve.
"""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .kernels import attention_twin, blocks_twin, elementwise_twin, sample_twin
from .kernels.attention import DecodeCall, PrefillCall
from .kernels.block_rows import BlockRows
from .kernels.launch import KVView, interpreted
from .kernels.sampling import SampleCall
from .kernels.scratch import Scratch
from .require import MissingExtraError
from .staging import Staging

Implementation = Literal["triton", "torch"]
OPERATIONS = (
    "store_kv", "decode_attention", "prefill_attention", "move_blocks", "block_checksum", "rms_norm", "rope", "silu_mul",
    "sample",
)  # fmt: skip
"""Operations, each with a kernel of the same name in the module of the same name."""


@dataclass(frozen=True, slots=True, order=True)
class Fallback:
    """An operation that was not served by what was meant to serve it."""

    operation: str
    meant: Implementation
    served: Implementation
    reason: str


@dataclass(frozen=True, slots=True)
class Record:
    """Calls by operation and implementation, and those that were not served as meant."""

    served: Counter[tuple[str, Implementation]]
    fallbacks: Counter[Fallback]

    def __sub__(self, other: Record) -> Record:
        return Record(self.served - other.served, self.fallbacks - other.fallbacks)


class Ops:
    """Operations on one device. Arguments and results are those of the kernel's module; nothing is kept but the record, and the buffers
    through which the host tells kernels what to work on.
    """

    def __init__(
        self,
        device: Any = "cpu",
        *,
        implementation: Literal["auto", "triton", "torch"] = "auto",
        scratch: Scratch | None = None,
    ) -> None:
        """`auto` means kernels on CUDA and twins elsewhere. `scratch` is where twins put intermediate results.

        Raises:
            MissingExtraError: `triton` is asked for where it cannot be: not installed, or on the CPU outside its interpreter.
        """
        self.device = torch.device(device)
        self.scratch = scratch
        self.staging = Staging(self.device)
        """How numbers get from the host to the device and back."""
        on_gpu = self.device.type == "cuda"
        self.meant: Implementation = "triton" if on_gpu else "torch"
        """What is meant to serve on this device."""
        if implementation != "auto":
            self.meant = implementation if on_gpu or interpreted() else self.meant
            if implementation == "triton" and self.meant != "triton":
                raise MissingExtraError(
                    "Triton kernels run on CUDA devices, and in the interpreter with TRITON_INTERPRET=1"
                )
        self._reason = ""
        self._kernels: dict[str, Any] = {}
        if implementation == "torch" and on_gpu:
            self.meant, self._reason = "triton", "the torch implementation was asked for"
        elif self.meant == "triton":
            self._kernels, self._reason = _load_kernels()
            if not self._kernels and implementation == "triton":
                raise MissingExtraError(self._reason)
        self.served: Counter[tuple[str, Implementation]] = Counter()
        """Calls by operation and implementation."""
        self.fallbacks: Counter[Fallback] = Counter()
        """Calls that were not served as meant, by operation and reason."""

    # -- operations -----------------------------------------------------------------------------------------------

    def store_kv(self, key: Any, value: Any, cache: KVView, slot_mapping: Any) -> None:
        """See `gpu.kernels.store_kv`."""
        if (kernel := self._choose("store_kv")) is not None:
            kernel(key, value, cache, slot_mapping)
        else:
            blocks_twin.store_kv_twin(key, value, cache, slot_mapping, self.scratch)

    def decode_attention(self, call: DecodeCall) -> Any:
        """See `gpu.kernels.decode_attention`."""
        if (kernel := self._choose("decode_attention")) is not None:
            return kernel(call)
        return attention_twin.decode_attention_twin(call, self.scratch)

    def prefill_attention(self, call: PrefillCall) -> Any:
        """See `gpu.kernels.prefill_attention`."""
        if (kernel := self._choose("prefill_attention")) is not None:
            return kernel(call)
        return attention_twin.prefill_attention_twin(call, self.scratch)

    def move_blocks(self, source: BlockRows, target: BlockRows, source_ids: Any, target_ids: Any) -> None:
        """See `gpu.kernels.move_blocks`: copies within a pool, gathers from it, scatters into it."""
        if (kernel := self._choose("move_blocks")) is not None:
            kernel(source, target, source_ids, target_ids)
        else:
            blocks_twin.move_blocks_twin(source, target, source_ids, target_ids)

    def block_checksum(self, rows: BlockRows, block_ids: Any, out: Any) -> Any:
        """See `gpu.kernels.block_checksum`."""
        if (kernel := self._choose("block_checksum")) is not None:
            return kernel(rows, block_ids, out)
        return blocks_twin.block_checksum_twin(rows, block_ids, out)

    def rms_norm(self, x: Any, weight: Any, epsilon: float, out: Any, residual: Any = None) -> Any:
        """See `gpu.kernels.rms_norm`."""
        if (kernel := self._choose("rms_norm")) is not None:
            return kernel(x, weight, epsilon, out, residual)
        return elementwise_twin.rms_norm_twin(x, weight, epsilon, out, residual, self.scratch)

    def rope(self, query: Any, key: Any, table: Any, positions: Any) -> None:
        """See `gpu.kernels.rope`."""
        if (kernel := self._choose("rope")) is not None:
            kernel(query, key, table, positions)
        else:
            elementwise_twin.rope_twin(query, key, table, positions, self.scratch)

    def silu_mul(self, x: Any, out: Any) -> Any:
        """See `gpu.kernels.silu_mul`."""
        if (kernel := self._choose("silu_mul")) is not None:
            return kernel(x, out)
        return elementwise_twin.silu_mul_twin(x, out, self.scratch)

    def sample(self, call: SampleCall) -> Any:
        """See `gpu.kernels.sample`."""
        if (kernel := self._choose("sample")) is not None:
            return kernel(call)
        return sample_twin.sample_twin(call, self.scratch)

    # -- the record -----------------------------------------------------------------------------------------------

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self.served.total()

    def record(self) -> Record:
        """A copy of the record."""
        return Record(Counter(self.served), Counter(self.fallbacks))

    def restore(self, record: Record) -> None:
        """Make `record` the record: what a warm-up called is not what a run did."""
        self.served, self.fallbacks = Counter(record.served), Counter(record.fallbacks)

    def add(self, record: Record) -> None:
        """Calls that did not come through here: those of a captured graph, when it is replayed."""
        self.served.update(record.served)
        self.fallbacks.update(record.fallbacks)

    def report(self) -> dict[str, Any]:
        """The record as JSON values: calls by operation and implementation, and the fallbacks with their reasons."""
        served: dict[str, dict[str, int]] = {}
        for (operation, implementation), calls in sorted(self.served.items()):
            served.setdefault(operation, {})[implementation] = calls
        return {
            "device": str(self.device),
            "meant": self.meant,
            "served": served,
            "fallbacks": [
                {"operation": entry.operation, "served": entry.served, "reason": entry.reason, "calls": calls}
                for entry, calls in sorted(self.fallbacks.items())
            ],
        }

    def _choose(self, operation: str) -> Any:
        """The kernel that serves, or None for the twin; on record either way."""
        kernel = self._kernels.get(operation)
        served: Implementation = "torch" if kernel is None else "triton"
        self.served[operation, served] += 1
        if served != self.meant:
            self.fallbacks[Fallback(operation, self.meant, served, self._reason)] += 1
        return kernel


def _load_kernels() -> tuple[dict[str, Any], str]:
    """The kernels by name, or none and the reason."""
    try:
        return {name: getattr(importlib.import_module(f"gpu.kernels.{name}"), name) for name in OPERATIONS}, ""
    except ImportError as error:
        return {}, f"triton cannot be imported: {error}"
