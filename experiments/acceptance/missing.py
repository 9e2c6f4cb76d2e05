"""Missing: what is not installed, and which stages fall away for it. Said before anything runs, on a machine without an index."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping

from .stages import Stage


def missing(needs: Iterable[str]) -> list[str]:
    """Those of the modules that cannot be found; none is imported."""
    return [name for name in needs if importlib.util.find_spec(name) is None]


def fallen_away(stages: Mapping[str, Stage]) -> dict[str, str]:
    """By stage why it cannot be carried out here; only those that cannot."""
    lacking = {name: missing(stage.needs) for name, stage in stages.items()}
    return {
        name: f"needs {', '.join(absent)}, which {'is' if len(absent) == 1 else 'are'} not installed"
        for name, absent in lacking.items()
        if absent
    }
