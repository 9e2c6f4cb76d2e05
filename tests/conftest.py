"""Fixtures that several test files share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.engine_driver import EngineDriver
    from tests.support.interpreter import Interpreter
    from tests.support.refusals import Refusals

# Before anything imports them: a failed assert of a helper shows its values, as one of a test does.
pytest.register_assert_rewrite("tests.support")


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


@pytest.fixture
def drive() -> type[EngineDriver]:
    """Makes engine cores to be driven by hand: `drive(num_gpu_blocks=…, block_size=…, **settings)`."""
    from tests.support.engine_driver import EngineDriver

    return EngineDriver


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refusals:
    """Runs a command that must be refused with exit code 2 and one message: `message = refused(arguments, *words)`."""
    from tests.support.refusals import Refusals

    return Refusals(capsys)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    """A process in which kernels are interpreted."""
    from tests.support.interpreter import Interpreter

    with Interpreter() as process:
        yield process


@pytest.fixture
def cuda_device() -> str:
    """The name of a CUDA device; skips where there is none, and fails where REQUIRE_GPU=1 says that there must be one."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        return "cuda"
    reason = "torch sees no CUDA device"
    if os.environ.get("REQUIRE_GPU") == "1":
        pytest.fail(f"{reason}, but REQUIRE_GPU=1")
    pytest.skip(reason)


@pytest.fixture
def steady_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real runs whose steps are said to last the same on every machine, so that what happens in them does not depend on its load."""
    from tests.support.steady_timer import SteadyTimer

    monkeypatch.setattr("gpu.executor.step_timer", lambda device, clock: SteadyTimer())
