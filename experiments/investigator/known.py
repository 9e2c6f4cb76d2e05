"""What is known about the engine: given by the user, or read off the text of a log or report.

Knows how flags and start-up lines spell their settings. What the user gives wins over what a text says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from sim.catalog.gpus import GPU_ALIASES, GPUS, Gpu
from sim.catalog.models import MODEL_ALIASES, MODELS
from sim.catalog.shape import ModelShape

from .sizes import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Settings and shapes, None where nothing says."""

    shape: ModelShape | None = None
    """The model's shape, when the catalogue has it."""
    model_name: str | None = None
    """The model as it was called, when the catalogue does not have it."""
    gpu: Gpu | None = None
    """The GPU, when the catalogue has it."""
    engine: str | None = None
    """`vllm`, `sglang`, ..."""
    engine_version: str | None = None
    tensor_parallel_size: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    kv_cache_dtype: str | None = None
    num_gpu_blocks: int | None = None
    vocab_size: int | None = None
    num_heads: int | None = None
    prompt_tokens: tuple[int, ...] = ()
    """Prompt lengths that the text states, in tokens."""
    batch_size: int | None = None
    """Sequences computed together."""
    speculative: bool = False
    """A draft model, or speculative decoding, is configured."""
    lora: bool = False
    """LoRA adapters are configured."""
    num_parameters: float | None = None
    """Parameters that the model's name or the text states, as in `32B`; None where the shape is known or nothing says."""
    works_at_utilization: float | None = None
    """A share of the GPU with which, by the text, it works."""
    weight_bytes: float | None = None
    """Weights of one rank: from the shape, or from the parameter count in the model's name."""
    weight_basis: str = ""
    """Where `weight_bytes` comes from."""
    weight_format_stated: bool = False
    """The text says in which format the weights are stored; otherwise the published one, or 16 bits, was assumed."""

    @property
    def tp(self) -> int:
        """Tensor parallelism, 1 where nothing says."""
        return self.tensor_parallel_size or 1

    @property
    def vocabulary(self) -> int | None:
        """Entries of the vocabulary."""
        return self.shape.vocab_size if self.shape else self.vocab_size

    @property
    def kv_bytes_per_token(self) -> int | None:
        """KV bytes of a token on one rank, from the model's shape."""
        if self.shape is None:
            return None
        return self.shape.kv_bytes_per_token(self.kv_cache_dtype or "auto", self.tp)

    def over(self, other: Known) -> Known:
        """These settings, with those of `other` where these have none."""
        empty = (None, (), False, "")
        gaps = {f.name: getattr(other, f.name) for f in fields(self) if getattr(self, f.name) in empty}
        return replace(self, **gaps)


_EQ = r"['\"]?\s*(?:[=:]|\s|\()\s*['\"]?"


def _whole(text: str) -> int:
    return int(text.replace(",", "").replace("_", ""))


