"""The command `kvtwin` before it has commands: modules called `commands…` say what may be typed after it, and import this."""

from __future__ import annotations

import typer

app = typer.Typer(
    name="kvtwin",
    help="The digital twin of an LLM inference engine's GPU memory.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)


def example(command: str) -> str:
    """An epilog that typer does not re-wrap."""
    return f"\b\nExample:\n  {command}"
