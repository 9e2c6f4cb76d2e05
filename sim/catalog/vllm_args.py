"""Reads a pasted `vllm serve ...` command line into kvtwin's settings.

Every flag is sorted into one of three kinds: a setting that kvtwin models, a flag of vLLM that it does not model (reported
as ignored, so that nobody believes it was obeyed), or a mistake (an error with the nearest flag).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

from sim.core.config import ConfigError

from .dtypes import dtype_name, kv_cache_dtype_name, weight_format
from .naming import nearest

Setting = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmArgs:
    """What a pasted command line says."""

    settings: dict[str, Setting] = field(default_factory=dict)
    """Settings by the names of kvtwin's flags with underscores, e.g. `tensor_parallel_size`."""
    ignored: list[str] = field(default_factory=list)
    """Flags (with their values) that vLLM knows and kvtwin does not model."""


def _integer(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        """A whole number; decimal 1k = 1000 and binary 1K = 1024, as vLLM's human-readable integers (also m, M, g, G)."""
        match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgG]?)", text)
        if not match:
            raise ValueError("a whole number was expected, such as 8192, 8k (8000) or 8K (8192)")
        number, suffix = match.groups()
        if not suffix and "." in number:
            raise ValueError("a whole number was expected")
        if suffix.isupper() and "." in number:
            raise ValueError("binary suffixes take whole numbers only, such as 8K; use 8.2k for 8200")
        scale = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}[suffix]
        value = round(float(number) * scale) if suffix.islower() else int(number) * scale
        if value < low:
            raise ValueError(f"it must be at least {low}")
        return value

    return parse


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("a number above 0 and at most 1 was expected") from None
    if not 0.0 < value <= 1.0:
        raise ValueError("it must be above 0 and at most 1")
    return value


def _watermark(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("a number at least 0 and below 1 was expected") from None
    if not 0.0 <= value < 1.0:
        raise ValueError("it must be at least 0 and below 1")
    return value


def _dtype(text: str) -> str:
    return "auto" if text == "auto" else dtype_name(text)


def _quantization(text: str) -> str | None:
    form = weight_format(text)
    return form.name if form else None


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"it must be one of {', '.join(allowed)}")
        return text

    return parse


_VALUED: dict[str, Callable[[str], Setting]] = {
    "--model": str,
    "--tensor-parallel-size": _integer(1),
    "--pipeline-parallel-size": _integer(1),
    "--data-parallel-size": _integer(1),
    "--dtype": _dtype,
    "--kv-cache-dtype": kv_cache_dtype_name,
    "--quantization": _quantization,
    "--block-size": _integer(1),
    "--num-gpu-blocks-override": _integer(1),
    "--gpu-memory-utilization": _share,
    "--kv-cache-memory-bytes": _integer(1),
    "--max-model-len": _integer(-1),
    "--max-num-seqs": _integer(1),
    "--max-num-batched-tokens": _integer(1),
    "--scheduling-policy": _choice("fcfs", "priority"),
    "--watermark": _watermark,
    "--max-num-queued-reqs": _integer(0),
    "--max-num-queued-tokens": _integer(0),
    "--max-loras": _integer(1),
    "--max-lora-rank": _integer(1),
    "--speculative-config": str,
}
_SWITCHES = (
    "--enable-prefix-caching",
    "--enable-chunked-prefill",
    "--enforce-eager",
    "--scheduler-reserve-full-isl",
    "--async-scheduling",
    "--enable-lora",
)
_RENAMED = {"data_parallel_size": "replicas", "scheduler_reserve_full_isl": "reserve_full_prompt"}
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
}

