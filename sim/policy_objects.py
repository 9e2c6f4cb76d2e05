"""From what a scenario file says of a policy object to the object: a name that kvtwin has, or `module:Class`, and its arguments.

`"lora-slots"`, `"my_policies:OnlyShort"`, or, with arguments, `{ policy = "lora-slots", max_loras = 4 }`. Arguments are checked against the
signature of what is made, by name and, where it says that it takes numbers, by kind. Names stand in `sim.core.policies.names`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from sim.core.config import ConfigError, EngineConfig

from .scenario_errors import ScenarioError, choices
from .scenario_keys import whole_keys

Named = str | Mapping[str, Any]
"""A name, or a table with a name and arguments."""

_NUMBERS_BY_RANK = "Mapping[int, float]"
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number", lambda value: type(value) is int),
    "int | None": ("a whole number", lambda value: type(value) is int),
    "bool": ("true or false", lambda value: type(value) is bool),
    "float": ("a number", lambda value: _is_number(value)),
    "str": ("text", lambda value: isinstance(value, str)),
    _NUMBERS_BY_RANK: ("a table of numbers by priority", lambda value: _is_by_rank(value)),
    f"float | {_NUMBERS_BY_RANK}": (
        "a number, or a table of numbers by priority",
        lambda value: _is_number(value) or _is_by_rank(value),
    ),
}
"""What a parameter takes, by its annotation; others are not looked at."""


def split(where: str, main: str, given: Named) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of what is `given` at `where`, where a table has the name under `main`."""
    if isinstance(given, str):
        return given, {}
    name = given.get(main)
    if not isinstance(name, str):
        raise ScenarioError(f"{where} is {dict(given)!r}; a table needs {main} = a name, or module:Class")
    return name, {key: whole_keys(value) for key, value in given.items() if key != main}


def factory(where: str, name: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """What makes the object that is called `name`: one of the `known`, or a plug-in. Raises ScenarioError if there is none."""
    if ":" not in name:
        if name not in known:
            raise ScenarioError(
                f"{where} is {name!r}; {choices(name, known)}, and your own is written "
                "module:Class, for example my_policies:OnlyShort"
            )
        return known[name]
    module, _, attribute = name.partition(":")
    try:
        plug_in = getattr(import_module(module), attribute)
    except Exception as error:  # whatever a module of the user's does when it is imported
        raise ScenarioError(f"{where} {name!r} cannot be loaded: {_said(error)}") from error
    if not callable(plug_in):
        raise ScenarioError(f"{where} {name!r} cannot be called: it is a {type(plug_in).__name__}")
    made: Callable[..., Any] = plug_in
    return made


def bound(
    where: str, name: str, make: Callable[..., Any], arguments: Mapping[str, Any], *positional: object
) -> Callable[[EngineConfig], Any]:
    """Makes the object for an engine's settings, which are handed over as `config` if it has such a parameter.

    `positional` stands for what the engine hands over first. Raises ScenarioError for arguments that do not fit the signature.
    """
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError) as error:
        raise ScenarioError(f"{where} {name!r} cannot be made: {error}") from None
    parameters = signature.parameters
    takes_config = "config" in parameters
    own = [key for key in list(parameters)[len(positional) :] if key != "config"]
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key, value in arguments.items():
        if key not in own and not anything:
            takes = f"it takes {', '.join(own)}" if own else "it takes none"
            raise ScenarioError(f"{where} {name!r} has no argument {key!r}; {takes}")
        kind = (
            _KINDS.get(inspect.formatannotation(parameters[key].annotation).strip("'")) if key in parameters else None
        )
        if kind is not None and not kind[1](value):
            raise ScenarioError(f"{where} {name!r}: {key} is {value!r}; it must be {kind[0]}")
    config = {"config": None} if takes_config else {}
    try:
        signature.bind(*positional, **arguments, **config)
    except TypeError as error:
        raise ScenarioError(f"{where} {name!r} cannot be made {_listed(arguments)}: {error}") from None

    def made(config: EngineConfig) -> Any:
        try:
            return make(*positional, **arguments, **({"config": config} if takes_config else {}))
        except ConfigError as error:
            raise ConfigError(f"{where} {name!r}: {error}") from None
        except Exception as error:  # whatever a class of the user's does when it is made
            raise ScenarioError(f"{where} {name!r} cannot be made {_listed(arguments)}: {_said(error)}") from error

    return made


def _said(error: Exception) -> str:
    """An error in words: with its kind, where that is not one whose message stands by itself."""
    told = isinstance(error, ImportError | AttributeError | TypeError | ValueError)
    return str(error) if told else f"{type(error).__name__}: {error}"


def _listed(arguments: Mapping[str, Any]) -> str:
    given = ", ".join(f"{key} = {value!r}" for key, value in arguments.items())
    return f"with {given}" if given else "without arguments"


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]  # a number by then


def _is_by_rank(value: object) -> bool:
    return isinstance(value, Mapping) and all(type(key) is int and _is_number(each) for key, each in value.items())