_SETTINGS: tuple[tuple[str, Callable[[str], Any], str], ...] = (
    (
        "tensor_parallel_size",
        _whole,
        rf"tensor[_-]parallel[_-]size{_EQ}(\d+)|(?:^|\s)-?-tp(?:-size)?[ =](\d+)|\bTP[ =]?(\d+)\b|"
        rf"\btp_size={_EQ}?(\d+)",
    ),
    (
        "gpu_memory_utilization",
        float,
        rf"gpu[_-]memory[_-]utilization{_EQ}(0?\.\d+|1\.0*)|\butil(?:i[sz]ation)?{_EQ}(0\.\d+)|"
        rf"mem[_-]fraction[_-]static{_EQ}(0?\.\d+)",
    ),
    ("max_num_seqs", _whole, rf"max[_-]num[_-]seqs{_EQ}(\d+)|with (\d+) dummy requests"),
    (
        "max_num_batched_tokens",
        _whole,
        rf"max[_-]num[_-]batched[_-]tokens{_EQ}(\d+)|chunked[_-]prefill[_-]size{_EQ}(\d+)",
    ),
    ("max_model_len", _whole, rf"max[_-]model[_-]len{_EQ}(\d+)|max[_-]seq[_-]len{_EQ}(\d+)"),
    ("block_size", _whole, rf"\bblock[_-]size{_EQ}(\d+)"),
    ("num_gpu_blocks", _whole, rf"num[_-]gpu[_-]blocks(?:[_-]override)?{_EQ}(\d+)|# (?:GPU|cuda) blocks: (\d+)"),
    ("vocab_size", _whole, rf"vocab(?:ulary)?(?:[_ ]size)?(?: of)?{_EQ}(\d[\d,]{{3,7}})"),
    ("num_heads", _whole, rf"num_attention_heads{_EQ}(\d+)|\b(\d+) (?:query |attention |q )?heads\b"),
    ("batch_size", _whole, rf"\bbatch[_ -]?size{_EQ}(\d+)|\b(\d+) (?:seqs|sequences)\b"),
    ("kv_cache_dtype", str.lower, rf"kv[_-]cache[_-]dtype{_EQ}(fp8\w*|int8_per_token_head|nvfp4|bfloat16|float16)"),
)
_COMPILED = tuple((name, make, re.compile(pattern, re.IGNORECASE)) for name, make, pattern in _SETTINGS)

_PROMPT = re.compile(
    r"(?:prompts?|input|context|seq(?:uence)?)(?:[_ -]?(?:len(?:gth)?s?|tokens|of))*\s*[=:~≈]?\s*~?(\d[\d,]*(?:\.\d+)?)(k)?\b"
    r"|~?(\d[\d,]*(?:\.\d+)?)\s?(k)?[ -]tokens?(?:[ -](?:prompts?|inputs?|contexts?))",
    re.IGNORECASE,
)
_WORKS_AT = re.compile(
    r"\b(0\.\d+)\s+(?:still\s+)?(?:works|boots|starts|runs|is (?:fine|ok)|serves)\b|"
    r"(?:works|boots|starts|runs|fine|ok|serves)(?:\s+\w+){0,2}\s+(?:at|with)\s+(0\.\d+)\b",
    re.IGNORECASE,
)
_SPECULATIVE = re.compile(
    r"speculative[_-]config(?!\s*=\s*None)|speculative[_-]model|num_speculative_tokens|draft[_ ](?:model|worker)|"
    r"spec_decode|speculative decoding",
    re.IGNORECASE,
)
_LORA = re.compile(r"enable[_-]lora\b(?!\s*=\s*False)|lora adapters?|max_loras|lora_modules", re.IGNORECASE)
_VERSION = re.compile(
    r"vLLM(?: API server| engine \(v)?(?: version)?\s+\(?v?(\d+\.\d+(?:\.\d+)?)|\bv(0\.\d+\.\d+)\b", re.IGNORECASE
)
_ENGINE = re.compile(
    r"\b(vllm|sglang|tgi|text-generation|trt-?llm|tensorrt|lmdeploy)|\bmax[_ -]batch[_ -](?:total|prefill)[_ -]tokens",
    re.IGNORECASE,
)
_PARAMETERS = re.compile(
    r"(?<![\d.])(\d{1,3}(?:\.\d+)?)(B|M)(?![a-z])(?![- ]?(?:tokens|blocks|context))", re.IGNORECASE
)
_FORMATS = ((r"nvfp4|mxfp4|int4|awq|gptq|4bit|4-bit|bnb|w4a", 0.57), (r"fp8|int8|w8a8|8bit|8-bit", 1.0))


