"""Bad input as a user meets it: exit code 2, nothing on stdout, and one message of one line that says what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest


class Refusals:
    """Runs commands that must be refused, and reads what they say: the fixture `refused`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(
        self, arguments: Sequence[object], *words: str, by: Callable[[Sequence[str]], int] | None = None
    ) -> str:
        """The message of `by` (default: the command `kvtwin`), in which all `words` must stand."""
        if by is None:
            from experiments.cli import main as by
        self._capsys.readouterr()  # what was printed before
        code = by([str(word) for word in arguments])
        captured = self._capsys.readouterr()
        assert code == 2, captured.err
        assert captured.out == ""
        assert captured.err.count("\n") == 1 and captured.err.endswith("\n"), captured.err
        assert "Traceback" not in captured.err
        for word in words:
            assert word in captured.err
        return captured.err.rstrip("\n")
