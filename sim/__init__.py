"""kvtwin: the digital twin of an LLM inference engine's GPU memory.

`sim.Scenario` says what runs, `sim.simulate` runs it, `sim.Result` is what comes back. The names are imported when they
are first used, so that `import sim` (and `import sim.core` on a GPU machine) stays fast and needs nothing installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .results.result import Result
    from .scenario import Scenario
    from .simulation import simulate

__all__ = ["Result", "Scenario", "__version__", "simulate"]

_HOMES = {"Result": "sim.results.result", "Scenario": "sim.scenario", "simulate": "sim.simulation"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sim' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