def read_known(text: str) -> Known:
    """Settings that `text` states. The first mention of each counts: logs print the configuration before they fail."""
    values: dict[str, Any] = {}
    for name, make, pattern in _COMPILED:
        match = pattern.search(text)
        if match:
            values[name] = make(next(group for group in match.groups() if group))
    prompts = [
        int(float((match[1] or match[3]).replace(",", "")) * (1000 if match[2] or match[4] else 1))
        for match in _PROMPT.finditer(text)
    ]
    version, engine, works = _VERSION.search(text), _ENGINE.search(text), _WORKS_AT.search(text)
    return Known(
        **values,
        shape=_shape_in(text),
        gpu=_gpu_in(text),
        engine=(engine[1] or "tgi").lower() if engine else None,
        engine_version=(version[1] or version[2]) if version else None,
        prompt_tokens=tuple(dict.fromkeys(length for length in prompts if length >= 16)),
        works_at_utilization=float(works[1] or works[2]) if works else None,
        speculative=bool(_SPECULATIVE.search(text)),
        lora=bool(_LORA.search(text)),
    )


def with_weights(known: Known, text: str) -> Known:
    """`known` with the weights of a rank: from its shape, else from a parameter count in the model's name or the text."""
    if known.weight_bytes is not None:
        return known
    name = known.model_name or ""
    stored = next((size for pattern, size in _FORMATS if re.search(pattern, f"{name} {text}", re.IGNORECASE)), None)
    plain = re.search(r"\b(?:fp16|bf16|float16|bfloat16|half precision)\b", text, re.IGNORECASE)
    known = replace(known, weight_format_stated=stored is not None or plain is not None)
    if known.shape is not None:
        shape = known.shape
        if stored is not None and shape.quantization is None:
            size: float = shape.num_parameters * stored / known.tp
            basis = f"{shape.num_parameters / 1e9:.2f} B parameters x {stored:g} B / TP {known.tp}"
        else:
            size = shape.weight_bytes(tensor_parallel_size=known.tp)
            basis = f"shape of {shape.name}, TP {known.tp}"
        return replace(known, weight_bytes=size, weight_basis=basis)
    named = _PARAMETERS.search(known.model_name or "") or _PARAMETERS.search(text)
    if not named:
        return known
    count = float(named[1]) * (1e9 if named[2].upper() == "B" else 1e6)
    size = count * (stored or 2.0) / known.tp
    basis = f"{named[0]} parameters in the name x {stored or 2:g} B / TP {known.tp}"
    return replace(known, weight_bytes=size, weight_basis=basis, num_parameters=count)


def fits_message(gpu: Gpu | None, total_bytes: float | None) -> Gpu | None:
    """The GPU, unless the message states a memory size that is not its own (another card of the same name)."""
    if gpu is None or total_bytes is None or abs(gpu.total_bytes - total_bytes) <= 0.02 * total_bytes + 0.02 * GIB:
        return gpu
    return None


def _shape_in(text: str) -> ModelShape | None:
    """The model of the catalogue that the text names; the longest name wins, then the first."""
    lowered = text.lower()
    best: tuple[int, int, str] | None = None
    for alias, name in (*((name, name) for name in MODELS), *MODEL_ALIASES.items()):
        at = lowered.find(alias)
        if at < 0 or not _is_word(lowered, at, at + len(alias)):
            continue
        if best is None or (-len(alias), at) < best[:2]:
            best = (-len(alias), at, name)
    return MODELS[best[2]] if best else None


def _gpu_in(text: str) -> Gpu | None:
    lowered = text.lower().replace(" ", "-")
    names = {**{name: name for name in GPUS}, **GPU_ALIASES}
    found = [alias for alias in names if (at := lowered.find(alias)) >= 0 and _is_word(lowered, at, at + len(alias))]
    found = [alias for alias in found if not alias.isdigit()]
    return GPUS[names[max(found, key=len)]] if found else None


def _is_word(text: str, start: int, end: int) -> bool:
    """True when `text[start, end)` is not a piece of a longer name, such as `llama-3.1-8b` in `llama-3.1-8b-mine`."""
    before, after = text[start - 1 : start], text[end : end + 1]
    return not before.isalnum() and not after.isalnum() and not (after == "." and text[end + 1 : end + 2].isdigit())
