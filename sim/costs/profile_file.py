"""Profile files: what a calibration found out about a GPU, as one JSON document with its provenance, error and range.

Two kinds. A `model` profile holds the terms of a step for one model on one GPU, as measured with that model. A `gpu`
profile holds kernel terms, from which the terms of any model are put together (`sim.costs.compose`). Times are in
microseconds (`us`), as their sources have them, and become seconds when read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.core.config import ConfigError

from .piecewise import Field, Grid, Line
from .profile_check import check_profile
from .terms import StepTerms

COLLECTIVES_PER_LAYER = 2
_US = 1e-6
GAP_FACTOR = 2.0
"""By which a gap between kernels may be off either way, 95 %, where a profile states no such factor: it is one published figure, of one
card. Stated, not fitted."""
NORMAL_95 = 1.959964
"""Standard deviations to either end of a normal distribution's central 95 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFile:
    """A profile file, read and checked, not yet applied to a model."""

    name: str
    """How reports call it."""
    kind: str
    """`model` or `gpu`."""
    gpu: str
    """The GPU it was measured on, by its name in the catalogue."""
    model: str | None
    """The model of a `model` profile."""
    tensor_parallel_size: int
    """Ranks of a `model` profile."""
    data: Mapping[str, Any]
    """The whole document."""
    where: str
    """Path, for messages."""

    @property
    def origin(self) -> str:
        """One sentence on where its numbers come from and how good they are."""
        provenance, error = self.data["provenance"], self.data["error"]
        median = error["held_out"]["median"]
        known = "of unknown error" if median is None else f"known to {median:.1%} (median on held-out points)"
        return (
            f"step times come from profile {self.name} ({provenance['source']}; {provenance['engine']}; {provenance['licence']}): "
            f"{known}; {error['end_to_end']}"
        )

    def host_s(self) -> dict[str, Any]:
        """Time a step, a sequence and a token beyond the kernels, by the names of `StepTerms`."""
        host = self.data["host"]
        return {f"{one}_s": float(host.get(f"{one}_us", 0.0)) * _US for one in ("step", "seq", "token")}

    def gap_s(self, num_layers: int, ranks: int) -> float:
        """All gaps between the kernels of a step of a model with so many layers; 0 where none is stated."""
        return self._kernels(num_layers, ranks) * float(self.data["host"].get("kernel_gap_us", 0.0)) * _US

    def eager_s(self, num_layers: int, ranks: int) -> float:
        """What the host takes to launch the kernels of a step one by one; 0 where that is not known."""
        return self._kernels(num_layers, ranks) * float(self.data.get("kernels", {}).get("eager_call_us", 0.0)) * _US

    def _kernels(self, num_layers: int, ranks: int) -> float:
        host = self.data["host"]
        layer = float(host.get("kernels_per_layer", 0)) + (COLLECTIVES_PER_LAYER if ranks > 1 else 0)
        return float(host.get("kernels_per_step", 0)) + num_layers * layer


