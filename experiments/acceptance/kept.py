"""What a run leaves in its folder: few files, none of them large, so that they can be carried away from anywhere.

`acceptance.json` (all findings), `acceptance.log` (what the stages printed), and what single stages made, folders as archives.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from sim.core.config import ConfigError

LARGEST_BYTES = 16 * 2**20 - 1
"""Of a file that is kept."""
LOG_BYTES = 4 * 2**20
"""Of the log, from its beginning and from its end each."""
DOCUMENT = "acceptance.json"
LOG = "acceptance.log"


def earlier(out: Path, device: str, *, small: bool) -> dict[str, dict[str, Any]]:
    """The stages of an earlier run in the same folder: of the same device and size, for what another has shown is no verdict of this one.

    Raises:
        ConfigError: the document is not one.
    """
    file = out / DOCUMENT
    if not file.is_file():
        return {}
    try:
        stages: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["stages"]
        return {name: found for name, found in stages.items() if (found["device"], found["small"]) == (device, small)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is not what an acceptance run writes ({type(error).__name__}: {error}); take another --out"
        ) from None


def keep(made: Path, out: Path) -> str:
    """Put what a stage has made into the folder, a folder as an archive; says why it was not, if it was not."""
    if not made.exists():
        return ""
    file = Path(shutil.make_archive(str(made), "zip", made)) if made.is_dir() else made
    if file.stat().st_size > LARGEST_BYTES:
        return f"{file.name} has {file.stat().st_size:,} B, more than {LARGEST_BYTES:,}, and was not kept"
    shutil.copyfile(file, out / file.name)
    return ""


def shorten(log: Path) -> None:
    """Leave out the middle of a long log."""
    if log.stat().st_size <= 2 * LOG_BYTES:
        return
    whole = log.read_bytes()
    cut = f"\n[{len(whole) - 2 * LOG_BYTES:,} B left out]\n".encode()
    log.write_bytes(whole[:LOG_BYTES] + cut + whole[-LOG_BYTES:])
