"""A `model` profile from a run of timed steps: time and memory, errors on steps that were not used, what stayed unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.catalog.gpus import gpu as gpu_called
from sim.core.batch_shape import BatchShape
from sim.costs.profile_file import NORMAL_95

from .document import document
from .errors import CalibrationError
from .fit_memory import fit_memory
from .run_points import Points, eager_decode_us, points_of
from .split import SEED, error_summary, held_out_mask, interval
from .step_log import StepRun
from .step_model import TERMS, TOLD_APART, StepModel, dense_knots, fit_model, names, told_apart, weight_samples
from .step_tables import tables

LICENCE = "Apache-2.0"
"""Of what this project measures itself."""
FOLDS = 5
"""Parts of the steps, each predicted from the others."""
UNSURE = 0.5
"""A weight whose interval is wider than this, relatively, is said to be uncertain."""


def fit_run_profile(run: StepRun, *, date: str, command: str, gpu: str | None = None) -> dict[str, Any]:
    """The profile document. `gpu` names the device in the catalogue, where its product name does not.

    Raises: CalibrationError when there are too few steps to identify a term; ConfigError for an unknown GPU.
    """
    points = points_of(run)
    eager = eager_decode_us(run, points)
    device = _device(run, gpu)
    knots = dense_knots(max(shape.num_tokens for shape in points.shapes))
    model = fit_model(points.shapes, points.time_us, knots)
    draws = weight_samples(points.shapes, points.time_us, knots)
    drawn = _term_samples(model, draws, run.document["limits"])
    about, made = run.document["model"], run.document["settings"]
    limits = run.document["limits"]
    provenance = run.document["provenance"]
    kernels = f"triton {provenance['triton']}" if provenance["device"] == "cuda" else "torch twins of its kernels"
    engine = f"kvtwin executor {provenance['kvtwin_version']}, torch {provenance['torch']}, {kernels}"
    return document(
        name=f"{device}.{about['name']}.tp1",
        kind="model",
        gpu=device,
        model=about["name"],
        model_sizes={
            key: about[key] for key in ("num_layers", "hidden_size", "intermediate_size", "vocab_size", "attention")
        },
        tensor_parallel_size=1,
        dtype=made["dtype"],
        kv_cache_dtype=made["kv_cache_dtype"],
        terms=tables(model, limits["max_num_seqs"], limits["max_model_len"]),
        host={
            "step_us": 0.0,
            "seq_us": 0.0,
            **({} if eager is None else {"eager_decode_us": round(eager, 3)}),
            "origin": "not fitted apart: host time and gaps between kernels are in the constant of a measured step, in the dense term",
        },
        padded_sizes=[],
        range={
            "max_tokens": max(shape.num_tokens for shape in points.shapes),
            "max_seqs": max(shape.decode_seqs for shape in points.shapes),
            "max_context_tokens": max(shape.decode_max_context_tokens for shape in points.shapes),
        },
        error={**_errors(points), "end_to_end": "not yet judged end to end"},
        samples=drawn,
        drawn_terms=[_varying(tables(one, limits["max_num_seqs"], limits["max_model_len"])) for one in draws],
        intervals={term: interval(np.asarray(factors)) for term, factors in drawn.items()},
        weights={
            name: {
                "us": round(value, 5),
                "interval": _interval(value, [one.values[name] for one in draws], len(points.shapes)),
            }
            for name, value in model.values.items()
        },
        memory=fit_memory(points.shapes, points.workspace_bytes, run, engine=engine),
        quality=points.quality.as_dict(),
        identifiability=_notes(points, model, draws, run.document["memory"], eager),
        provenance={
            "source": f"measured by kvtwin's own executor, {len(run.steps)} steps in {run.spent_s:.0f} s",
            "licence": LICENCE,
            "engine": engine,
            "measured_on": provenance["device_name"],
            "measured_at": provenance["date"],
            "measured_with": provenance["command"],
            **{key: provenance.get(key) for key in ("driver", "cuda", "python", "threads")},
            "clock": "CUDA events" if provenance["device"] == "cuda" else made["clock"],
            "date": date,
            "command": command,
        },
    )


def _device(run: StepRun, gpu: str | None) -> str:
    """The catalogue's name of what was measured."""
    provenance = run.document["provenance"]
    if gpu is not None:
        return gpu_called(gpu).name
    if not provenance.get("gpu"):
        raise CalibrationError(
            f"{run.name} was measured on {provenance['device_name']}, which is not in the catalogue; say which GPU it is like with --gpu"
        )
    return str(provenance["gpu"])


def _errors(points: Points) -> dict[str, Any]:
    """Errors on a fifth of the steps and on two axes, none of which the model that is judged has seen."""
    held = held_out_mask(len(points.shapes))
    predicted = _predicted(points, ~held, held)
    measured = points.time_us[held]
    found: dict[str, Any] = {"held_out": error_summary(predicted, measured), "misfit": _misfit(points)}
    for kind in ("decode", "prefill", "mixed"):
        mine = points.kinds[held] == kind
        if mine.any():
            found[f"held_out_{kind}"] = error_summary(predicted[mine], measured[mine])
    sizes = {
        "decodes": np.asarray([shape.decode_seqs for shape in points.shapes]),
        "tokens": np.asarray([shape.num_tokens for shape in points.shapes]),
    }
    for name, size in sizes.items():
        half = int(size.max()) // 2
        beyond = size > half
        if 0 < beyond.sum() < len(points.shapes) // 2:
            inner = _predicted(points, ~beyond, beyond)
            found[f"held_out_axis: {name} > {half}"] = error_summary(inner, points.time_us[beyond])
    return found


