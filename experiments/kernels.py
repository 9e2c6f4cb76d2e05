"""`kvtwin kernels`: compile every Triton kernel for a GPU that need not be there; with `--bench`, time them on one that is."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.catalog.naming import unknown
from sim.core.config import ConfigError

from .terminal import Progress, number, print_json, say

if TYPE_CHECKING:
    from gpu.bench import Timing
    from gpu.compile_check import CompileReport
    from gpu.decode_account import DecodeAccount

ALL = ("sm_80", "sm_90", "sm_100")
"""What `--target all` stands for: A100, H100 and H200, B200."""
DECODE_KERNEL = "decode_attention[bf16,128,4,split]"
"""The kernel of the catalogue whose shapes are looked at."""


def kernels(
    target: str = "sm_90",
    *,
    only: str | None = None,
    bench: bool = False,
    json: bool = False,
    data_dir: Path | None = None,
) -> int:
    """Compile and print; 0 when every kernel keeps its budget, 1 when one does not.

    Args:
        target: a key of `gpu.compile_check.TARGETS`, or `all`.
        only: compile only kernels whose name contains this.
        bench: time the kernels on this machine's GPU too.
        json: one JSON document instead of the tables.
        data_dir: where published timings are looked for; KVTWIN_DATA when None.

    Raises:
        ConfigError: an unknown target or kernel, no torch or triton, or `bench` without a GPU.
    """
    targets = _targets(target)
    timed: dict[str, Any] | None = _bench(data_dir) if bench else None
    reports = compile_all(targets, only)
    if json:
        document: dict[str, Any] = {
            "kernels": [report.as_json() for report in reports],
            "decode_shapes": [each.as_json() for each in _decode_shapes(reports)],
            **_versions(),
        }
        print_json(document | ({} if timed is None else {"bench": timed}))
    else:
        say(as_text(reports))
        if timed is not None:
            say(bench_text(timed))
    return 0 if all(report.ok for report in reports) else 1


def compile_all(targets: Sequence[str], only: str | None = None) -> list[CompileReport]:
    """Compile the catalogue for each target.

    Raises:
        ConfigError: no kernel is called so; torch or triton is missing.
    """
    catalogue = _needs_gpu_extra("gpu.kernels.catalogue").CATALOGUE
    compile_launch = _needs_gpu_extra("gpu.compile_check").compile_launch
    chosen = [name for name in catalogue if only is None or only in name]
    if only is not None and not chosen:
        raise unknown("kernel", only, {name.partition("[")[0] for name in catalogue})
    reports: list[CompileReport] = []
    with Progress("compiling") as progress:
        for target in targets:
            for name in chosen:
                make, budget = catalogue[name]
                progress.say(f"{name} for {target}")
                try:
                    reports.append(compile_launch(name, make(), target, budget))
                except RuntimeError as error:
                    if os.environ.get("TRITON_INTERPRET") == "1":
                        raise ConfigError(str(error)) from error
                    raise
    return reports


def _targets(target: str) -> tuple[str, ...]:
    if target == "all":
        return ALL
    known = _needs_gpu_extra("gpu.compile_check").TARGETS
    if target not in known:
        raise unknown("target", target, [*known, "all"])
    return (target,)


def _needs_gpu_extra(module: str) -> Any:
    """A module of `gpu` that imports torch and triton.

    Raises:
        ConfigError: they are not installed; says how to install them.
    """
    from gpu.require import MissingExtraError, require

    try:
        for name in ("torch", "triton"):
            require(name, "kvtwin kernels")
    except MissingExtraError as error:
        raise ConfigError(str(error)) from error
    return importlib.import_module(module)


def _versions() -> dict[str, str]:
    return {name: str(importlib.import_module(name).__version__) for name in ("torch", "triton")}


def as_text(reports: Sequence[CompileReport]) -> str:
    """The reports as a table."""
    width = max(len(report.name) for report in reports) + 2
    head = f"{'kernel':<{width}}{'target':<8}{'registers':>10}{'spilled B':>11}{'shared B':>10}{'vector B':>10}  budget"
    lines = [head]
    for report in reports:
        found = report.resources
        lines.append(
            f"{report.name:<{width}}{report.target:<8}{found.registers:>10}{found.stack_bytes:>11}"
            f"{number(report.shared_bytes):>10}{found.vector_bytes:>10}  {'kept' if report.ok else '; '.join(report.problems)}"
        )
    broken = sum(not report.ok for report in reports)
    verdict = "all keep their budgets" if not broken else f"{broken} of {len(reports)} do not keep their budgets"
    return "\n".join([*lines, *_account_lines(reports, width), "", f"{len(reports)} compiled: {verdict}"])


def _account_lines(reports: Sequence[CompileReport], width: int) -> list[str]:
    """The bandwidth account of each kernel, and of decode attention at the shapes that it is timed at."""
    from gpu.bandwidth import LATENCY_NS

    lines = [
        "",
        f"computed from the code, not measured; share of the card's bandwidth at an assumed latency of {LATENCY_NS} ns",
        f"{'kernel':<{width}}{'card':<20}{'per SM':>7}  {'held by':<14}{'in flight':>10}{'hides ns':>10}"
        f"{'issues GB/s':>13}{'share':>8}{'programs':>10}{'waves':>8}",
    ]
    for report in reports:
        found = report.account
        lines.append(
            f"{report.name:<{width}}{found.gpu.name:<20}{found.fits.programs:>7}  {found.fits.held_by:<14}"
            f"{found.in_flight_bytes / 1024:>6.0f} KiB{number(round(found.hidden_ns)):>10}"
            f"{number(round(found.issued_bytes_per_s / 1e9)):>13}{found.sustained_share:>8.0%}"
            f"{number(found.programs):>10}{found.waves:>8.2f}"
        )
    shapes = _decode_shapes(reports)
    if shapes:
        title = "decode attention, bf16, 32/8 heads of 128"
        head = f"{title:<{width}}{'card':<20}{'splits':>7}{'programs':>10}{'waves':>8}{'merge':>10}{'share':>8}"
        lines += ["", head]
    for each in shapes:
        lines.append(
            f"{f'{each.batch_size} x {each.context_tokens}':<{width}}{each.gpu.name:<20}{each.num_splits:>7}{number(each.programs):>10}"
            f"{each.programs / each.slots:>8.2f}{each.merge_bytes / 2**20:>6.1f} MiB{each.busy_share:>8.1%}"
        )
    return lines


def _decode_shapes(reports: Sequence[CompileReport]) -> list[DecodeAccount]:
    """The shapes, for every target for which the decode kernel that serves them was compiled."""
    from gpu.decode_account import decode_accounts

    return [each for report in reports if report.name == DECODE_KERNEL for each in decode_accounts(report.account)]


# -- on a GPU -----------------------------------------------------------------------------------------------------------


def _bench(data_dir: Path | None) -> dict[str, Any]:
    """Time the kernels on this machine's GPU and set published figures beside them."""
    measure = _needs_gpu_extra("gpu.bench")
    try:
        where = measure.provenance()
    except measure.NoDeviceError as error:
        raise ConfigError(
            f"--bench needs a CUDA device: {error}; without one, leave --bench out to compile the kernels only"
        ) from error
    published, why_not = published_times(data_dir, where["device"])
    rows: list[dict[str, Any]] = []
    with Progress("timing") as progress:
        for timing in measure.run():
            progress.say(timing.name)
            rows.append(timing_row(timing, published))
    return {"provenance": where, "timings": rows, "published_note": why_not}


