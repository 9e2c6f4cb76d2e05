"""What counts as bad input to a command: it becomes one message on stderr and exit status 2."""

from __future__ import annotations

from collections.abc import Callable

from .terminal import complain


def input_errors() -> tuple[type[Exception], ...]:
    """The errors that mean bad input. Imported here, because most commands need few of these packages."""
    from calibration.errors import CalibrationError
    from sim.core.config import ConfigError
    from sim.memory.allocators.snapshot_pickle import SnapshotError
    from sim.scenario import ScenarioError
    from sim.slo import SloError
    from sim.workload.errors import TraceError, WorkloadError

    from .investigator import DiagnoseError

    return (
        ScenarioError,
        SloError,
        ConfigError,
        WorkloadError,
        TraceError,
        SnapshotError,
        DiagnoseError,
        CalibrationError,
    )


def of_file(error: OSError) -> str:
    """Which file, and what is wrong with it."""
    return f"{error.filename2 or error.filename or 'file'}: {error.strerror or error}"


def exit_status(command: str, work: Callable[[], int]) -> int:
    """What `work` returns; 2, and a message that begins with `command`, where it finds its input bad."""
    try:
        return work()
    except OSError as error:
        complain(command, of_file(error))
    except input_errors() as error:
        complain(command, str(error))
    return 2
