"""What the tables of a scenario file are made of: a table, a key that has no flag, and the types that several keys share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo


class Table(BaseModel):
    """What all tables share: unknown keys are errors, values are not converted behind the user's back, and nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def file_only(default: Any, **limits: Any) -> Any:
    """A key that only a scenario file, Python or pasted vLLM flags can set: as pydantic's `Field`, without a flag of its own."""
    return Field(default, json_schema_extra={"flag": False}, **limits)


def has_flag(field: FieldInfo) -> bool:
    """Whether a key can be given on the command line."""
    extra = field.json_schema_extra
    return not isinstance(extra, dict) or extra.get("flag") is not False


def whole_keys(given: object) -> object:
    """TOML knows only text for keys; a priority is a whole number."""
    if not isinstance(given, dict):
        return given
    return {
        int(key) if isinstance(key, str) and key.lstrip("-").isdigit() else key: share for key, share in given.items()
    }


Named = Annotated[str, Field(min_length=1)] | dict[str, Any]
"""A name, or a table with a name and arguments (`sim.policy_objects`)."""

Length = Annotated[int, Field(ge=1)] | Annotated[list[int], Field(min_length=2, max_length=2)] | None
"""Tokens, or the smallest and the largest number of them."""

Priorities = Annotated[dict[int, float], BeforeValidator(whole_keys)]
"""A share of the requests by priority."""
