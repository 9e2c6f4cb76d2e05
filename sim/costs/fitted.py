"""The library of profiles: finding one by name, by file, or as the nearest to a model and a GPU, and applying it."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

from sim.catalog.gpus import GPUS, Gpu
from sim.catalog.gpus import gpu as gpu_called
from sim.catalog.host import HOST
from sim.catalog.models import model_shape
from sim.catalog.shape import ModelShape
from sim.core.config import ConfigError

from .compose import composed_terms
from .efficiency import RooflineEfficiency
from .piecewise import Grid
from .profile import FittedProfile
from .profile_file import ProfileFile, model_terms, read_profile
from .terms import StepTerms

FOLDER = Path(__file__).resolve().parents[2] / "calibration" / "profiles"
"""Where the profiles that come with kvtwin are."""
AUTO = "auto"


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that come with kvtwin."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def fitted_cost(
    chosen: str,
    model: ModelShape,
    device: Gpu,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    dtype: str = "auto",
    quantization: str | None = "auto",
    kv_cache_dtype: str = "auto",
    block_size: int = 16,
    block_bytes: int | None = None,
    enforce_eager: bool = False,
) -> FittedProfile:
    """The cost model of `model` on `device` from profile `chosen`: `auto`, a name of the library, or a file.

    `enforce_eager` is without CUDA graphs: no step is padded, and the host launches every kernel, which takes the device's time or
    longer (the caller lets them overlap).

    Raises: ConfigError when there is no such profile, or it cannot price this model; OSError.
    """
    if pipeline_parallel_size > 1:
        raise ConfigError("fitted profiles do not know pipeline parallelism; use --profile roofline")
    model.check_parallel(tensor_parallel_size)
    quantized = model.quantization if quantization == "auto" else quantization
    quantized = None if quantized in (None, "none") else quantized
    computed = device.usable_dtype(model.dtype, dtype, [])
    notes: list[str] = []
    profile = _chosen(chosen, model, device, tensor_parallel_size, quantized, notes)
    if block_bytes is None:
        block_bytes = model.kv_bytes_per_token(kv_cache_dtype, tensor_parallel_size, dtype=computed) * block_size
    costs = _block_costs(block_bytes, device)
    kv_dtype = kv_cache_dtype if kv_cache_dtype != "auto" else computed
    if profile.kind == "model":
        _check_model_profile(profile, model, tensor_parallel_size, quantized, kv_dtype)
        terms = model_terms(profile, model.num_layers, **costs)
    else:
        try:
            terms = composed_terms(
                profile,
                model,
                gpu_called(profile.gpu),
                tensor_parallel_size=tensor_parallel_size,
                quantization=quantized,
                kv_cache_dtype=kv_dtype,
                notes=notes,
                **costs,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{profile.where}: a kernel term is missing or malformed: {type(error).__name__} {error}"
            ) from error
        notes.append(f"{model.name} is composed from the kernel terms of {profile.gpu}, not measured as a whole")
    if enforce_eager:
        terms = _eager(profile, terms, model.num_layers, tensor_parallel_size, notes)
    if profile.gpu != device.name:
        notes.append(
            f"profile {profile.name} was measured on {profile.gpu}, not on {device.name}: {_how_far(profile.gpu, device)}"
        )
    return FittedProfile(terms, name=f"{profile.kind}:{profile.name}", notes=(profile.origin, *notes))


def _eager(profile: ProfileFile, terms: StepTerms, layers: int, ranks: int, notes: list[str]) -> StepTerms:
    """The terms without CUDA graphs: no step is padded, and launching takes what it was found to take; appends to `notes` what that is."""
    terms = replace(terms, padded_sizes=())
    longer_s = float(profile.data["host"].get("eager_decode_us", 0.0)) * 1e-6
    if longer_s:
        notes.append(f"no CUDA graphs: a decode step takes {longer_s * 1e3:.2f} ms longer, as timed both ways")
        rows = tuple(tuple(value + longer_s for value in row) for row in terms.decode.z)
        return replace(terms, decode=Grid(terms.decode.x, terms.decode.y, rows), drawn=())
    launch_s = profile.eager_s(layers, ranks)
    notes.append(
        f"no CUDA graphs: the host takes {launch_s * 1e3:.1f} ms to launch a step"
        if launch_s
        else "no CUDA graphs: what the host takes to launch a step is not in this profile, and is left out"
    )
    return replace(terms, step_s=terms.step_s + launch_s)


def chosen_profile(chosen: str, model: ModelShape, device: Gpu, tensor_parallel_size: int) -> ProfileFile:
    """The file that `fitted_cost` would take. Raises: ConfigError, OSError."""
    quantized = None if model.quantization in (None, "none") else model.quantization
    return _chosen(chosen, model, device, tensor_parallel_size, quantized, [])


def memory_profile(chosen: str, model: ModelShape, device: Gpu, tensor_parallel_size: int) -> ProfileFile | None:
    """The file whose memory lines an account may use: the one that is named, or with `auto` the one of this very model and device.

    None where there is none. Raises: ConfigError as `read_profile`; OSError.
    """
    if chosen == AUTO:
        names = [name for name in profile_names() if name.startswith(f"{device.name}.")]
        for profile in (read_profile(FOLDER / f"{name}.json") for name in names):
            if profile.tensor_parallel_size == tensor_parallel_size and _is(profile, model):
                return profile
        return None
    if chosen in profile_names():
        return read_profile(FOLDER / f"{chosen}.json")
    return read_profile(Path(chosen)) if Path(chosen).is_file() else None


def _chosen(
    chosen: str, model: ModelShape, device: Gpu, tp: int, quantized: str | None, notes: list[str]
) -> ProfileFile:
    if chosen == AUTO:
        return nearest_profile(model, device, tp, quantized, notes)
    if chosen in profile_names():
        return read_profile(FOLDER / f"{chosen}.json")
    path = Path(chosen)
    if path.is_file():
        return read_profile(path)
    known = ", ".join(("roofline", AUTO, *profile_names()))
    raise ConfigError(f"profile is {chosen!r}, which is neither a file nor one of {known}")


def nearest_profile(model: ModelShape, device: Gpu, tp: int, quantized: str | None, notes: list[str]) -> ProfileFile:
    """The profile of this very model on this GPU, or else the kernel terms of this GPU, or else of the GPU most like it.

    Appends to `notes` how far away it is. Raises: ConfigError when the library is empty.
    """
    profiles = [read_profile(FOLDER / f"{name}.json") for name in profile_names()]
    for profile in profiles:
        if (
            (profile.gpu, profile.tensor_parallel_size) == (device.name, tp)
            and quantized is None
            and _is(profile, model)
        ):
            notes.append(f"profile auto: {profile.name}, fitted to this model on this GPU")
            return profile
    kernels = [profile for profile in profiles if profile.kind == "gpu"]
    if device.name == HOST.name:
        raise ConfigError(
            f"no profile of the CPU is of {model.name}; measure it: kvtwin calibrate measure --device cpu --model {model.name}"
        )
    if not kernels:
        raise ConfigError(f"no profiles are installed in {FOLDER}; use --profile roofline")
    best = min(kernels, key=lambda profile: (_distance(GPUS[profile.gpu], device), profile.name))
    if best.gpu == device.name:
        notes.append(f"profile auto: {best.name}, the kernel terms of this GPU")
    else:
        notes.append(f"profile auto: no profile of {device.name}; the nearest is {best.name}")
    return best


def _check_model_profile(
    profile: ProfileFile, model: ModelShape, tp: int, quantized: str | None, kv_dtype: str
) -> None:
    """Raise ConfigError unless this very configuration was measured."""
    here = (profile.tensor_parallel_size, str(profile.data.get("kv_cache_dtype", "bfloat16")))
    if not _is(profile, model) or quantized is not None or here != (tp, kv_dtype):
        wanted = f"{model.name}, {tp} rank(s), {quantized or 'unquantised'} weights, {kv_dtype} KV"
        raise ConfigError(
            f"profile {profile.name} was fitted to {profile.model} on {here[0]} rank(s) with {here[1]} KV and cannot price {wanted}; "
            "use --profile auto or roofline"
        )


def _is(profile: ProfileFile, model: ModelShape) -> bool:
    """Whether a profile's tables are those of `model`: the same sizes, whatever the name."""
    if profile.model is None:
        return False
    measured = profile.data.get("model_sizes")
    if measured is not None:
        attention = [asdict(kind) for kind in model.attention]
        return model.moe is None and measured == {
            **{key: getattr(model, key, None) for key in measured},
            "attention": attention,
        }
    fitted = model_shape(profile.model)
    sizes = ("num_layers", "hidden_size", "intermediate_size", "vocab_size", "attention", "moe")
    return all(getattr(fitted, size) == getattr(model, size) for size in sizes)


