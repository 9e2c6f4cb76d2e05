"""The flags that commands share, made from the scenario's own keys: a flag's type, range and help are those of its key."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
import typer.models

from sim.scenario import Scenario
from sim.scenario_tables import SWITCHES_BOTH_WAYS, TABLE_OF_KEY, TABLES

METAVARS = {
    "model": "NAME|config.json",
    "gpu": "NAME",
    "tensor_parallel_size": "N",
    "pipeline_parallel_size": "N",
    "dtype": "TYPE",
    "kv_cache_dtype": "TYPE",
    "quantization": "METHOD",
    "block_size": "TOKENS",
    "num_gpu_blocks_override": "N",
    "gpu_memory_utilization": "SHARE",
    "max_model_len": "TOKENS",
    "max_num_seqs": "N",
    "max_num_batched_tokens": "TOKENS",
    "engine_version": "RELEASE",
    "enable_prefix_caching": "",
    "enable_chunked_prefill": "",
    "async_scheduling": "",
    "scheduling_policy": "fcfs|priority",
    "eviction": "ORDER",
    "num_cpu_blocks": "N",
    "num_cpu_prefix_blocks": "N",
    "cpu_prefix_mode": "MODE",
    "cpu_token_s": "S",
    "vllm_args": "FLAGS",
    "policy": "PRESET",
    "profile": "NAME|FILE",
    "trace": "FILE",
    "workload": "NAME",
    "rate": "PER_S",
    "burstiness": "SHAPE",
    "max_concurrency": "N",
    "num_requests": "N",
    "duration": "S",
    "cancel_rate": "SHARE",
    "timeout": "S",
    "replicas": "N",
    "router": "NAME",
    "seed": "N",
    "stepping": "",
    "check": "",
    "executor": "NAME",
    "device": "NAME",
}
"""Every key of a scenario that is also a flag, in the order of the help, with what its value looks like."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write the results into this folder.")]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", min=1, help="Processes to use; default: one a CPU. Results do not depend on it."
    ),
]


def takes_scenario(command: Callable[..., int]) -> Callable[..., int]:
    """Give `command` the argument SCENARIO.toml and all scenario flags; it gets the scenario they make as its first argument.

    Flags replace what the file says. Only what the user typed is passed on, so that defaults stay the scenario's own. Arguments
    of the command's own come before the scenario.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    flags = [_parameter(key) for key in METAVARS]
    slo = _keyword(
        "slo",
        Annotated[
            str | None, _option("slo", "NAME=S,…", "objectives in seconds, for example ttft_p99=2.0,tpot_p99=0.05")
        ],
    )
    file = Annotated[
        Path | None, typer.Argument(metavar="[SCENARIO.toml]", help="A scenario file; flags replace what it says.")
    ]

    @functools.wraps(command)
    def with_scenario(**values: Any) -> int:
        path = values.pop("scenario_file")
        typed = {name: values.pop(name) for name in (*METAVARS, "slo")}
        typed = {name: value for name, value in typed.items() if value is not None}
        scenario = Scenario.load(path, flags=typed) if path else Scenario.from_flags(typed)
        return command(scenario, **values)

    parameters = [
        *(own_.replace(kind=inspect.Parameter.KEYWORD_ONLY) for own_ in own if _is_argument(own_)),
        _keyword("scenario_file", file),
        *flags,
        slo,
        *(own_.replace(kind=inspect.Parameter.KEYWORD_ONLY) for own_ in own if not _is_argument(own_)),
    ]
    del with_scenario.__wrapped__  # typer must see the signature below, not the command's own
    with_scenario.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_scenario.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_scenario


def _is_argument(parameter: inspect.Parameter) -> bool:
    """Whether a parameter of a command is given by its place, not by a flag."""
    return any(isinstance(given, typer.models.ArgumentInfo) for given in get_args(parameter.annotation)[1:])


def _parameter(key: str) -> inspect.Parameter:
    field = TABLES[TABLE_OF_KEY[key]].model_fields[key]
    kind = _kind(field.annotation)
    default = (
        "" if field.default is None or (kind is bool and not field.default) else f"; default: {_shown(field.default)}"
    )
    both = kind is bool and (bool(field.default) or key in SWITCHES_BOTH_WAYS)
    option = _option(key, METAVARS[key], f"{field.description}{default}", both=both)
    return _keyword(key, Annotated[kind | None, option])


def _option(key: str, metavar: str, description: str, *, both: bool = False) -> Any:
    flag = "--" + key.replace("_", "-")
    text = f"{description[0].upper()}{description[1:]}."
    return typer.Option(
        f"{flag}/--no-{flag[2:]}" if both else flag, help=text, metavar=metavar or None, show_default=False
    )


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _kind(annotation: Any) -> Any:
    """The type a flag is parsed to; choices are checked by the scenario, whose message names them."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(choice for choice in get_args(annotation) if choice is not type(None))
    return str if get_origin(annotation) is Literal else annotation


def _shown(value: object) -> str:
    return "on" if value is True else f"{value}"
