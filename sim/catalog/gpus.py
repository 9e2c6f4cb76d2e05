"""The catalogue of GPUs: memory as the driver reports it, bandwidth, peak rates, links.

Two memory figures differ and both matter: the nominal one that names the product, and the physical total that CUDA
reports and engines budget with (79.19 GiB on an "80 GB" H100). Rates are dense peaks from data sheets, without
sparsity; what an engine reaches is the cost model's matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.core.config import ConfigError

from .dtypes import dtype_name
from .naming import look_up

GIB = 1 << 30
"""Bytes in a GiB."""
_TERA = 10**12
_GIGA = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    name: str
    """Canonical name, e.g. `h100-sxm-80gb`."""
    architecture: str
    """Generation, e.g. `hopper`."""
    compute_capability: tuple[int, int]
    """CUDA compute capability, e.g. (9, 0); for AMD the major and minor number of the gfx target."""
    nominal_gb: int
    """Memory in the product's name."""
    total_bytes: int
    """Physical total that CUDA reports, the figure engines budget with."""
    memory_bandwidth_bytes_per_s: int
    """Peak of the GPU's own memory."""
    bf16_flops_per_s: int
    """Dense peak of the matrix units in 16 bits with 32-bit accumulation; float16 on a GPU without bfloat16."""
    fp8_flops_per_s: int | None
    """Dense peak in 8-bit floats; None without hardware for it."""
    int8_ops_per_s: int | None
    """Dense peak in 8-bit integers."""
    sm_count: int
    """Streaming multiprocessors (compute units on AMD)."""
    l2_cache_bytes: int
    """Size of the last cache before the memory."""
    link: str
    """What joins the GPUs of one host: `nvlink`, `infinity-fabric` or `pcie`."""
    link_bytes_per_s: int
    """Peak of that link, in one direction, per GPU."""
    pcie_bytes_per_s: int
    """Peak of the way to the host, in one direction."""
    has_bf16: bool = True
    """False where engines fall back to float16."""
    workstation: bool = False
    """A GeForce or RTX card, that usually also drives a desktop's software stack."""
    source: str
    """Where rates and sizes were read."""
    unverified: tuple[str, ...] = ()
    """Fields not confirmed by a public log or a data sheet."""
    nominal: bool = False
    """True where its figures are those of no machine: the CPU as a device."""

    @property
    def total_gib(self) -> float:
        """Physical total in GiB."""
        return self.total_bytes / GIB

    def usable_dtype(self, model_dtype: str, dtype: str, warnings: list[str]) -> str:
        """The dtype an engine computes in here: `auto` is the model's, or float16 where there is no bfloat16.

        Appends a sentence to `warnings` when it had to choose.

        Raises:
            ConfigError: bfloat16 was asked for on a GPU without it, or no such dtype.
        """
        wanted = model_dtype if dtype == "auto" else dtype_name(dtype)
        if wanted != "bfloat16" or self.has_bf16:
            return wanted
        if dtype == "auto":
            warnings.append(f"{self.name} has no bfloat16: the model runs in float16")
            return "float16"
        major, minor = self.compute_capability
        raise ConfigError(
            f"dtype bfloat16 is not supported by {self.name} (compute capability {major}.{minor}); use --dtype float16"
        )


def _gpu(
    name: str, architecture: str, capability: tuple[int, int], nominal_gb: int, total_gib: float, bandwidth_gb_per_s: float,
    bf16_tera: float, fp8_tera: float | None, int8_tera: float | None, sms: int, l2_mib: float,
    link: str, link_gb_per_s: float, pcie_gb_per_s: float, source: str,
    *, bf16: bool = True, workstation: bool = False, unverified: tuple[str, ...] = (),
) -> Gpu:  # fmt: skip
    """An entry, in the units of data sheets."""
    return Gpu(
        name=name, architecture=architecture, compute_capability=capability, nominal_gb=nominal_gb,
        total_bytes=round(total_gib * GIB), memory_bandwidth_bytes_per_s=round(bandwidth_gb_per_s * _GIGA),
        bf16_flops_per_s=round(bf16_tera * _TERA),
        fp8_flops_per_s=None if fp8_tera is None else round(fp8_tera * _TERA),
        int8_ops_per_s=None if int8_tera is None else round(int8_tera * _TERA),
        sm_count=sms, l2_cache_bytes=round(l2_mib * (1 << 20)), link=link, link_bytes_per_s=round(link_gb_per_s * _GIGA),
        pcie_bytes_per_s=round(pcie_gb_per_s * _GIGA), has_bf16=bf16, workstation=workstation,
        source=source, unverified=unverified,
    )  # fmt: skip


