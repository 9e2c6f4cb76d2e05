"""Run kernels in Triton's interpreter, in a process of its own.

The interpreter is chosen when triton is first imported, for the whole process; a process that compiles kernels cannot also
interpret them. So an `Interpreter` starts another one, which is told by pickles what to call, and sends back the result and
the arguments as the call has left them. It is how kernels are run on a machine without a GPU: slowly, and for proofs only.
"""

from __future__ import annotations

import importlib
import io
import os
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from gpu.require import require


class InterpreterError(RuntimeError):
    """The call failed in the interpreter; the message is its traceback there."""


class Interpreter:
    """A process with `TRITON_INTERPRET=1`. A context manager: the process ends with it."""

    def __init__(self) -> None:
        require("triton", "Triton's interpreter")
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.support.interpreter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        )

    def call(self, function: str, *arguments: Any) -> tuple[Any, tuple[Any, ...]]:
        """Call `module:function` with these arguments; returns its result and the arguments afterwards, as copies.

        Raises:
            InterpreterError: the call raised.
        """
        assert self._process.stdin is not None  # both are pipes
        assert self._process.stdout is not None
        _send(self._process.stdin, (function, arguments))
        failed, answer = _receive(self._process.stdout)
        if failed:
            raise InterpreterError(answer)
        result, changed = answer
        return result, changed

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _send(stream: IO[bytes], message: Any) -> None:
    """One message, its length first. `torch.save` keeps tensors that share memory together."""
    buffer = io.BytesIO()
    require("torch", "Triton's interpreter").save(message, buffer)
    stream.write(struct.pack("<Q", buffer.tell()) + buffer.getvalue())
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """The next message. Comes from this module at the other end of a pipe, so unpickling it is safe.

    Raises:
        EOFError: the other end is gone.
    """
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("the interpreter's process has ended")
    body = stream.read(struct.unpack("<Q", head)[0])
    return require("torch", "Triton's interpreter").load(io.BytesIO(body), weights_only=False)


def _serve() -> None:
    """Answer calls until the pipe closes. What a kernel prints goes to stderr: stdout is the pipe."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    while True:
        try:
            name, arguments = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            module, _, function = name.partition(":")
            call: Callable[..., Any] = getattr(importlib.import_module(module), function)
            answer: tuple[bool, Any] = (False, (call(*arguments), arguments))
        except Exception:
            answer = (True, traceback.format_exc())
        _send(answers, answer)


if __name__ == "__main__":
    _serve()
