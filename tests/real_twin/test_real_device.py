"""Which device it is: recognising a GPU by its driver's name, what others hold there, NVML, PyTorch's snapshot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gpu import nvml
from gpu.device import DeviceFacts, others_bytes, recognise
from gpu.memory_history import memory_history
from sim.catalog.gpus import GIB, GPUS
from sim.core.config import ConfigError
from sim.memory.non_torch import context_bytes

# What CUDA calls them, with multiprocessors and compute capability as NVIDIA's tables and the catalogue have them.
NAMES = {
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm-80gb",
    "NVIDIA H100 PCIe": "h100-pcie-80gb",
    "NVIDIA H100 NVL": "h100-nvl-94gb",
    "NVIDIA H200": "h200-sxm-141gb",
    "NVIDIA B200": "b200-sxm-180gb",
    "NVIDIA L40S": "l40s-48gb",
    "NVIDIA L4": "l4-24gb",
    "NVIDIA A10G": "a10g-24gb",
    "Tesla T4": "t4-16gb",
    "NVIDIA GeForce RTX 4090": "rtx-4090-24gb",
    "NVIDIA GeForce RTX 3090": "rtx-3090-24gb",
    "NVIDIA RTX A6000": "rtx-a6000-48gb",
    "NVIDIA GeForce RTX 5090": "rtx-5090-32gb",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000-96gb",
}


def facts(driver_name: str, entry: str, **changes) -> DeviceFacts:
    gpu = GPUS[entry]
    values = {
        "name": driver_name,
        "compute_capability": gpu.compute_capability,
        "sm_count": gpu.sm_count,
        "total_bytes": gpu.total_bytes - (3 << 20),
        "free_bytes": gpu.total_bytes - (3 << 20) - context_bytes(gpu),
    }
    return DeviceFacts(**{**values, **changes})


@pytest.mark.parametrize(("name", "entry"), NAMES.items())
def test_a_gpu_is_recognised_by_the_name_that_its_driver_gives(name, entry):
    found = recognise(facts(name, entry))
    assert found.name == entry
    assert found.total_bytes == GPUS[entry].total_bytes - (3 << 20)  # measured, not the catalogue's


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "NVIDIA GeForce RTX 4070"},
        {"name": "NVIDIA GeForce RTX 4090 Laptop GPU", "total_bytes": 16 * GIB},
        {"compute_capability": (8, 6)},
    ],
)
def test_what_the_catalogue_does_not_have_is_named_and_not_guessed(changes):
    with pytest.raises(ConfigError, match=r"this machine's GPU is .*compute capability .* GiB.*--gpu"):
        recognise(facts("NVIDIA GeForce RTX 4090", "rtx-4090-24gb", **changes))


def test_what_others_hold_is_what_is_not_free_beside_our_context():
    gpu = GPUS["h100-sxm-80gb"]
    alone = facts("NVIDIA H100 80GB HBM3", gpu.name)
    assert others_bytes(alone, gpu) == 0
    shared = facts("NVIDIA H100 80GB HBM3", gpu.name, free_bytes=alone.free_bytes - 7 * GIB)
    assert others_bytes(shared, gpu) == 7 * GIB


# -- NVML ------------------------------------------------------------------------------------------------------------------


class FakeNvml:
    """Answers like `pynvml`, whose readings this is about; fails where it is told to."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def __init__(self, fails: str = "") -> None:
        self.fails, self.open = fails, 0

    def _call(self, name: str) -> None:
        if name == self.fails:
            raise self.NVMLError("Not Supported")

    def nvmlInit(self) -> None:  # noqa: N802
        self._call("init")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"570.86"

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return f"card {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        self._call("memory")
        return SimpleNamespace(total=80 * GIB, used=30 * GIB, free=50 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=11, usedGpuMemory=29 * GIB), SimpleNamespace(pid=12, usedGpuMemory=None)]

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:  # noqa: N802
        return 54

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        return 1980

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return 412_500


def test_nvml_s_readings_are_in_bytes_and_watts(monkeypatch):
    monkeypatch.setattr(nvml, "_uuid", lambda device: "GPU-1")
    library = FakeNvml()
    reading = nvml.nvml_reading("cuda", module=library)
    assert reading == {
        "driver": "570.86",
        "name": "card GPU-1",
        "total_bytes": 80 * GIB,
        "used_bytes": 30 * GIB,
        "free_bytes": 50 * GIB,
        "processes": [{"pid": 11, "used_bytes": 29 * GIB}, {"pid": 12, "used_bytes": None}],
        "temperature_c": 54,
        "sm_clock_mhz": 1980,
        "power_w": 412.5,
    }
    assert library.open == 0


@pytest.mark.parametrize(("fails", "why"), [("init", "cannot be started"), ("memory", "does not answer")])
def test_nvml_that_fails_is_said_to(fails, why, monkeypatch):
    monkeypatch.setattr(nvml, "_uuid", lambda device: "GPU-1")
    library = FakeNvml(fails)
    assert why in nvml.nvml_reading("cuda", module=library)["absent"]
    assert library.open == 0


def test_where_there_is_no_nvml_the_reading_says_why(monkeypatch):
    assert nvml.nvml_reading("cpu") == {"absent": "the device is the CPU"}
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert nvml.nvml_reading("cuda") == {"absent": "the library is not installed: pip install 'kvtwin[nvml]'"}


# -- PyTorch's snapshot ----------------------------------------------------------------------------------------------------


def test_a_snapshot_of_the_cpu_is_refused(tmp_path):
    with (
        pytest.raises(ConfigError, match="CUDA's caching allocator, but the device is cpu"),
        memory_history(tmp_path / "s.pickle", "cpu"),
    ):
        pass


@pytest.mark.gpu
def test_a_snapshot_is_written_and_diagnose_reads_it(cuda_device, tmp_path):
    from sim.memory.allocators.snapshot import read_snapshot

    path = tmp_path / "snapshot.pickle"
    with memory_history(path, cuda_device):
        kept = torch.zeros(1 << 22, device=cuda_device)
    snapshot = read_snapshot(path)
    assert kept.numel() == 1 << 22
    assert snapshot


@pytest.mark.gpu
def test_this_machine_s_gpu_is_recognised_and_its_free_memory_read(cuda_device):
    from gpu.device import device_facts

    found = device_facts(torch.device(cuda_device))
    assert recognise(found).total_bytes == found.total_bytes
    assert 0 < found.free_bytes <= found.total_bytes