# Totals: read off public start-up logs and out-of-memory messages, unless marked. Rates: the data sheet named.
# Columns: nominal GB, total GiB, GB/s | bf16, fp8, int8 Tera/s, dense | SMs, L2 MiB | link, GB/s, PCIe GB/s.
# fmt: off
_ENTRIES = (
    _gpu("a100-sxm-40gb", "ampere", (8, 0), 40, 39.38, 1555, 312, None, 624, 108, 40, "nvlink", 300, 32,
         "NVIDIA A100 data sheet"),
    _gpu("a100-sxm-80gb", "ampere", (8, 0), 80, 79.25, 2039, 312, None, 624, 108, 40, "nvlink", 300, 32,
         "NVIDIA A100 80GB data sheet"),
    _gpu("a100-pcie-80gb", "ampere", (8, 0), 80, 79.25, 1935, 312, None, 624, 108, 40, "pcie", 32, 32,
         "NVIDIA A100 80GB data sheet"),
    _gpu("h100-sxm-80gb", "hopper", (9, 0), 80, 79.19, 3350, 989, 1979, 1979, 132, 50, "nvlink", 450, 64,
         "NVIDIA H100 data sheet"),
    _gpu("h100-pcie-80gb", "hopper", (9, 0), 80, 79.19, 2000, 756, 1513, 1513, 114, 50, "pcie", 64, 64,
         "NVIDIA H100 data sheet"),
    _gpu("h100-nvl-94gb", "hopper", (9, 0), 94, 93.11, 3938, 835, 1671, 1671, 132, 60, "nvlink", 300, 64,
         "NVIDIA H100 NVL product brief", unverified=("total_bytes", "l2_cache_bytes")),
    _gpu("h200-sxm-141gb", "hopper", (9, 0), 141, 139.81, 4800, 989, 1979, 1979, 132, 50, "nvlink", 450, 64,
         "NVIDIA H200 data sheet", unverified=("total_bytes",)),
    _gpu("b200-sxm-180gb", "blackwell", (10, 0), 180, 178.35, 8000, 2250, 4500, 4500, 148, 126, "nvlink", 900, 64,
         "NVIDIA HGX B200 data sheet", unverified=("total_bytes", "l2_cache_bytes")),
    _gpu("l40s-48gb", "ada", (8, 9), 48, 44.53, 864, 362, 733, 733, 142, 96, "pcie", 32, 32,
         "NVIDIA L40S data sheet"),
    _gpu("l4-24gb", "ada", (8, 9), 24, 22.05, 300, 121, 242, 242, 58, 48, "pcie", 32, 32,
         "NVIDIA L4 data sheet"),
    _gpu("a10g-24gb", "ampere", (8, 6), 24, 22.19, 600, 70, None, 140, 80, 6, "pcie", 32, 32,
         "AWS EC2 G5 page; NVIDIA A10 data sheet", unverified=("bf16_flops_per_s", "int8_ops_per_s")),
    _gpu("t4-16gb", "turing", (7, 5), 16, 14.56, 320, 65, None, 130, 40, 4, "pcie", 16, 16,
         "NVIDIA T4 data sheet", bf16=False),
    _gpu("rtx-2080-ti-22gb", "turing", (7, 5), 22, 21.48, 616, 53.8, None, 215.2, 68, 5.5, "pcie", 16, 16,
         "NVIDIA Turing architecture white paper; memory doubled by a third party", bf16=False, workstation=True),
    _gpu("rtx-4090-24gb", "ada", (8, 9), 24, 25250627584 / GIB, 1008, 165.2, 330.3, 660.6, 128, 72, "pcie", 32, 32,
         "NVIDIA Ada architecture white paper", workstation=True),
    _gpu("rtx-3090-24gb", "ampere", (8, 6), 24, 23.58, 936, 71, None, 284, 82, 6, "pcie", 32, 32,
         "NVIDIA GA102 architecture white paper", workstation=True),
    _gpu("rtx-a6000-48gb", "ampere", (8, 6), 48, 47.5, 768, 154.8, None, 309.7, 84, 6, "pcie", 32, 32,
         "NVIDIA RTX A6000 data sheet", workstation=True),
    _gpu("rtx-5090-32gb", "blackwell", (12, 0), 32, 31.35, 1792, 209.5, 419, 838, 170, 96, "pcie", 64, 64,
         "NVIDIA RTX Blackwell architecture white paper", workstation=True),
    _gpu("rtx-pro-6000-96gb", "blackwell", (12, 0), 96, 94.97, 1792, 503.8, 1007.6, 1007.6, 188, 128, "pcie", 64, 64,
         "NVIDIA RTX PRO 6000 Blackwell data sheet", workstation=True,
         unverified=("total_bytes", "bf16_flops_per_s", "fp8_flops_per_s", "int8_ops_per_s")),
    _gpu("mi300x-192gb", "cdna3", (9, 4), 192, 191.98, 5300, 1307, 2615, 2615, 304, 256, "infinity-fabric", 448, 64,
         "AMD Instinct MI300X data sheet", unverified=("total_bytes",)),
)
# fmt: on

