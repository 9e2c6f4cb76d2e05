"""NVML: what the driver says of a GPU beside what torch can see. Optional: `pip install 'kvtwin[nvml]'`.

Torch knows its own process. Who else is on the device, how warm it is and at which clock it ran while a figure was measured,
only the management library says. Where that is missing the report says so, and why.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

INSTALL = "pip install 'kvtwin[nvml]'"


SLOWED_BY = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature, by hardware",
    0x80: "power brake",
}
"""Bits of NVML's reasons for lowered clocks that tell of throttling; idling, chosen clocks and synchronised boards do not."""


def nvml_reading(device: Any, *, module: Any = None) -> dict[str, Any]:
    """What NVML says of a CUDA device now, as JSON values; only `absent`, with the reason, where it says nothing.

    `module` is the library (default: `pynvml`, if it is installed).
    """
    return _asked(device, module, _read)


def nvml_clocks(device: Any, *, module: Any = None) -> dict[str, Any]:
    """At which clock the multiprocessors run now, and what slows them: `sm_clock_mhz`, `temperature_c`, `power_w`, `slowed_by`.

    What a driver does not tell is None; only `absent`, with the reason, where it says nothing at all.
    """
    return _asked(device, module, _clocks)


def _asked(device: Any, module: Any, read: Callable[[Any, Any], dict[str, Any]]) -> dict[str, Any]:
    device = torch.device(device)
    if device.type != "cuda":
        return {"absent": "the device is the CPU"}
    if module is None:
        try:
            module = importlib.import_module("pynvml")
        except ImportError:
            return {"absent": f"the library is not installed: {INSTALL}"}
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        return {"absent": f"NVML cannot be started: {error}"}
    try:
        return read(module, module.nvmlDeviceGetHandleByUUID(_uuid(device)))
    except module.NVMLError as error:
        return {"absent": f"NVML does not answer: {error}"}
    finally:
        module.nvmlShutdown()


def _clocks(module: Any, handle: Any) -> dict[str, Any]:
    def told(name: str, *arguments: Any) -> Any:
        """The answer to one question; None where this driver, or this device, has none."""
        try:
            return getattr(module, name)(handle, *arguments)
        except (AttributeError, module.NVMLError):
            return None

    bits = told("nvmlDeviceGetCurrentClocksEventReasons")
    if bits is None:  # its name before driver 535
        bits = told("nvmlDeviceGetCurrentClocksThrottleReasons")
    power = told("nvmlDeviceGetPowerUsage")
    return {
        "sm_clock_mhz": told("nvmlDeviceGetClockInfo", module.NVML_CLOCK_SM),
        "temperature_c": told("nvmlDeviceGetTemperature", module.NVML_TEMPERATURE_GPU),
        "power_w": None if power is None else power / 1000,
        "slowed_by": None if bits is None else [words for bit, words in SLOWED_BY.items() if bits & bit],
    }


def _uuid(device: Any) -> str:
    """Torch numbers the devices that it may use, NVML all there are: the identity is what both agree on."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _read(module: Any, handle: Any) -> dict[str, Any]:
    memory = module.nvmlDeviceGetMemoryInfo(handle)
    processes = module.nvmlDeviceGetComputeRunningProcesses(handle)
    return {
        "driver": _text(module.nvmlSystemGetDriverVersion()),
        "name": _text(module.nvmlDeviceGetName(handle)),
        "total_bytes": int(memory.total),
        "used_bytes": int(memory.used),
        "free_bytes": int(memory.free),
        "processes": [
            # The driver keeps the figure back where it may not tell, as inside a container.
            {
                "pid": int(process.pid),
                "used_bytes": None if process.usedGpuMemory is None else int(process.usedGpuMemory),
            }
            for process in processes
        ],
        "temperature_c": int(module.nvmlDeviceGetTemperature(handle, module.NVML_TEMPERATURE_GPU)),
        "sm_clock_mhz": int(module.nvmlDeviceGetClockInfo(handle, module.NVML_CLOCK_SM)),
        "power_w": module.nvmlDeviceGetPowerUsage(handle) / 1000,
    }


def _text(value: str | bytes) -> str:
    """Older releases of the library give bytes."""
    return value.decode() if isinstance(value, bytes) else value
