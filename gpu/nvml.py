"""NVML: what the driver says of a GPU beside what torch can see. Optional: `pip install 'kvtwin[nvml]'`.

Torch knows its own process. Who else is on the device, how warm it is and at which clock it ran while a figure was measured,
only the management library says. Where that is missing the report says so, and why.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

INSTALL = "pip install 'kvtwin[nvml]'"


def nvml_reading(device: Any, *, module: Any = None) -> dict[str, Any]:
    """What NVML says of a CUDA device now, as JSON values; only `absent`, with the reason, where it says nothing.

    `module` is the library (default: `pynvml`, if it is installed).
    """
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
        return _read(module, module.nvmlDeviceGetHandleByUUID(_uuid(device)))
    except module.NVMLError as error:
        return {"absent": f"NVML does not answer: {error}"}
    finally:
        module.nvmlShutdown()


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
