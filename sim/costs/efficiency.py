"""How much of a data sheet an engine reaches: the factors of the roofline, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sim.core.config import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineEfficiency:
    """Shares of peak rates, and the fixed times that peak rates do not show. Round numbers, one set for every GPU.

    They were chosen once, looking at public kernel timings and runs on five GPUs (see the tests for the errors that
    remain), and are not fitted to any one of them; a calibrated profile replaces them.
    """

    compute: float = 0.70
    """Share of the dense matrix peak that large GEMMs reach. Public timings: 0.83 on RTX PRO 6000, about 1.0 on RTX 4090, 0.6 to 0.75 on
    A100 and H100, whose peaks assume a clock they cannot hold."""
    memory: float = 0.80
    """Share of the memory bandwidth reached while reading weights. Public timings: 0.77 to 0.82 on RTX PRO 6000, 0.94 on RTX 4090."""
    attention_memory: float = 0.75
    """The same for decode attention, whose reads are scattered over blocks: 0.69 to 0.82 and 0.80 to 0.95 on the same cards."""
    attention_compute: float = 0.50
    """Share of the matrix peak that prefill attention reaches, with softmax between its two products: 0.40 to 0.54 and 0.49 to 0.80."""
    link: float = 0.70
    """Share of the link's one-directional peak in collectives and copies."""
    layer_s: float = 20e-6
    """A layer's short kernels (norms, rotary, activation, attention's start) and the gaps between them, at small batches."""
    attention_serial_s: float = 25e-9
    """A prefill chunk's attention reads its context tile by tile: at least so long a context token and layer, however short the chunk."""
    all_reduce_nvlink_s: float = 10e-6
    """Latency of one all-reduce over NVLink or a like fabric."""
    all_reduce_pcie_s: float = 20e-6
    """The same over PCIe."""
    step_s: float = 1e-3
    """Host time a step: scheduling, input preparation, launching the graph."""
    seq_s: float = 5e-6
    """Host time a sequence and step."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s"):
                if not value >= 0:
                    raise ConfigError(f"efficiency {field.name} is {value}; a time is at least 0 seconds")
            elif not 0 < value <= 1.5:
                raise ConfigError(
                    f"efficiency {field.name} is {value}; it is a share of a peak, above 0 and at most 1.5"
                )
