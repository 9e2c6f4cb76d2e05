"""A fit of a run of timed steps as one HTML page: errors, weights with intervals, residuals, speed over time, memory."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from calibration.measuring.quality import assess
from calibration.measuring.step_log import StepRun
from calibration.plots import BLUE, GREEN, GREY, RED, Series, against, dots, page_frame, table
from sim.memory.measured import STEP_TERMS

from .fit_memory import predict_workspace
from .model import TERMS, StepModel
from .points import Points, points_of, workspaces

COLOURS = {"decode": BLUE, "prefill": GREEN, "mixed": RED}


def fit_page(run: StepRun, profile: Mapping[str, Any]) -> str:
    """The page of `profile`, which was fitted to `run`."""
    points = points_of(run)
    weights = {name: value["us"] for name, value in profile["weights"].items()}
    model = StepModel(knots=tuple(profile["terms"]["dense"]["tokens"]), values=weights)
    provenance, quality = profile["provenance"], profile["quality"]
    notes = "".join(f"<li>{escape(text)}</li>" for text in profile["identifiability"])
    limits = profile["range"]
    errors = [_error(name, value) for name, value in profile["error"].items() if isinstance(value, dict)]
    body = f"""<p>{escape(profile["name"])}, measured on {escape(provenance["measured_on"])} ({escape(provenance["engine"])}),
{escape(provenance["measured_at"])}. {quality["steps"]:,} timed steps, {quality["kept"]:,} of them used,
{len(points.shapes)} different ones. Repeats of a step differ by {quality["noise_floor"]:.1%} (noise floor); over the run the
reference step drifted by {quality["drift"]:+.1%}.</p>
<p>Extrapolates beyond {limits["max_tokens"]:,} tokens a step, {limits["max_seqs"]} decodes, and {limits["max_context_tokens"]:,} tokens of
mean context.</p>
<h2>Error on steps that were not used</h2>
{table(("steps", "number", "median", "95th percentile", "bias"), errors)}
<h2>Weights</h2>
{table(("term", "us", "95 % interval", ""), [_weight(name, value) for name, value in profile["weights"].items()])}
<h2>Residuals</h2>{_residuals(points, model)}
<h2>Speed of the device over the run</h2>{_speed(run)}
<h2>Memory</h2>{_memory(run, profile["memory"])}
<h2>To know</h2><ul>{notes}</ul>
"""
    return page_frame(f"kvtwin: {profile['name']} fitted to {run.name}", body)


def _error(name: str, value: Mapping[str, Any]) -> str:
    return (
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{value['points']}</td><td>{value['median']:.1%}</td>"
        f"<td>{value['p95']:.1%}</td><td>{value['bias']:+.1%}</td></tr>"
    )


def _weight(name: str, value: Mapping[str, Any]) -> str:
    low, high = value["interval"]
    shown = f"{low:+.0%} to {high:+.0%}" if value["us"] else f"up to {high:.3g} us"
    about = TERMS.get(name) or "matrices, short kernels and whatever else a token costs, from {} to {} tokens".format(
        *name.split("_")[1:]
    )
    return f'<tr><td>{escape(name)}</td><td>{value["us"]:,.4g}</td><td>{shown}</td><td class="text">{escape(about)}</td></tr>'


def _residuals(points: Points, model: StepModel) -> str:
    predicted = model.predict(points.shapes)
    error = 100 * (predicted / points.time_us - 1)
    sizes = {
        "tokens in the step": np.asarray([shape.num_tokens for shape in points.shapes], dtype=float),
        "mean context of the decodes": np.asarray(
            [shape.decode_context_tokens / max(shape.decode_seqs, 1) for shape in points.shapes]
        ),
        "measured duration, us": points.time_us,
    }
    drawn = [against("duration, us", points.time_us, predicted)]
    for name, size in sizes.items():
        series = []
        for kind, colour in COLOURS.items():
            mine = (points.kinds == kind) & (size > 0)
            series.append(Series(size[mine], error[mine], colour, kind))
        drawn.append(dots(f"error in % over {name} (log)", series, log_x=True, middle=0.0))
    return "".join(drawn)


def _speed(run: StepRun) -> str:
    _, kept = assess(run.steps)
    reference = np.asarray([step.group == "reference" for step in run.steps])
    when = np.asarray([step.elapsed_s for step in run.steps])
    took = np.asarray([step.duration_us for step in run.steps])
    return dots(
        "the reference step, us, over seconds of measuring (grey: left out)",
        [
            Series(when[reference & kept], took[reference & kept], BLUE),
            Series(when[reference & ~kept], took[reference & ~kept], GREY),
        ],
    )


def _memory(run: StepRun, memory: Mapping[str, Any]) -> str:
    shapes, workspace_bytes = workspaces(run)
    error = memory["workspace_error"]
    always = [
        f"<tr><td>{escape(name.removesuffix('_bytes').replace('_', ' '))}</td><td>{value:,}</td></tr>"
        for name, value in memory["always"].items()
    ]
    phases = [
        f"<tr><td>phase {number}</td>" + "".join(f"<td>{phase[name]:,.1f}</td>" for name in STEP_TERMS) + "</tr>"
        for number, phase in enumerate(memory["workspace_phases"], start=1)
    ]
    return f"""{table(("always there", "bytes"), always)}
<p>Workspace of a step: the widest of the phases below. On steps that were not used: median error {error["median"]:.2%},
95th percentile {error["p95"]:.1%}.</p>
{table(("bytes", *(name.removesuffix("_bytes").replace("_", " ") for name in STEP_TERMS)), phases)}
{against("workspace, bytes", workspace_bytes, predict_workspace(memory, shapes))}"""
