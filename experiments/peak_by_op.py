"""Peak by operation: the followed step of a real run, operation by operation, beside what the ledger predicts for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.memory.ops import Op, Peak, total
from sim.memory.step_memory import StepMemory

if TYPE_CHECKING:
    from gpu.op_timeline import OpEvent, OpTimeline

_ATTENTION, _MLP, _COMMON = "QKV", "MLP", "residual"
_KEPT = "cuBLAS"
"""A workspace that its library keeps from the first product on: no operation's own, and not on the CPU at all."""
_BUFFERS = {
    **dict.fromkeys(("hidden", "residual", "normed"), _COMMON),
    **dict.fromkeys(("qkv", "query", "key", "value", "normed query", "normed key", "attention"), _ATTENTION),
    **dict.fromkeys(("gate and up", "silu"), _MLP),
    **dict.fromkeys(("last", "last residual", "final", "logits"), "logits"),
}
"""Where the ledger counts what is written into a buffer of the workspace: the beginning of a line's name, or a phase's."""
_OPERATIONS = {
    **dict.fromkeys(("rope", "store_kv", "decode_attention", "prefill_attention"), _ATTENTION),
    "silu_mul": _MLP,
    "rms_norm": _COMMON,
    "sample": "sampler",
}
COLUMNS = (
    "index", "operation", "served_by", "fallback", "into", "live_bytes", "workspace_bytes", "allocated_bytes", "is_peak",
    "ledger_phase", "ledger_op", "predicted_bytes", "predicted_phase_bytes",
)  # fmt: skip
"""Columns of peak_by_op.csv. `live_bytes` are all temporary bytes while the operation ran. `predicted_bytes` is the ledger's line
for it, `predicted_phase_bytes` all that the ledger counts as live with it, cuBLAS's own workspace apart; empty for what the ledger does
not know."""


def peak_document(timeline: OpTimeline, ledger: StepMemory) -> dict[str, Any]:
    """The step as JSON values: who holds the peak, in a sentence, and a row an operation."""
    assert timeline.shape is not None  # the step was run
    assert timeline.peak is not None
    phases = ledger.phases(timeline.shape)
    rows = [_row(event, event is timeline.peak, phases) for event in timeline.events]
    peak = rows[timeline.peak.index]
    return {
        "step": timeline.step,
        "tokens": timeline.shape.num_tokens,
        "sequences": timeline.shape.decode_seqs + len(timeline.shape.prefill),
        "answer": _sentence(timeline.peak, peak, phases),
        "peak": {**peak, "live": [{"buffer": name, "bytes": size} for name, size in timeline.peak.live]},
        "operations": rows,
    }


def peak_columns(document: dict[str, Any]) -> dict[str, list[Any]]:
    """The rows of a document as columns, for peak_by_op.csv."""
    return {name: [row[name] for row in document["operations"]] for name in COLUMNS}


def _row(event: OpEvent, is_peak: bool, phases: list[Peak]) -> dict[str, Any]:
    phase, op = _predicted(event, phases)
    return {
        "index": event.index,
        "operation": event.operation,
        "served_by": event.served_by,
        "fallback": event.fallback,
        "into": event.into,
        "live_bytes": event.live_bytes,
        "workspace_bytes": event.workspace_bytes,
        "allocated_bytes": event.allocated_bytes,
        "is_peak": is_peak,
        "ledger_phase": None if phase is None else phase.phase,
        "ledger_op": None if op is None else op.name,
        "predicted_bytes": None if op is None else op.requested_bytes,
        "predicted_phase_bytes": None if phase is None else _step_bytes(phase),
    }


def _predicted(event: OpEvent, phases: list[Peak]) -> tuple[Peak | None, Op | None]:
    """The ledger's phase and line for an operation; None where it has none (an embedding look-up, a copy)."""
    where = _OPERATIONS.get(event.operation) or _BUFFERS.get(event.into)
    if where is None:
        return None, None
    for phase in phases:
        if phase.phase == where:
            own = [op for op in phase.ops if not op.name.startswith((_KEPT, _COMMON))]
            return phase, max(own, key=lambda op: op.requested_bytes, default=None)
    found = [(phase, op) for phase in phases for op in phase.ops if op.name.startswith(where)]
    return max(found, key=lambda pair: _step_bytes(pair[0]), default=(None, None))


def _step_bytes(phase: Peak) -> int:
    """Bytes of a phase that come and go with the step."""
    return total(op for op in phase.ops if not op.name.startswith(_KEPT))


def _sentence(event: OpEvent, row: dict[str, Any], phases: list[Peak]) -> str:
    widest = max(phases, key=_step_bytes)
    by = f"{event.served_by}, a fallback" if event.fallback else event.served_by
    into = f" into {event.into!r}" if event.into else ""
    predicted = (
        "the ledger has no line for it"
        if row["ledger_op"] is None
        else f"the ledger counts {row['predicted_bytes']:,} B for it ({row['ledger_op']}), {row['predicted_phase_bytes']:,} B with all "
        "that is live beside it"
    )
    if event.operation in _OPERATIONS and event.served_by == "torch":
        predicted += " (a kernel's: a torch twin takes intermediate results besides)"
    return (
        f"{event.operation}{into} (served by {by}) holds the peak of temporary memory: {event.live_bytes:,} B live; {predicted}. "
        f"The ledger's widest phase is {widest.phase}, with {_step_bytes(widest):,} B."
    )
