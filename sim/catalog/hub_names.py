"""The names that models of the catalogue have on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterable

_OWNERS = {
    "meta-llama": (
        "Llama-2-7b-hf", "Llama-2-7b-chat-hf", "Llama-2-13b-hf", "Llama-2-13b-chat-hf", "Llama-2-70b-hf",
        "Llama-2-70b-chat-hf", "Meta-Llama-3-8B", "Meta-Llama-3-70B", "Llama-3.1-8B", "Llama-3.1-70B",
        "Llama-3.1-405B", "Meta-Llama-3.1-8B", "Meta-Llama-3.1-70B", "Meta-Llama-3.1-405B", "Llama-3.2-1B",
        "Llama-3.2-3B", "Llama-3.3-70B",
    ),
    "codellama": ("CodeLlama-7b-hf", "CodeLlama-7b-Instruct-hf"),
    "mistralai": (
        "Mistral-7B-v0.2", "Mistral-7B-Instruct-v0.2", "Mistral-7B-v0.3", "Mistral-7B-Instruct-v0.3",
        "Mistral-Nemo-Instruct-2407", "Mistral-Nemo-Base-2407", "Mixtral-8x7B-v0.1", "Mixtral-8x7B-Instruct-v0.1",
    ),
    "facebook": ("opt-13b", "opt-66b"),
    "ibm-granite": ("granite-3.1-8b-instruct", "granite-3.1-8b-base"),
    "llava-hf": ("llava-v1.6-mistral-7b-hf",),
    "microsoft": ("phi-4",),
    "openai": ("gpt-oss-20b", "gpt-oss-120b"),
    "deepseek-ai": ("DeepSeek-V2-Lite", "DeepSeek-V2-Lite-Chat", "DeepSeek-V3", "DeepSeek-R1", "DeepSeek-R1-0528-Qwen3-8B"),
    "moonshotai": ("Kimi-K2-Instruct", "Kimi-K2-Base"),
    "google": ("gemma-2-9b", "gemma-2-9b-it", "gemma-4-26B-A4B", "gemma-4-26B-A4B-it"),
    "Qwen": ("Qwen2-7B",),
}  # fmt: skip

# Where the catalogue's name does not follow from the hub's. Models that share a shape share an entry.
_SHAPE_OF = {
    "mistral-nemo-instruct-2407": "mistral-nemo-12b",
    "mistral-nemo-base-2407": "mistral-nemo-12b",
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-7b-v0.2": "mistral-7b",
    "llama-3.3-70b": "llama-3.1-70b",
    "deepseek-r1": "deepseek-v3",
    "qwen2-7b": "qwen2.5-7b",
}


def hub_aliases(names: Iterable[str]) -> dict[str, str]:
    """Alias -> catalogue name, lower case, for the catalogue's `names`: hub names with and without owner, and -instruct forms."""
    known = set(names)
    found: dict[str, str] = dict(_SHAPE_OF)
    listed = [(owner, model) for owner, models in _OWNERS.items() for model in models]
    # The Qwen family is regular: qwen2.5-7b is Qwen/Qwen2.5-7B, with -Instruct and -Base forms.
    listed += [("Qwen", name) for name in known if name.startswith("qwen")]
    for owner, model in listed:
        name = shape_name(model.lower(), known)
        for ending in ("", "-instruct", "-base"):
            found[f"{owner}/{model}{ending}".lower()] = name
            found[f"{model}{ending}".lower()] = name
    found |= {f"{name}-instruct": name for name in known}
    return {alias: name for alias, name in found.items() if alias not in known}


def shape_name(model: str, known: set[str]) -> str:
    """The catalogue's name for a hub name without its owner, lower case.

    >>> shape_name("meta-llama-3.1-8b-instruct", {"llama-3.1-8b"})
    'llama-3.1-8b'
    """
    name = model.removeprefix("meta-")
    for ending in ("-hf", "-instruct", "-chat", "-base", "-it", "-v0.1"):
        if name in known or name in _SHAPE_OF:
            break
        name = name.removesuffix(ending)
    if name not in known and name not in _SHAPE_OF:
        name = name.replace("-instruct", "")  # mistral-7b-instruct-v0.3
    return name if name in known else _SHAPE_OF[name]
