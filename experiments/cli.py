"""The command `kvtwin`: runs what was typed, and ends as a command should.

Exit codes: 0 success, 1 what was checked does not hold, 2 bad input, 130 interrupted. An error is one message on stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from sim.core.blocks import DoubleFreeError, IntegrityError
from sim.core.facts import ProgressError

from . import commands, commands_device, commands_failures
from .bad_input import input_errors, of_file
from .command_app import app
from .terminal import complain

COMMANDS = (commands, commands_device, commands_failures)
"""The modules that say what may be typed: importing them gives `app` its commands."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = " ".join(["kvtwin", *_command_words(arguments)])
    try:
        code = app(args=arguments, prog_name="kvtwin", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # newer releases of typer turn an interrupt into this code, older ones raise Abort
            complain(command, "interrupted")
        return int(code or 0)
    except (KeyboardInterrupt, typer.Abort):
        complain(command, "interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout went away (`kvtwin … | head`); pointing stdout at nothing keeps the interpreter's last flush quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (DoubleFreeError, IntegrityError, ProgressError) as error:
        complain(command, f"the run is not sound: {error}")
        return 1
    except OSError as error:
        complain(command, of_file(error))
        return 2
    except Exception as error:
        message = _message(error, arguments)
        if message is None:
            raise
        complain(command, message)
        return 1 if _does_not_start(error) else 2


def _command_words(arguments: Sequence[str]) -> list[str]:
    """The words of `arguments` that name the command: one, or two for a command of a group."""
    names = {command.name for command in app.registered_commands}
    groups = {group.name: group.typer_instance for group in app.registered_groups}
    first = arguments[0] if arguments else ""
    group = groups.get(first)
    if group is None:
        return [first] if first in names else []
    second = arguments[1] if len(arguments) > 1 else ""
    return [first, *([second] if second in {command.name for command in group.registered_commands} else [])]


def _message(error: Exception, arguments: Sequence[str]) -> str | None:
    """What to tell the user about `error`; None when it is not about the input, but a bug that needs its traceback."""
    if hasattr(error, "format_message"):  # every usage error of typer has it, whichever version raises it
        return _usage_message(error, arguments)
    return str(error) if _does_not_start(error) or isinstance(error, input_errors()) else None


def _does_not_start(error: Exception) -> bool:
    """Whether the simulated engine ran out of memory before it served anything."""
    from sim.memory.start_up import StartUpError

    return isinstance(error, StartUpError)


def _usage_message(error: Exception, arguments: Sequence[str]) -> str:
    name, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        return "no command is given\n\n" + str(error)
    if type(error).__name__ == "NoSuchOption" and name and context:
        known = [
            flag
            for parameter in context.command.params
            for flag in (*parameter.opts, *parameter.secondary_opts)
            if flag[:2] == "--"
        ]
        return f"no such flag {name}; {_flag_hint(str(name), known, context.command_path)}"
    said = str(error.format_message())  # type: ignore[attr-defined]
    for flag in getattr(getattr(error, "param", None), "opts", ()):
        value = _value_of(flag, arguments)
        wanted = str(getattr(error, "message", "")).partition("Input should be ")[2]
        if value is not None and wanted:  # releases of typer that check by pydantic leave out what was given
            return f"{flag} is {value!r}; it must be {wanted.partition(',')[0]}"
    return said


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """What was typed behind `flag`; None where it was not."""
    for word, after in zip(arguments, [*arguments[1:], None], strict=True):
        if word == flag:
            return after
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _flag_hint(name: str, known: Sequence[str], command: str) -> str:
    """What may have been meant by a flag that there is not."""
    from sim.catalog.naming import nearest
    from sim.scenario_tables import KEYS_WITHOUT_FLAG, TABLE_OF_KEY

    key = name.removeprefix("--").removeprefix("no-").replace("-", "_")
    if key in KEYS_WITHOUT_FLAG:
        return f"{key} is a key of [{TABLE_OF_KEY[key]}] in a scenario file"
    close = nearest(name, known, most=1)
    return f"nearest is {close[0]}" if close else f"{command} --help lists all"


if __name__ == "__main__":
    sys.exit(main())
