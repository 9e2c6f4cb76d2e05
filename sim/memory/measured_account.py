"""Puts measured memory lines into a rank's account: what was measured replaces what was counted, and the pool is sized anew."""

from __future__ import annotations

from dataclasses import replace

from .account import RankAccount, num_blocks
from .ledger import LedgerLine
from .measured import MeasuredMemory, at_limits, widest_step
from .ops import Op, total
from .settings import Settings


def with_measured(account: RankAccount, measured: MeasuredMemory, settings: Settings) -> RankAccount:
    """The account of an engine that `measured` holds for."""
    lines = measured.lines
    phases = tuple(measured.phases(widest_step(settings)))
    peak = max(phases, key=lambda phase: phase.bytes)
    libraries = (_op("as measured", lines["non_torch"].bytes),) if "non_torch" in lines else account.libraries
    context = account.context
    if "context" in lines:
        context = (_op("as measured", lines["context"].bytes),) if lines["context"].bytes else ()
    graphs = measured.graphs_bytes(settings)
    changed = replace(
        account,
        weights=(_op("tensors as loaded", lines["weights"].bytes),) if "weights" in lines else account.weights,
        libraries=libraries,
        context=context,
        phases=phases,
        graphs_estimate_bytes=account.graphs_estimate_bytes if graphs is None else graphs,
        graphs_bytes=account.graphs_bytes if graphs is None else graphs,
        graphs_text=account.graphs_text
        if graphs is None
        else "as measured, in proportion to the number of captured batches",
        workspaces=_rest(peak.bytes, at_limits(measured.reserved, settings)),
        buffers=(_op("step buffers and tables", at_limits(measured.buffers, settings)),),
        warnings=(),
    )
    used = account.used_bytes + _inside(changed, settings) - _inside(account, settings)
    return replace(
        changed, used_bytes=used, num_blocks=num_blocks(settings, account.budget_bytes - used, account.layout)
    )


def say_where_from(
    lines: tuple[LedgerLine, ...], measured: MeasuredMemory, settings: Settings
) -> tuple[LedgerLine, ...]:
    """The lines of such an account, each that was measured with its origin and its 95 % interval."""
    by = f"measured, profile {measured.profile} ({measured.engine})"
    one_reading = "; one reading: how far it may be off is not known"
    found = []
    for line in lines:
        known = measured.lines.get(line.name)
        if line.name == "peak_activation":
            low, high = measured.interval(line.bytes)
            line = replace(
                line,
                formula="widest fitted phase of the widest step that the limits allow",
                origin=f"{by}: workspace of timed steps",
                low_bytes=low,
                high_bytes=high,
            )
        elif line.name in ("input_buffers", "kernel_workspaces"):
            buffers = line.name == "input_buffers"
            error = measured.buffers_error if buffers else measured.reserved_error
            what = "step buffers and tables" if buffers else "reserved workspace beyond its widest step"
            whole = line.bytes if buffers else at_limits(measured.reserved, settings)
            line = replace(
                line,
                formula="by the limits of a step",
                origin=f"{by}: {what}, by the engine's limits",
                low_bytes=max(0, round(line.bytes - error * whole)),
                high_bytes=round(line.bytes + error * whole),
            )
        elif known is not None:
            line = replace(
                line,
                formula="as measured",
                origin=f"{by}: {known.how}{'' if known.low_bytes is not None else one_reading}",
                low_bytes=known.low_bytes,
                high_bytes=known.high_bytes,
            )
        found.append(line)
    return tuple(found)


def measured_warnings(measured: MeasuredMemory, settings: Settings) -> list[str]:
    """What to know about an account with measured lines."""
    found = [
        f"memory lines were measured: profile {measured.profile}, {measured.engine}, on {measured.gpu}; lines that it does not have "
        "are the account's own"
    ]
    beyond = measured.beyond(settings)
    if beyond:
        found.append(f"the memory lines of profile {measured.profile} are used beyond their range: {', '.join(beyond)}")
    return found


def _inside(account: RankAccount, settings: Settings) -> int:
    """The lines of an account that come off the budget and may have been measured."""
    release = settings.release
    return (
        total((*account.weights, *account.libraries))
        + account.peak.bytes
        + (account.graphs_estimate_bytes if release.graphs_in_budget else 0)
        + (total(account.context) if release.context_in_budget else 0)
    )


def _rest(peak_bytes: int, reserved_bytes: int) -> tuple[Op, ...]:
    return (_op("reserved beyond the widest step", reserved_bytes - peak_bytes),) if reserved_bytes > peak_bytes else ()


def _op(name: str, size: int) -> Op:
    return Op(name=name, requested_bytes=size, formula=f"{size} B", is_tensor=False)