# fmt: off
_IGNORED_WITH_VALUE = (
    "--host", "--port", "--api-key", "--served-model-name", "--tokenizer", "--tokenizer-mode", "--revision",
    "--download-dir", "--load-format", "--chat-template", "--max-log-len", "--uvicorn-log-level",
    "--tool-call-parser", "--reasoning-parser", "--generation-config", "--hf-overrides", "--limit-mm-per-prompt",
    "--max-logprobs", "--distributed-executor-backend", "--swap-space", "--cpu-offload-gb", "--kv-offloading-size",
    "--kv-offloading-backend", "--kv-transfer-config", "--compilation-config",
    "--prefix-caching-hash-algo", "--max-num-scheduled-tokens", "--max-num-active-seqs",
    "--long-prefill-token-threshold", "--stream-interval", "--scheduler-cls",
    "--max-cudagraph-capture-size", "--optimization-level", "--lora-modules",
    "--rope-scaling", "--rope-theta", "--config-format", "--override-generation-config", "--max-seq-len-to-capture",
    "--max-parallel-loading-workers", "--api-server-count", "--data-parallel-backend", "--attention-backend",
    "--performance-mode", "--num-scheduler-steps", "--guided-decoding-backend", "--task", "--runner",
    "--chat-template-content-format", "--root-path", "--block-manager", "--seed",
)
_IGNORED_SWITCHES = (
    "-O", "--trust-remote-code", "--disable-log-requests", "--enable-log-requests", "--disable-log-stats",
    "--enable-auto-tool-choice", "--enable-expert-parallel",
    "--disable-custom-all-reduce", "--enable-sleep-mode", "--skip-tokenizer-init", "--use-v2-block-manager",
    "--enable-reasoning", "--disable-frontend-multiprocessing", "--enable-prompt-tokens-details",
    "--calculate-kv-scales", "--language-model-only", "--disable-sliding-window", "--enable-force-include-usage",
    "--headless", "--disable-uvicorn-access-log",
)
# fmt: on
_IGNORED = {**dict.fromkeys(_IGNORED_WITH_VALUE, True), **dict.fromkeys(_IGNORED_SWITCHES, False)}
"""Flags of vLLM that are recognised and left out; True where the flag takes a value."""


def parse_vllm_args(text: str) -> VllmArgs:
    """Parse `text`, a `vllm serve ...` command line or only its flags.

    Later flags win over earlier ones, as in vLLM. `--max-model-len -1` (or `auto`) gives `max_model_len: None`: what fits.

    Raises:
        ConfigError: a misspelt flag, a missing or impossible value, or quotes that do not close.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as problem:
        raise ConfigError(f"vLLM arguments: {problem}: {text!r}") from None
    words = _without_command(words)
    settings: dict[str, Setting] = {}
    ignored: list[str] = []
    if words and not words[0].startswith("-"):
        settings["model"] = words.pop(0)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        flag = _canonical(flag)
        given = value if equals else None
        switch = flag.replace("--no-", "--", 1)
        if switch in _SWITCHES:
            name = switch[2:].replace("-", "_")
            settings[_RENAMED.get(name, name)] = _switch(flag, given)
        elif flag in _VALUED:
            name = flag[2:].replace("-", "_")
            settings[_RENAMED.get(name, name)] = _value(flag, given if given is not None else _next(flag, words))
        elif flag in _IGNORED or switch in _IGNORED:
            takes_value = _IGNORED.get(flag, False)
            if given is None and takes_value:
                given = _next(flag, words)
            ignored.append(flag if given is None else f"{flag} {given}")
        elif flag.startswith("-"):
            near = nearest(flag, [*_VALUED, *_SWITCHES, *_IGNORED])
            hint = f"did you mean {' or '.join(near)}?" if near else "it is not a flag of vllm serve that kvtwin knows"
            raise ConfigError(f"vLLM arguments: unknown flag {flag}: {hint}")
        else:
            raise ConfigError(
                f"vLLM arguments: {flag!r} belongs to no flag; the model comes first, then flags that begin with --"
            )
    _settle_adapters(settings, ignored)
    _settle_drafts(settings, ignored)
    return VllmArgs(settings=settings, ignored=ignored)


def _settle_adapters(settings: dict[str, Setting], ignored: list[str]) -> None:
    """Slots for adapters, with vLLM's numbers where none are given; without `--enable-lora` there are none, whatever else is said."""
    enabled = settings.pop("enable_lora", None)
    given = {name: settings.pop(name, None) for name in ("max_loras", "max_lora_rank")}
    if enabled:
        settings["max_loras"] = given["max_loras"] or 1
        settings["max_lora_rank"] = given["max_lora_rank"] or 16
        return
    if enabled is not None:
        ignored.append("--no-enable-lora")
    ignored += [f"--{name.replace('_', '-')} {value}" for name, value in given.items() if value is not None]


