"""A fit of a run of timed steps as one HTML page: errors, weights with intervals, residuals, speed over time, memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from calibration.measuring.quality import assess
from calibration.measuring.step_log import StepRun
from calibration.plots import against
from sim.memory.measured import STEP_TERMS
from sim.results.page_parts import bullets, card, html_page, html_table, panels, verdict
from sim.results.report_layout import BLUE, GREEN, GREY, RED
from sim.results.svg_plot import Series, plot, span

from .fit_memory import predict_workspace
from .model import TERMS, StepModel
from .points import Points, points_of, workspaces

COLOURS = {"decode": BLUE, "prefill": GREEN, "mixed": RED}


def fit_page(run: StepRun, profile: Mapping[str, Any]) -> str:
    """The page of `profile`, which was fitted to `run`."""
    points = points_of(run)
    weights = {name: value["us"] for name, value in profile["weights"].items()}
    model = StepModel(knots=tuple(profile["terms"]["dense"]["tokens"]), values=weights)
    provenance = profile["provenance"]
    title = f"{profile['name']} fitted to {run.name}"
    return html_page(
        f"kvtwin: {title}",
        verdict(
            "plain", ("kvtwin calibrate fit", provenance["measured_on"]), title, *_origin(profile, len(points.shapes))
        )
        + card("Error on steps that were not used", _errors(profile["error"]))
        + card("Weights", _weights(profile["weights"]))
        + card("Residuals", panels(_residuals(points, model)))
        + card("Speed of the device over the run", panels([_speed(run)]))
        + card("Memory", _memory(run, profile["memory"]))
        + card("To know", bullets(profile["identifiability"])),
    )


def _origin(profile: Mapping[str, Any], shapes: int) -> tuple[str, str]:
    provenance, quality, limits = profile["provenance"], profile["quality"], profile["range"]
    return (
        f"Measured on {provenance['measured_on']} ({provenance['engine']}), {provenance['measured_at']}. {quality['steps']:,} timed "
        f"steps, {quality['kept']:,} of them used, {shapes} different ones. Repeats of a step differ by {quality['noise_floor']:.1%} "
        f"(noise floor); over the run the reference step drifted by {quality['drift']:+.1%}.",
        f"Extrapolates beyond {limits['max_tokens']:,} tokens a step, {limits['max_seqs']} decodes, and "
        f"{limits['max_context_tokens']:,} tokens of mean context.",
    )


def _errors(errors: Mapping[str, Any]) -> str:
    rows = [
        (
            name.replace("_", " "),
            value["points"],
            f"{value['median']:.1%}",
            f"{value['p95']:.1%}",
            f"{value['bias']:+.1%}",
        )
        for name, value in errors.items()
        if isinstance(value, dict)
    ]
    return html_table(("steps", "number", "median", "95th percentile", "bias"), rows)


def _weights(weights: Mapping[str, Any]) -> str:
    rows = []
    for name, value in weights.items():
        low, high = value["interval"]
        about = TERMS.get(name) or (
            "matrices, short kernels and whatever else a token costs, from {} to {} tokens".format(*name.split("_")[1:])
        )
        shown = f"{low:+.0%} to {high:+.0%}" if value["us"] else f"up to {high:.3g} us"
        rows.append((name, f"{value['us']:,.4g}", shown, about))
    return html_table(("term", "us", "95 % interval", "what it is"), rows, words=(0, 3), wrap=(3,))


def _residuals(points: Points, model: StepModel) -> list[str]:
    predicted = model.predict(points.shapes)
    error = 100 * (predicted / points.time_us - 1)
    ends = span([error.tolist()])
    sizes = {
        "tokens in the step": np.asarray([shape.num_tokens for shape in points.shapes], dtype=float),
        "mean context of the decodes": np.asarray(
            [shape.decode_context_tokens / max(shape.decode_seqs, 1) for shape in points.shapes]
        ),
        "measured duration, us": points.time_us,
    }
    drawn = [against("Duration", "us", points.time_us, predicted)]
    for name, size in sizes.items():
        series = []
        for kind, colour in COLOURS.items():
            mine = (points.kinds == kind) & (size > 0)
            series.append(Series(name=kind, x=size[mine].tolist(), y=error[mine].tolist(), dots=True, colour=colour))
        drawn.append(
            plot(f"Error over {name}", series, x_label=f"{name} (log)", y_label="error, %", y_range=ends, log_x=True)
        )
    return drawn


def _speed(run: StepRun) -> str:
    _, kept = assess(run.steps)
    reference = np.asarray([step.group == "reference" for step in run.steps])
    when = np.asarray([step.elapsed_s for step in run.steps])
    took = np.asarray([step.duration_us for step in run.steps])
    series = [
        Series(
            name=name,
            x=when[reference & chosen].tolist(),
            y=took[reference & chosen].tolist(),
            dots=True,
            colour=colour,
        )
        for name, chosen, colour in (("used", kept, BLUE), ("left out", ~kept, GREY))
    ]
    return plot("The reference step", series, x_label="seconds of measuring", y_label="us", from_zero=False)


def _memory(run: StepRun, memory: Mapping[str, Any]) -> str:
    shapes, workspace_bytes = workspaces(run)
    error = memory["workspace_error"]
    always = [(_words(name), f"{value:,}") for name, value in memory["always"].items()]
    phases = [
        (f"phase {number}", *(f"{phase[name]:,.1f}" for name in STEP_TERMS))
        for number, phase in enumerate(memory["workspace_phases"], start=1)
    ]
    said = (
        "Workspace of a step: the widest of the phases below. On steps that were not used: median error "
        f"{error['median']:.2%}, 95th percentile {error['p95']:.1%}."
    )
    return (
        html_table(("always there", "bytes"), always)
        + f"<p>{said}</p>"
        + html_table(("bytes", *map(_words, STEP_TERMS)), phases)
        + panels([against("Workspace", "bytes", workspace_bytes, predict_workspace(memory, shapes))])
    )


def _words(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")
