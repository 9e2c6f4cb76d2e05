"""What was measured on what: the device, the software, the date. No host name, no path."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sim._version import __version__
from sim.catalog.host import HOST
from sim.core.config import ConfigError


def machine_facts(device: str) -> dict[str, Any]:
    """The device and the software that a measurement depends on. Needs torch."""
    import torch

    cuda = device.startswith("cuda")
    return {
        "kvtwin_version": __version__,
        "device": "cuda" if cuda else "cpu",
        "device_name": torch.cuda.get_device_name(device) if cuda else cpu_name(),
        "gpu": _catalogue_name(device) if cuda else HOST.name,
        "driver": _driver() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def now() -> str:
    """Date and time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def cpu_name() -> str:
    """The processor's name and how many cores of it this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    name = found[1].strip() if found else platform.processor() or platform.machine()
    return f"{name}, {cores} cores"


def available_bytes() -> int | None:
    """Memory that the host, and the container that this process may be in, can still give without swapping; None where neither says."""
    known = [found for found in (_host_available_bytes(), _container_available_bytes()) if found is not None]
    return min(known) if known else None


def _host_available_bytes() -> int | None:
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _container_available_bytes(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What is left of a control group's limit (cgroup v2), its file cache counted as free; None without one."""
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        cached = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(encoding="ascii"), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(int(limit) - used + (int(cached[1]) if cached else 0), 0)


def _catalogue_name(device: str) -> str | None:
    """The catalogue's name of a CUDA device; None when it has none."""
    from .device import device_facts, recognise

    try:
        return recognise(device_facts(device)).name
    except ConfigError:
        return None


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The GPU driver's version, as its own tool says it; None where that tool is missing."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.splitlines()[0].strip() if said.strip() else None