def _misfit(points: Points) -> float:
    """What the model leaves of a step that it has not seen, beyond the noise of its own mean and of the fit: a standard deviation.

    Relative. Each fifth of the steps is predicted from the others. 0 where what is left is no more than chance makes of noise alone.
    Steps that stand out count as far off as all but 2 % are: one wild step says little of a run.
    """
    count = len(points.shapes)
    fold = np.random.default_rng(SEED).permutation(count) % FOLDS
    off = np.empty(count)
    for number in range(FOLDS):
        mine = fold == number
        off[mine] = np.log(points.time_us[mine] / _predicted(points, ~mine, mine))
    low, high = np.quantile(off, [0.01, 0.99])
    squares = np.clip(off, low, high) ** 2
    weights = len(names(dense_knots(max(shape.num_tokens for shape in points.shapes))))
    noise = float(np.mean(points.noise**2)) * (1 + weights / (count * (FOLDS - 1) / FOLDS))
    left = float(squares.mean()) - noise
    by_chance = 1.645 * noise * np.sqrt(2 / count)
    return round(float(np.sqrt(left)), 5) if left > by_chance else 0.0


def _varying(terms: dict[str, Any]) -> dict[str, Any]:
    """The tables of a draw that differ from one draw to the next."""
    kept = ("dense", "rows", "prefill", "decode", "mixed", "mixed_tile_us", "chunk_launch_us", "excess_token_us")
    return {name: terms[name] for name in kept}


def _predicted(points: Points, seen: npt.NDArray[np.bool_], asked: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    shapes = points.chosen(seen)
    knots = dense_knots(max(shape.num_tokens for shape in shapes))
    return fit_model(shapes, points.time_us[seen], knots).predict(points.chosen(asked))


def _term_samples(model: StepModel, draws: list[StepModel], limits: Mapping[str, int]) -> dict[str, list[float]]:
    """How far each table of the profile may be off at a middling step, as factors, one a draw. Draw k of one table and draw k of
    another come from the same steps: where one is too high because another is too low, both say so.
    """
    n, length, chunk = (
        max(2, limits[name] // 4) for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens")
    )
    decode = BatchShape(
        decode_seqs=n, decode_context_tokens=n * length, decode_max_context_tokens=length, sampled_seqs=n
    )
    prefill = BatchShape(prefill=((chunk, length),), sampled_seqs=1)
    tables = {
        "dense": (prefill, ("step", "dense")),
        "rows": (decode, ("sample_launch", "rows")),
        "prefill": (prefill, tuple(name for name in TERMS if name.startswith("chunk"))),
        "decode": (decode, tuple(name for name in TERMS if name.startswith("decode"))),
    }

    def of(one: StepModel, shape: BatchShape, parts: tuple[str, ...]) -> float:
        found = one.parts([shape])
        return float(sum(found[part][0] for part in parts))

    found = {}
    for name, (shape, parts) in tables.items():
        here = of(model, shape, parts)
        found[name] = [round(of(one, shape, parts) / here, 4) if here else 1.0 for one in draws]
    return {**found, "mixed": found["decode"]}


def _interval(value: float, drawn: list[float], steps: int) -> list[float]:
    """The 95 % interval of a weight, relative to it; in microseconds around 0 for one that is 0.

    By the standard deviation of its draws: with so few of them the outermost are too near (in the self-test they hold 88 %).
    """
    half = NORMAL_95 * float(np.std(drawn, ddof=1)) * float(np.sqrt(steps / (steps - len(TERMS))))
    return [round(max(-1.0, -half / value), 5), round(half / value, 5)] if value > 0 else [0.0, round(half, 5)]


def _notes(
    points: Points, model: StepModel, draws: list[StepModel], memory: Mapping[str, Any], eager: float | None
) -> list[str]:
    """What the steps cannot tell, and what a reader must know."""
    notes = list(points.quality.flags)
    for name, (share, partner) in told_apart(points.shapes, points.time_us, model.knots).items():
        spread = np.asarray([one.values[name] for one in draws])
        low, high = (float(value) for value in np.quantile(spread, [0.025, 0.975]))
        if share == 0.0 and not partner:
            notes.append(f"{name}: not measured, no step has it; its weight is 0")
        elif share < TOLD_APART:
            notes.append(
                f"{name}: not told apart from {partner} and others, which make up all but {share:.1%} of it; their sum is known, "
                f"its share is not ({low:.3g} to {high:.3g} us)"
            )
        elif model.values[name] > 0 and high - low > UNSURE * model.values[name]:
            notes.append(f"{name}: {model.values[name]:.3g} us, uncertain ({low:.3g} to {high:.3g} us)")
    if (points.served_by == "eager").all():
        notes.append("steps were run eagerly, one kernel after another: there is no CUDA graph in these terms")
    else:
        notes.append(
            "decodes were served by captured graphs, steps with prompt chunks eagerly: the gap between the two is in chunk_launch; "
            "padding to the sizes of graphs is not told apart from the work"
        )
    if eager is not None:
        notes.append(
            f"without its graph a decode step takes {eager:.0f} us longer, the median of corners that were timed both ways"
        )
    if "by_limits" not in memory:
        notes.append(
            "the run says nothing of memory under other limits (an earlier kvtwin measured it): no memory lines for the account"
        )
    notes.append(
        "decodes and prompt chunks of a step run one after the other in this executor: their attention is added"
    )
    return notes