GPUS = {gpu.name: gpu for gpu in _ENTRIES}
"""Every GPU by its canonical name."""

# fmt: off
GPU_ALIASES = {
    "a100": "a100-sxm-80gb", "a100-80gb": "a100-sxm-80gb", "a100-sxm": "a100-sxm-80gb",
    "a100-sxm4-80gb": "a100-sxm-80gb", "a100-40gb": "a100-sxm-40gb", "a100-sxm4-40gb": "a100-sxm-40gb",
    "a100-pcie": "a100-pcie-80gb", "h100": "h100-sxm-80gb", "h100-80gb": "h100-sxm-80gb",
    "h100-sxm": "h100-sxm-80gb", "h100-sxm5-80gb": "h100-sxm-80gb", "nvidia-h100-80gb-hbm3": "h100-sxm-80gb",
    "h100-pcie": "h100-pcie-80gb", "h100-nvl": "h100-nvl-94gb", "h200": "h200-sxm-141gb",
    "h200-sxm": "h200-sxm-141gb", "h200-141gb": "h200-sxm-141gb", "b200": "b200-sxm-180gb",
    "b200-sxm": "b200-sxm-180gb", "l40s": "l40s-48gb", "l4": "l4-24gb", "a10g": "a10g-24gb", "t4": "t4-16gb",
    "4090": "rtx-4090-24gb", "rtx-4090": "rtx-4090-24gb", "rtx4090": "rtx-4090-24gb",
    "nvidia-geforce-rtx-4090": "rtx-4090-24gb", "3090": "rtx-3090-24gb", "rtx-3090": "rtx-3090-24gb",
    "rtx3090": "rtx-3090-24gb", "a6000": "rtx-a6000-48gb", "rtx-a6000": "rtx-a6000-48gb",
    "2080-ti": "rtx-2080-ti-22gb", "rtx-2080-ti": "rtx-2080-ti-22gb",
    "5090": "rtx-5090-32gb", "rtx-5090": "rtx-5090-32gb", "rtx5090": "rtx-5090-32gb",
    "rtx-pro-6000": "rtx-pro-6000-96gb", "rtxpro6000": "rtx-pro-6000-96gb", "mi300x": "mi300x-192gb",
}
# fmt: on
"""Other spellings of the names, lower case."""


def gpu(name: str) -> Gpu:
    """The GPU called `name`, by its canonical name or an alias.

    Raises:
        ConfigError: no such GPU; the message names the nearest ones.
    """
    return look_up("GPU", name, GPUS, GPU_ALIASES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Default limits of one engine step."""

    max_num_batched_tokens: int
    """Most tokens computed in one step."""
    max_num_seqs: int
    """Most sequences in one step."""


def default_budgets(device: Gpu) -> Budgets:
    """vLLM's server defaults for a GPU: GPUs of at least 70 GiB other than the A100 get the large budgets.

    **Source:** vLLM 0.29 engine arguments, usage context "API server".
    """
    if device.total_bytes >= 70 * GIB and not device.name.startswith("a100"):
        return Budgets(max_num_batched_tokens=8192, max_num_seqs=1024)
    return Budgets(max_num_batched_tokens=2048, max_num_seqs=256)