def _distance(a: Gpu, b: Gpu) -> float:
    """How unlike two GPUs are: logarithms of the ratios of bandwidth and of matrix rate, added."""
    return abs(math.log(a.memory_bandwidth_bytes_per_s / b.memory_bandwidth_bytes_per_s)) + abs(
        math.log(a.bf16_flops_per_s / b.bf16_flops_per_s)
    )


def _how_far(name: str, device: Gpu) -> str:
    if HOST.name in (name, device.name):
        return "one is a GPU and the other is not, and prices are not scaled"
    other = GPUS[name]
    bandwidth = device.memory_bandwidth_bytes_per_s / other.memory_bandwidth_bytes_per_s
    rate = device.bf16_flops_per_s / other.bf16_flops_per_s
    return (
        f"{device.name} has {bandwidth:.2f} times its memory bandwidth and {rate:.2f} times its matrix rate, and prices are not "
        "scaled; the roofline may be nearer"
    )


def _block_costs(block_bytes: int, device: Gpu) -> dict[str, float]:
    """Copying and swapping one block, from the data sheet: no profile holds them."""
    share = RooflineEfficiency()
    return {
        "copy_block_s": 2 * block_bytes / (device.memory_bandwidth_bytes_per_s * share.memory),
        "swap_block_s": block_bytes / (device.pcie_bytes_per_s * share.link),
    }
