"""Fixtures that several test files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of data recorded by others (KVTWIN_DATA; default: shared/data beside the repository)."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("KVTWIN_DATA") or default)
    if not (folder / "traces").is_dir():
        reason = f"the data recorded by others is not at {folder}; set KVTWIN_DATA to its folder"
        if os.environ.get("KVTWIN_REQUIRE_DATA") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


# Properties are tested with the same examples in every run, so that a failure can be repeated and CI never fails by luck. To
# look for new ones: `pytest --hypothesis-profile=explore`. No deadline: how long an example takes says more about the machine
# than about the code.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore", deadline=None, max_examples=1000, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
