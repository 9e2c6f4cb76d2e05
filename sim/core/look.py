"""Looks: what policies see of an engine's requests, and cannot change.

A policy gets the engine's view, views of running requests (`view`), and of the requests it is asked about. None of them lets anything be
set: whoever tries is stopped at once, by name. Names with an underscore are nobody's business but the engine's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from .config import ConfigError
from .request import Request, RequestSpec, State


class ReadOnlyError(ConfigError):
    """A policy has tried to change what it may only look at. Names the function that did, and what it would have changed."""


def _refuse(what: str, depth: int = 2) -> NoReturn:
    """Raise for whoever called the method that calls this."""
    frame = sys._getframe(depth)
    who = f"{frame.f_globals.get('__name__', '?')}:{frame.f_code.co_qualname}"
    raise ReadOnlyError(f"{who} would {what}; a policy may look and not touch: what it learns it keeps in itself")


class Look:
    """A window on something: nothing of it can be set or deleted."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        """Raises ReadOnlyError."""
        _refuse(f"set {name} of {self.what} to {value!r}")

    def __delattr__(self, name: str) -> None:
        """Raises ReadOnlyError."""
        _refuse(f"delete {name} of {self.what}")

    @property
    def what(self) -> str:
        """What is looked at, for messages."""
        return f"the engine ({type(self).__name__})"


class RequestLook(Look):
    """A request as a policy sees it that is asked about it: the fields of `Request` that a decision may rest on."""

    __slots__ = ("_request",)
    _request: Request

    def __init__(self, request: Request) -> None:
        _set_request(self, request)

    @property
    def what(self) -> str:
        """Which request."""
        return f"request {self._request.request_id!r}"

    @property
    def spec(self) -> RequestSpec:
        """What its client asked for."""
        return self._request.spec

    @property
    def request_id(self) -> str:
        """The name its client knows it by."""
        return self._request.spec.request_id

    @property
    def state(self) -> State:
        """Where it is in its life."""
        return self._request.state

    @property
    def seq(self) -> int:
        """Order of arrival at this engine."""
        return self._request.seq

    @property
    def order(self) -> int:
        """Order of its latest admission; -1 before the first."""
        return self._request.order

    @property
    def arrival_fs(self) -> int:
        """When it was sent, in femtoseconds."""
        return self._request.arrival_fs

    @property
    def first_token_fs(self) -> int | None:
        """When it got its first token; None before that."""
        return self._request.first_token_fs

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens (of a decoding request, when it began to decode)."""
        return self._request.num_tokens

    @property
    def num_output_tokens(self) -> int:
        """Those of them that were sampled."""
        return self._request.num_output_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV exists (of a decoding request, when it began to decode)."""
        return self._request.num_computed_tokens

    @property
    def num_preemptions(self) -> int:
        """How often it has lost its blocks."""
        return self._request.num_preemptions

    @property
    def held_blocks(self) -> int:
        """Blocks in its tables."""
        return self._request.held_blocks


_set_request: Callable[[RequestLook, Request], None] = RequestLook.__dict__["_request"].__set__


class RunningLooks(dict[int, RequestLook]):
    """The running requests by admission order, oldest first, as a victim policy of a user's sees them."""

    def _touched(self, *given: object, **named: object) -> Any:
        """Raises ReadOnlyError."""
        _refuse("change the running requests")

    __setitem__ = __delitem__ = __ior__ = _touched
    pop = popitem = clear = update = setdefault = _touched
