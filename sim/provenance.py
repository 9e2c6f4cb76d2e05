"""Where a result's numbers come from, and the command that gives them again."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
from datetime import UTC, datetime
from typing import Any

from ._version import __version__
from .preset_settings import settings_of
from .resolve import Resolved
from .scenario_tables import KEYS_WITHOUT_FLAG, TABLES


def provenance(resolved: Resolved, *, profile: str, replication: int) -> dict[str, Any]:
    """Version, model, GPU, cost model, date, the scenario's hash and the settings that are no defaults; `command` where flags alone can
    repeat the run.
    """
    scenario = json.dumps(resolved.as_dict(), sort_keys=True, allow_nan=False)
    facts: dict[str, Any] = {
        "kvtwin_version": __version__,
        "model": resolved.model.name,
        "gpu": resolved.gpu.name,
        "profile": profile,
        "scenario_sha256": hashlib.sha256(scenario.encode()).hexdigest(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "settings": resolved.settings(),
    }
    if replication:
        return {**facts, "replication": replication}
    command = run_command(resolved)
    return facts if command is None else {**facts, "command": command}


def run_command(resolved: Resolved) -> str | None:
    """The `kvtwin run` command of this scenario, None when it sets something that only a scenario file can say.

    What equals its default, or the preset's own, is left out; budgets and lengths that came from the GPU and the model are written out.
    """
    words = ["kvtwin", "run"]
    decided = settings_of(resolved["policy"]["policy"], resolved["engine"]["max_model_len"])
    for name, table in TABLES.items():
        for key, field in table.model_fields.items():
            value = resolved[name][key]
            usual = decided[key].value if key in decided else field.default
            if value is None or value == usual:
                continue
            if key in KEYS_WITHOUT_FLAG:
                return None
            flag = "--" + key.replace("_", "-")
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{flag[2:]}")
            else:
                words += [flag, f"{value}"]
    if resolved.slo is not None:
        words += ["--slo", str(resolved.slo)]
    return shlex.join(words)
