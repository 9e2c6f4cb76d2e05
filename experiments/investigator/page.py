"""The diagnosis as one HTML page: verdict, evidence, fixes, and pictures of memory over its load, over time, and under settings."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from experiments.svg_plot import Series, line_plot
from sim.memory.allocators import SnapshotReplay
from sim.results.report_template import STYLE

from .allocator_runs import AllocatorRuns
from .case import Case
from .curve import Curve
from .curve_fit import fit_dimensions
from .diagnosis import Cause, Diagnosis
from .gather import Evidence
from .sizes import GIB

_MOST_CURVES = 8
"""Curves that are drawn; a fleet's further replicas are judged, not drawn."""


def page(evidence: Evidence, case: Case, diagnosis: Diagnosis) -> str:
    """The whole page; it loads nothing from elsewhere."""
    parts = [
        _verdict(diagnosis),
        _sentences("Evidence", diagnosis.evidence),
        _fixes(diagnosis),
        *(_curve(part.name, part.curve, case) for part in evidence.curves[:_MOST_CURVES] if part.curve is not None),
        *(_allocator(part.name, part.runs) for part in evidence.snapshots if part.runs is not None),
        _sentences("Ruled out", diagnosis.ruled_out),
        _by_file(diagnosis),
        _sentences("Record next", diagnosis.next_to_record),
        _sentences("Notes", diagnosis.notes),
    ]
    title = escape(f"kvtwin diagnose: {diagnosis.headline}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _verdict(diagnosis: Diagnosis) -> str:
    known = diagnosis.cause is not Cause.UNKNOWN
    sure = f"confidence {diagnosis.confidence:.0%}" if known else "the evidence does not say"
    return (
        f'<section class="answer {"bad" if known else "strained"}"><div class="eyebrow"><b>kvtwin diagnose</b><span>phase: '
        f"{escape(str(diagnosis.phase))}</span><span>{sure}</span></div><h1>{escape(diagnosis.headline)}</h1></section>"
    )


def _sentences(title: str, sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<section class="card"><h2>{title}</h2><ul>{items}</ul></section>'


def _fixes(diagnosis: Diagnosis) -> str:
    if not diagnosis.fixes:
        return ""
    rows = "".join(
        f'<tr><td class="text wrap">{escape(fix.change)}</td><td>{"–" if fix.effect_gib is None else f"{fix.effect_gib:+.2f}"}</td>'
        f"<td>{'–' if fix.effect_tokens is None else f'{fix.effect_tokens:+,}'}</td>"
        f'<td class="text wrap">{escape(fix.basis)}</td></tr>'
        for fix in diagnosis.fixes
    )
    head = '<th class="text">Change</th><th>GiB back</th><th>KV tokens</th><th class="text">Because</th>'
    return (
        '<section class="card"><h2>Fixes, with what they are predicted to do</h2><div class="scroll"><table><thead><tr>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _by_file(diagnosis: Diagnosis) -> str:
    lines = [
        f"{one.file}: {one.phase}, {one.cause}" + (f" ({one.confidence:.0%})" if one.confidence else "")
        for one in diagnosis.by_file
    ]
    return _sentences("By file, each alone", lines)


def _curve(name: str, curve: Curve, case: Case) -> str:
    """Memory over time, and over its load with the fitted line and the ledger's slope."""
    time = curve.time_s.tolist()
    held = [
        Series(name=label, x=time, y=(values / GIB).tolist())
        for label, values in (("allocated", curve.allocated), ("reserved", curve.reserved), ("in use", curve.in_use))
        if values is not None
    ]
    if curve.total_bytes is not None:
        held.append(Series(name="GPU", x=[time[0], time[-1]], y=[curve.total_bytes / GIB] * 2, dashed=True))
    plots = [line_plot("Memory over time", held, x_label="s", y_label="GiB"), _over_load(curve, case)]
    if curve.workspace is not None and "prefill_tokens" in curve.dimensions:
        prompts = curve.dimensions["prefill_tokens"]
        busy = prompts > 0
        dots = Series(name="steps", x=prompts[busy].tolist(), y=(curve.workspace[busy] / GIB).tolist(), dots=True)
        plots.append(
            line_plot("Temporary tensors over the prompt tokens of a step", [dots], x_label="tokens", y_label="GiB")
        )
    notes = "".join(f'<p class="soft small">{escape(fit.sentence)}</p>' for fit in fit_dimensions(curve))
    return f'<section class="card"><h2>{escape(name)}</h2>{notes}{_panels(plots)}</section>'


def _over_load(curve: Curve, case: Case) -> str:
    load = curve.load
    if load is None or float(load.max()) == float(load.min()):
        return ""
    unit = "tokens" if curve.tokens is not None else "active sequences"
    series = [Series(name="measured", x=load.tolist(), y=(curve.allocated / GIB).tolist(), dots=True)]
    ends = [float(load.min()), float(load.max())]
    fit = next(iter(fit_dimensions(curve)), None)
    slope = fit.per_unit(fit.dimensions[0].name) if fit else None
    if fit is not None and slope is not None:
        line = [(fit.base + slope * end) / GIB for end in ends]
        series.append(Series(name=f"fitted, {slope:,.0f} B a {unit[:-1]}", x=ends, y=line))
    expected = case.known.kv_bytes_per_token
    if expected and curve.tokens is not None and fit is not None:
        line = [(fit.base + expected * end) / GIB for end in ends]
        series.append(Series(name=f"the ledger's {expected:,} B a token", x=ends, y=line, dashed=True))
    return line_plot(f"Allocated memory over {unit}", series, x_label=unit, y_label="GiB", from_zero=False)


def _allocator(name: str, runs: AllocatorRuns) -> str:
    """Reserved, allocated and largest free block over time, under the recorded settings and under each other."""
    all_runs: list[tuple[str, SnapshotReplay]] = [("recorded", runs.recorded), *runs.others]
    plots = [
        line_plot(title, [_history(conf, run, column) for conf, run in all_runs], x_label="s", y_label="GiB")
        for title, column in (
            ("Reserved", "reserved_bytes"),
            ("Allocated", "allocated_bytes"),
            ("Largest free block", "largest_free_bytes"),
        )
    ]
    notes = "".join(f'<p class="soft small">{escape(sentence)}</p>' for sentence in runs.sentences)
    limits = "".join(f'<p class="soft small">{escape(note)}</p>' for note in runs.recorded.notes)
    return (
        f'<section class="card"><h2>{escape(name)}: the allocator under other settings</h2>{notes}{limits}'
        f"{_panels(plots)}</section>"
    )


def _history(conf: str, run: SnapshotReplay, column: str) -> Series:
    table = run.replay.columns()
    return Series(name=conf, x=table["time_s"], y=[value / GIB for value in table[column]], steps=True)


def _panels(plots: Sequence[str]) -> str:
    """Plots side by side where the page is wide enough."""
    cells = "".join(f"<div>{plot}</div>" for plot in plots if plot)
    return (
        f'<div class="panels" style="grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr))">{cells}</div>'
    )