def read_profile(path: Path) -> ProfileFile:
    """The profile in `path`.

    Raises: ConfigError when it is no profile or `check_profile` refuses it; OSError.
    """
    where = str(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not a profile: {error}") from error
    check_profile(data, where)
    return ProfileFile(
        name=str(data["name"]),
        kind=data["kind"],
        gpu=str(data["gpu"]),
        model=data.get("model"),
        tensor_parallel_size=int(data.get("tensor_parallel_size", 1)),
        data=data,
        where=where,
    )


def model_terms(profile: ProfileFile, num_layers: int, *, copy_block_s: float, swap_block_s: float) -> StepTerms:
    """The terms of a `model` profile; the times are for profiles that do not hold them, as those from kernel tables.

    Raises: ConfigError for a missing or malformed term.
    """
    terms, limits = profile.data["terms"], profile.data["range"]
    try:
        return StepTerms(
            **tables_of(terms),
            all_reduce=line(terms["all_reduce"], "tokens") if terms.get("all_reduce") else None,
            overlap=line(terms["overlap"], "tiles", "exponent"),
            mixed_ratio=ratio(terms.get("mixed_ratio")),
            wave_tiles=float(terms.get("wave_tiles", 0.0)),
            decode_skew=line(terms["decode_skew"], "seqs", "share"),
            mixed_skew=line(terms["mixed_skew"], "seqs", "share"),
            gap_s=profile.gap_s(num_layers, profile.tensor_parallel_size),
            **profile.host_s(),
            samples=samples(profile),
            drawn=_drawn(profile.data),
            spreads=spreads(profile),
            host_samples=host_samples(profile),
            padded_sizes=tuple(int(size) for size in profile.data.get("padded_sizes", ())),
            max_tokens=int(limits["max_tokens"]),
            max_seqs=int(limits["max_seqs"]),
            max_context_tokens=int(limits["max_context_tokens"]),
            copy_block_s=_measured_s(terms, "copy_block_us", copy_block_s),
            swap_block_s=_measured_s(terms, "swap_block_us", swap_block_s),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{profile.where}: a term is missing or malformed: {type(error).__name__} {error}") from error


def tables_of(terms: Mapping[str, Any]) -> dict[str, Any]:
    """The tables and times of a document's terms, by their names in `StepTerms`, in seconds."""
    return {
        "dense": line(terms["dense"], "tokens"),
        "rows": line(terms["rows"], "rows"),
        "prefill": grid(terms["prefill"], "chunk", "context"),
        "decode": grid(terms["decode"], "seqs", "context"),
        "mixed": grid(terms["mixed"], "seqs", "context"),
        "mixed_tile_s": float(terms["mixed_tile_us"]) * _US,
        "chunk_launch_s": float(terms["chunk_launch_us"]) * _US,
        "excess_token_s": _measured_s(terms, "excess_token_us", 0.0),
    }


def _drawn(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The draws of all tables, each of which can be read."""
    found = tuple(data.get("drawn_terms", ()))
    for draw in found:
        tables_of(draw)
    return found


def _measured_s(terms: Mapping[str, Any], name: str, otherwise_s: float) -> float:
    """A time of the profile in seconds, where it was measured."""
    return float(terms[name]) * _US if name in terms else otherwise_s


def samples(profile: ProfileFile, gemm: str = "dense") -> dict[str, tuple[float, ...]]:
    """Draws of how far each term may be off. `gemm` is the file's name of what stands for the dense term."""
    found = {name: tuple(map(float, drawn)) for name, drawn in profile.data.get("samples", {}).items()}
    whole = found.get("step")  # times of whole steps: their parts are off together
    named = {
        "dense": found.get(gemm, whole),
        "rows": found.get("rows", found.get(gemm, whole)),
        "prefill": found.get("prefill", whole),
        "decode": found.get("decode", whole),
        "mixed": found.get("mixed", found.get("decode", whole)),
    }
    return {name: drawn for name, drawn in named.items() if drawn}


def spreads(profile: ProfileFile) -> dict[str, float]:
    """What is uncertain of whole steps and of stated constants, as `StepTerms.spreads`; without what is not.

    Raises: ConfigError for a spread that is none.
    """
    found = {"step": profile.data["error"].get("misfit", 0.0)}
    if float(profile.data["host"].get("kernel_gap_us", 0.0)) > 0:
        found["gap"] = math.log(float(profile.data["host"].get("kernel_gap_factor", GAP_FACTOR))) / NORMAL_95
    for name, value in found.items():
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ConfigError(
                f"{profile.where}: the spread of its {name} is {value!r}; it is a finite number, at least 0"
            )
    return {name: float(value) for name, value in found.items() if value}


def host_samples(profile: ProfileFile) -> tuple[tuple[float, float, float], ...]:
    """Draws of the host times that were fitted to a run, in seconds."""
    host, names = profile.data["host"], ("step", "seq", "token")
    drawn = {name: host.get("samples", {}).get(f"{name}_us") for name in names}
    if not any(drawn.values()):
        return ()
    count = max(len(column) for column in drawn.values() if column)
    columns = [drawn[name] or [host.get(f"{name}_us", 0.0)] * count for name in names]
    return tuple(
        (float(step) * _US, float(seq) * _US, float(token) * _US) for step, seq, token in zip(*columns, strict=True)
    )


def line(table: Mapping[str, Any], x: str, y: str = "us") -> Line:
    """A table over `x`; times become seconds, shares stay."""
    unit = _US if y == "us" else 1.0
    return Line(tuple(map(float, table[x])), tuple(float(value) * unit for value in table[y]))


def grid(table: Mapping[str, Any], x: str, y: str) -> Grid:
    """A table of times over `x` and `y`, in seconds."""
    rows = tuple(tuple(float(value) * _US for value in row) for row in table["us"])
    return Grid(tuple(map(float, table[x])), tuple(map(float, table[y])), rows)


def ratio(table: Mapping[str, Any] | None) -> Field | None:
    """The factor on steps with chunks and decodes, or None without one."""
    if table is None:
        return None
    axes = tuple(tuple(map(float, table[name])) for name in ("tokens", "context", "seqs", "kv"))
    return Field(axes, tuple(float(value) for row in table["ratio"] for value in row))