def timing_row(timing: Timing, published: Any) -> dict[str, Any]:
    """A timing as JSON values; `published` as `published_times` gives it."""
    row = {
        "name": timing.name,
        "microseconds": timing.microseconds,
        "gb_per_s": timing.bytes_per_s / 1e9,
        "copy_share": timing.copy_share,
    }
    if timing.relative_error is not None:
        row["relative_error"] = timing.relative_error
    beside = published(timing.batch_size, timing.context_tokens, "bfloat16") if timing.batch_size else None
    if beside is not None:
        row |= {"published_microseconds": beside.microseconds, "published_source": beside.source}
    return row


def published_times(data_dir: Path | None, device: str) -> tuple[Any, str]:
    """A function that finds the published timing of a decode, and why there may be none."""
    from gpu.published import decode_times, few_decode_times, nearest

    folder = data_dir or (Path(os.environ["KVTWIN_DATA"]) if os.environ.get("KVTWIN_DATA") else None)
    times, why_not = few_decode_times(device), "set KVTWIN_DATA to see published figures of more shapes and devices"
    if folder is not None:
        found, why_not = decode_times(folder, device)
        times = found or times
    return (lambda *shape: nearest(times, *shape)), why_not


def bench_text(timed: dict[str, Any]) -> str:
    """The timings as a table."""
    where = timed["provenance"]
    width = max(len(row["name"]) for row in timed["timings"]) + 2
    lines = [
        "",
        f"measured on {where['device']}, torch {where['torch']}, triton {where['triton']}, CUDA {where['cuda']}",
        f"{'kernel':<{width}}{'µs':>10}{'GB/s':>10}{'of copy':>9}{'published µs':>14}",
    ]
    for row in timed["timings"]:
        beside = number(row.get("published_microseconds"))
        lines.append(
            f"{row['name']:<{width}}{row['microseconds']:>10.1f}{row['gb_per_s']:>10.0f}{row['copy_share']:>9.1%}{beside:>14}"
        )
    sources = sorted({row["published_source"] for row in timed["timings"] if "published_source" in row})
    lines += [f"published: {source}" for source in sources]
    return "\n".join([*lines, *([f"note: {timed['published_note']}"] if timed["published_note"] else [])])
