"""Weights as they lie on disk: which folder a model's source means, and its `*.safetensors` read one tensor at a time.

Read so, a model takes its own size and that of one layer while it is loaded, not twice its size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sim.catalog.models import MODELS
from sim.core.config import ConfigError

from .require import require

INDEX = "model.safetensors.index.json"
PLAIN = ("torch.bfloat16", "torch.float16", "torch.float32")
"""Formats on disk that can be run as they are."""


def weights_folder(source: str | None) -> Path | None:
    """The folder whose `*.safetensors` are the weights of `source`, a `config.json` or its folder.

    None where weights are drawn: for a name of the catalogue, and where no such file lies beside the configuration.
    """
    if source is None or source in MODELS:
        return None
    path = Path(source)
    folder = path if path.is_dir() else path.parent if path.is_file() else None
    return folder if folder is not None and any(folder.glob("*.safetensors")) else None


class FolderWeights(Mapping[str, Any]):
    """Tensors by their Hugging Face names, read when they are asked for. Made by `open_folder`."""

    def __init__(self, files: Mapping[str, Any], names: Mapping[str, str], folder: Path) -> None:
        """`files` are open, by name; `names` says in which of them each tensor is."""
        self._files, self._names, self._folder = files, names, folder

    def __getitem__(self, name: str) -> Any:
        file = self._names[name]
        with _readable(self._folder / file):
            tensor = self._files[file].get_tensor(name)
        if str(tensor.dtype) not in PLAIN:
            raise ConfigError(
                f"{self._folder / file}: {name} is stored as {str(tensor.dtype).removeprefix('torch.')}; executor torch runs plain "
                "weights only, bfloat16, float16 or float32"
            )
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def open_folder(folder: Path) -> Iterator[FolderWeights]:
    """The weights in the `*.safetensors` files of a folder; of those only that its index names, where it has one.

    Raises:
        ConfigError: there are none, or one cannot be read; the message names it.
        MissingExtraError: the package safetensors is not installed.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{folder}: no *.safetensors file")
    open_file = require("safetensors", "reading safetensors").safe_open
    named = _indexed(folder / INDEX)
    if named is not None:
        missing = sorted(named - {path.name for path in paths})
        if missing:
            raise ConfigError(
                f"{folder}: {missing[0]} is missing, one of {len(named)} files that {INDEX} names"
                f"{f' ({len(missing)} are missing)' if len(missing) > 1 else ''}; download the model again"
            )
        paths = [path for path in paths if path.name in named]
    files: dict[str, Any] = {}
    names: dict[str, str] = {}
    with ExitStack() as stack:
        for path in paths:
            with _readable(path):
                files[path.name] = stack.enter_context(open_file(path, framework="pt", device="cpu"))
                names |= dict.fromkeys(files[path.name].keys(), path.name)
        yield FolderWeights(files, names, folder)


def _indexed(index: Path) -> set[str] | None:
    """The files that an index names; None where there is no index."""
    if not index.is_file():
        return None
    try:
        return {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{index}: not an index of weights ({type(error).__name__}: {error}); a JSON object with a weight_map from tensors to "
            "files is needed"
        ) from None


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What goes wrong in a file is said of that file."""
    unreadable = require("safetensors", "reading safetensors").SafetensorError
    try:
        yield
    except (unreadable, OSError) as error:
        size = f", {path.stat().st_size:,} bytes" if path.is_file() else ""
        raise ConfigError(
            f"{path}{size}: cannot be read as safetensors ({error}); it may be cut off, or not downloaded (a Git LFS pointer)"
        ) from None