def _settle_drafts(settings: dict[str, Setting], ignored: list[str]) -> None:
    """The draft model and tokens of `--speculative-config`, as far as memory depends on them. A draft that the catalogue does not
    have is reported, and its weights are in no account.

    Raises ConfigError where it is no JSON object, or a number in it is none.
    """
    text = settings.pop("speculative_config", None)
    if text is None:
        return
    try:
        config = json.loads(str(text))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ConfigError(
            f"vLLM arguments: --speculative-config is {text!r}; a JSON object such as "
            '{"model": "llama-3.2-1b", "num_speculative_tokens": 3} was expected'
        )
    for name in ("num_speculative_tokens", "draft_tensor_parallel_size"):
        if name in config:
            value = config.pop(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"vLLM arguments: --speculative-config {name} is {value!r}; it must be a whole number of at least 1"
                )
            settings[name] = value
    draft = config.get("model")
    if isinstance(draft, str) and _known_model(draft):
        settings["speculative_model"] = config.pop("model")
    ignored += [f"--speculative-config.{name} {value}" for name, value in config.items()]


def _known_model(name: str) -> bool:
    from .models import model_shape

    try:
        model_shape(name)
    except ConfigError:
        return False
    return True


def _canonical(flag: str) -> str:
    """A flag as the tables here spell it: short forms long, underscores as dashes, `--compilation-config.level` as its parent."""
    if re.fullmatch(r"-O\d?", flag):
        return "-O"
    if flag.startswith("--"):
        return "--" + flag[2:].partition(".")[0].replace("_", "-")
    return _SHORT.get(flag, flag)


def _without_command(words: list[str]) -> list[str]:
    """Drop a leading environment, `vllm serve`, or `python -m vllm.entrypoints...`."""
    while words and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", words[0]):
        words = words[1:]
    if words[:2] == ["vllm", "serve"]:
        return words[2:]
    if len(words) > 2 and words[0].startswith("python") and words[1] == "-m" and words[2].startswith("vllm."):
        return words[3:]
    return words


def _next(flag: str, words: list[str]) -> str:
    """The word after `flag`: its value, which may be a negative number but not another flag."""
    if not words or re.match(r"-+[A-Za-z]", words[0]):
        raise ConfigError(f"vLLM arguments: {flag} needs a value")
    return words.pop(0)


def _value(flag: str, text: str) -> Setting:
    if flag == "--max-model-len" and text in ("-1", "auto"):
        return None
    try:
        value = _VALUED[flag](text)
    except ConfigError as problem:
        raise ConfigError(f"vLLM arguments: {flag}: {problem}") from None
    except ValueError as problem:
        raise ConfigError(f"vLLM arguments: {flag} is {text!r}; {problem}") from None
    if flag == "--max-model-len" and isinstance(value, int) and value < 1:
        raise ConfigError(f"vLLM arguments: {flag} is {text!r}; it must be at least 1, or -1 for what fits")
    return value


def _switch(flag: str, given: str | None) -> bool:
    on = not flag.startswith("--no-")
    if given is None:
        return on
    if given.lower() not in ("true", "false"):
        raise ConfigError(f"vLLM arguments: {flag} is {given!r}; true or false was expected")
    return on if given.lower() == "true" else not on
