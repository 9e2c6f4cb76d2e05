"""The diagnosis as one HTML page: verdict, evidence, fixes, and pictures of memory over its load, over time, and under settings."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sim.memory.allocators import SnapshotReplay
from sim.results.page_parts import bullets, card, html_page, html_table, panels, verdict
from sim.results.svg_plot import Series, plot, span

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
        card("Evidence", bullets(diagnosis.evidence)),
        _fixes(diagnosis),
        *(_curve(part.name, part.curve, case) for part in evidence.curves[:_MOST_CURVES] if part.curve is not None),
        *(_allocator(part.name, part.runs) for part in evidence.snapshots if part.runs is not None),
        card("Ruled out", bullets(diagnosis.ruled_out)),
        card("By file, each alone", bullets(_by_file(diagnosis))),
        card("Record next", bullets(diagnosis.next_to_record)),
        card("Notes", bullets(diagnosis.notes)),
    ]
    return html_page(f"kvtwin diagnose: {diagnosis.headline}", "".join(parts))


def _verdict(diagnosis: Diagnosis) -> str:
    known = diagnosis.cause is not Cause.UNKNOWN
    sure = f"confidence {diagnosis.confidence:.0%}" if known else "the evidence does not say"
    eyebrow = ("kvtwin diagnose", f"phase: {diagnosis.phase}", sure)
    return verdict("bad" if known else "strained", eyebrow, diagnosis.headline)


def _fixes(diagnosis: Diagnosis) -> str:
    if not diagnosis.fixes:
        return ""
    rows = [
        (
            fix.change,
            "–" if fix.effect_gib is None else f"{fix.effect_gib:+.2f}",
            "–" if fix.effect_tokens is None else f"{fix.effect_tokens:+,}",
            fix.basis,
        )
        for fix in diagnosis.fixes
    ]
    head = ("Change", "GiB back", "KV tokens", "Because")
    return card("Fixes, with what they are predicted to do", html_table(head, rows, words=(0, 3), wrap=(0, 3)))


def _by_file(diagnosis: Diagnosis) -> list[str]:
    return [
        f"{one.file}: {one.phase}, {one.cause}" + (f" ({one.confidence:.0%})" if one.confidence else "")
        for one in diagnosis.by_file
    ]


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
    plots = [plot("Memory over time", held, x_label="s", y_label="GiB"), _over_load(curve, case)]
    if curve.workspace is not None and "prefill_tokens" in curve.dimensions:
        prompts = curve.dimensions["prefill_tokens"]
        busy = prompts > 0
        dots = Series(name="steps", x=prompts[busy].tolist(), y=(curve.workspace[busy] / GIB).tolist(), dots=True)
        plots.append(
            plot("Temporary tensors over the prompt tokens of a step", [dots], x_label="tokens", y_label="GiB")
        )
    return card(name, _small([fit.sentence for fit in fit_dimensions(curve)]), panels(plots))


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
    return plot(f"Allocated memory over {unit}", series, x_label=unit, y_label="GiB", from_zero=False)


def _allocator(name: str, runs: AllocatorRuns) -> str:
    """Reserved and allocated memory on one axis, and the largest free block, under the recorded settings and under each other."""
    all_runs: list[tuple[str, SnapshotReplay]] = [("recorded", runs.recorded), *runs.others]
    tables = {conf: run.replay.columns() for conf, run in all_runs}
    ends = span(table["time_s"] for table in tables.values())
    timed = ends[1] > ends[0]  # a history may have no clock: then its events are counted

    def history(column: str) -> list[Series]:
        return [
            Series(
                name=conf,
                x=table["time_s"] if timed else range(len(table["time_s"])),
                y=[value / GIB for value in table[column]],
                steps=True,
            )
            for conf, table in tables.items()
        ]

    held = {"Reserved": history("reserved_bytes"), "Allocated": history("allocated_bytes")}
    most = (0.0, span(one.y for series in held.values() for one in series)[1])
    x_label = "s" if timed else "event"
    plots = [plot(title, series, x_label=x_label, y_label="GiB", y_range=most) for title, series in held.items()]
    plots.append(plot("Largest free block", history("largest_free_bytes"), x_label=x_label, y_label="GiB"))
    notes = _small([*runs.sentences, *runs.recorded.notes])
    return card(f"{name}: the allocator under other settings", notes, panels(plots))


def _small(sentences: Sequence[str]) -> str:
    return "".join(f'<p class="soft small">{escape(sentence)}</p>' for sentence in sentences)
