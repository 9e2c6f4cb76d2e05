"""What an engine has to say about the settings: its own defaults, and what its rules let nobody change.

A setting that an engine leaves to its user stays as its user typed it. One that it does not is refused when it was typed with another
value: nothing that was asked for is replaced in silence. Sources and versions are those of `presets`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from ..config import ConfigError, EngineConfig

Value = bool | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How an engine has one setting of `EngineConfig`."""

    value: Value
    """What it is unless the user says otherwise."""
    because: str | None = None
    """Why the user cannot say otherwise, as a clause; None where the engine has a switch for it."""


Settings = Mapping[str, Setting]
"""Settings by their name in `EngineConfig`; what is not in it is as in vLLM V1, and its user's to choose."""

V0_WHOLE_PROMPTS_UP_TO = 32_768
"""Longest context, in tokens, for which vLLM V0 left chunked prefill off by default."""

_QUEUE_ALONE = "for the order of the queue alone set [policy] queue"
_ARRIVAL = Setting(value="fcfs", because=f"it serves requests in their order of arrival ({_QUEUE_ALONE})")
_WHOLE_PROMPT = Setting(value=True, because="it starts a request only if its whole prompt fits")
_WHOLE_REQUEST = Setting(value=True, because="it starts a request only if its worst case fits, the prompt included")
_NO_WATERMARK = Setting(value=0.0, because="its rule for who may start leaves no share of the pool free")


def _vllm_v0(max_model_len: int) -> Settings:
    return {
        "scheduling_policy": Setting(
            value="fcfs",
            because=f"its priorities also take blocks from the running for those who wait, which is not modelled ({_QUEUE_ALONE})",
        ),
        "watermark": Setting(value=0.01, because="its block manager always keeps 1 % of the pool free"),
        "reserve_full_prompt": _WHOLE_PROMPT,
        "enable_prefix_caching": Setting(value=False),
        "enable_chunked_prefill": Setting(value=max_model_len > V0_WHOLE_PROMPTS_UP_TO),
    }


_SETTINGS: Mapping[str, Callable[[int], Settings]] = {
    "vllm-v0": _vllm_v0,
    "sglang": lambda _: {
        "scheduling_policy": Setting(
            value="fcfs",
            because=f"its priorities also retract the running for those who wait, which is not modelled ({_QUEUE_ALONE})",
        ),
        "watermark": Setting(value=0.0, because="its new-token ratio decides what admission leaves free"),
        "reserve_full_prompt": _WHOLE_PROMPT,
        "enable_chunked_prefill": Setting(value=True),
    },
    "trtllm-no-evict": lambda _: {
        "scheduling_policy": _ARRIVAL,
        "watermark": _NO_WATERMARK,
        "reserve_full_prompt": _WHOLE_REQUEST,
    },
    "trtllm-max-util": lambda _: {
        "scheduling_policy": _ARRIVAL,
        "watermark": _NO_WATERMARK,
        "reserve_full_prompt": Setting(value=False, because="it starts a request as soon as its next step fits"),
    },
    "static-batch": lambda _: {
        "scheduling_policy": _ARRIVAL,
        "watermark": _NO_WATERMARK,
        "reserve_full_prompt": _WHOLE_REQUEST,
    },
    "orca": lambda _: {
        "scheduling_policy": _ARRIVAL,
        "watermark": _NO_WATERMARK,
        "reserve_full_prompt": _WHOLE_REQUEST,
        "enable_prefix_caching": Setting(
            value=False, because="it keeps every sequence in one contiguous piece, and shares and keeps nothing"
        ),
    },
    "nano-vllm": lambda _: {
        "scheduling_policy": _ARRIVAL,
        "watermark": _NO_WATERMARK,
        "reserve_full_prompt": _WHOLE_PROMPT,
        "enable_chunked_prefill": Setting(value=True, because="it computes a long prompt in pieces, and has no switch"),
    },
    "predicted-peak": lambda _: {
        "watermark": Setting(value=0.0, because="its risk decides what admission leaves free"),
        "reserve_full_prompt": _WHOLE_PROMPT,
    },
    "ladder": lambda _: {
        "scheduling_policy": Setting(
            value="priority", because=f"it serves strictly by priority ({_QUEUE_ALONE})"
        ),
    },
}  # fmt: skip
"""By preset; `vllm-v1` is not in it, because the defaults of `EngineConfig` are its own."""


def engine_settings(preset: str, max_model_len: int) -> Settings:
    """What `preset` has to say about the settings of an engine whose longest sequence has so many tokens."""
    return _SETTINGS[preset](max_model_len) if preset in _SETTINGS else {}


def refusal(preset: str, name: str, value: Value) -> str | None:
    """Why `preset` cannot have the setting `name` at `value`, and which presets can; None if it can.

    The sentence goes on from the place and the value: "--enable-prefix-caching is true" + this.
    """
    setting = _fixed(preset, name)
    if setting is None or setting.value == value:
        return None
    others = [other for other in ("vllm-v1", *_SETTINGS) if _takes(other, name, value)]
    if len(others) == len(_SETTINGS):
        listed = "any other preset"
    else:
        listed = f"{', '.join(others[:-1])} or {others[-1]}" if len(others) > 1 else "".join(others)
    return (
        f", but the preset {preset} has it at {_shown(setting.value)}: {setting.because}; leave it out, or use {listed}"
    )


def as_in(preset: str, config: EngineConfig, typed: Collection[str] = ()) -> EngineConfig:
    """The settings as the engine `preset` has them: those in `typed` as they are, and the engine's own for what it decides.

    A budget that nobody typed is raised to the longest sequence where prompts are computed whole.
    Raises ConfigError for a typed setting that the engine cannot have, and for settings that contradict each other.
    """
    changes: dict[str, Value] = {}
    for name, setting in engine_settings(preset, config.max_model_len).items():
        if name not in typed:
            changes[name] = setting.value
        elif (said := refusal(preset, name, getattr(config, name))) is not None:
            raise ConfigError(f"{name} is {_shown(getattr(config, name))}{said}")
    whole = not changes.get("enable_chunked_prefill", config.enable_chunked_prefill)
    if whole and "max_num_batched_tokens" not in typed:
        changes["max_num_batched_tokens"] = max(config.max_num_batched_tokens, config.max_model_len)
    return replace(config, **changes)  # type: ignore[arg-type]  # each name with the type of its value


def _fixed(preset: str, name: str) -> Setting | None:
    """What a preset lets nobody change; that does not depend on the longest sequence."""
    setting = engine_settings(preset, 1).get(name)
    return setting if setting is not None and setting.because is not None else None


def _takes(preset: str, name: str, value: Value) -> bool:
    fixed = _fixed(preset, name)
    return fixed is None or fixed.value == value


def _shown(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else value if isinstance(value, str) else f"{value:g}"
