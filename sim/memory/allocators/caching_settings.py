"""PyTorch's caching allocator, settings: what PYTORCH_ALLOC_CONF says.

**Source:** c10/core/AllocatorConfig.h/.cpp and c10/cuda/CUDAAllocatorConfig.cpp, PyTorch 2.5 to 2.13.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

_MIB = 1 << 20
_INTERVALS = 16
"""Intervals of `roundup_power2_divisions`: sizes from 1 MiB to 64 GiB, one for each power of two."""
_LEAST_MIB = {"max_split_size_mb": 20, "max_non_split_rounding_mb": 20, "large_segment_size_mb": 11}
"""The smallest value PyTorch accepts."""

IGNORED_KEYS = frozenset(
    {
        "backend",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "throw_on_cudamalloc_oom",
        "graph_capture_record_stream_reuse",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "pinned_num_register_threads",
        "pinned_use_background_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
    }
)
"""Keys that PyTorch knows and that do not change where this model puts device memory."""

MODELLED_KEYS = (
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "large_segment_size_mb",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
    "expandable_segments",
    "per_process_memory_fraction",
)


class AllocatorConfError(ValueError):
    """A PYTORCH_ALLOC_CONF string that cannot be followed. Says where and what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachingSettings:
    """Settings of the caching allocator; the defaults are PyTorch's."""

    max_split_size_bytes: int | None = None
    """Blocks of this size and more are never split, and serve only requests of that size; None is no limit."""
    max_non_split_rounding_bytes: int = 20 * _MIB
    """A request above `max_split_size_bytes` takes a cached block only if less than this is wasted."""
    large_segment_size_bytes: int = 20 * _MIB
    """Segments for requests between 1 and 10 MiB, and the pages of expandable segments of the large pool."""
    garbage_collection_threshold: float = 0.0
    """Share of the allowed memory above which old cached blocks are returned; 0 is never. Needs a memory fraction."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS
    """Steps between two powers of two that sizes are rounded up to, for 1 MiB, 2 MiB, … 32 GiB and above; 0 or 1 is none."""
    expandable_segments: bool = False
    """Grow one virtual range for each stream and pool by mapping pages, instead of separate segments."""
    per_process_memory_fraction: float | None = None
    """Share of the device that this process may reserve; None is no limit."""
    search_again_after_events: bool = False
    """Search the pool again after waiting for pending frees. False is PyTorch up to 2.13 (issue #189504): such an allocation
    fails although a fitting block just became free, and the identical retry succeeds."""
    ignored: tuple[str, ...] = ()
    """Settings that were given and make no difference here, as `key:value`."""

    def __post_init__(self) -> None:
        if len(self.roundup_power2_divisions) != _INTERVALS:
            raise ValueError(
                f"roundup_power2_divisions needs {_INTERVALS} entries, not {len(self.roundup_power2_divisions)}"
            )
        fraction = self.per_process_memory_fraction
        if fraction is not None and not 0 < fraction <= 1:
            raise ValueError(f"per_process_memory_fraction lies in (0, 1], not {fraction}")

    def divisions_for(self, size_bytes: int) -> int:
        """The setting of `roundup_power2_divisions` for one size; the first interval holds everything below 2 MiB."""
        index = size_bytes.bit_length() - _MIB.bit_length()
        return self.roundup_power2_divisions[min(max(index, 0), _INTERVALS - 1)]

    @property
    def collects_garbage(self) -> bool:
        """Garbage collection is only done under a memory fraction."""
        return self.per_process_memory_fraction is not None and self.garbage_collection_threshold > 0


def parse_alloc_conf(conf: str, *, strict: bool = True) -> CachingSettings:
    """Read a string such as `expandable_segments:True,max_split_size_mb:128`.

    With `strict=False` keys that are not known (a newer PyTorch's) are collected in `ignored` instead of refused.

    Raises AllocatorConfError that names the key and what it may hold.
    """
    settings = CachingSettings()
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", re.sub(r"\s", "", conf)):
        key, colon, value = item.partition(":")
        if not colon or not value:
            raise AllocatorConfError(f"{item!r} in {conf!r} is not of the form key:value")
        if key in MODELLED_KEYS:
            settings = _with(settings, key, value)
        elif key in IGNORED_KEYS or not strict:
            if key == "backend" and value != "native":
                raise AllocatorConfError(f"backend:{value} is another allocator; this model is of backend:native")
            settings = replace(settings, ignored=(*settings.ignored, item))
        else:
            near = difflib.get_close_matches(key, [*MODELLED_KEYS, *IGNORED_KEYS], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(MODELLED_KEYS)}"
            raise AllocatorConfError(f"{key!r} is no setting of PyTorch's allocator{hint}")
    return settings


def _with(settings: CachingSettings, key: str, value: str) -> CachingSettings:
    match key:
        case "max_split_size_mb":
            return replace(settings, max_split_size_bytes=_mebibytes(key, value))
        case "max_non_split_rounding_mb":
            return replace(settings, max_non_split_rounding_bytes=_mebibytes(key, value))
        case "large_segment_size_mb":
            return replace(settings, large_segment_size_bytes=_mebibytes(key, value))
        case "garbage_collection_threshold":
            return replace(settings, garbage_collection_threshold=_share(key, value, below_one=True))
        case "per_process_memory_fraction":
            return replace(settings, per_process_memory_fraction=_share(key, value, below_one=False))
        case "expandable_segments":
            if value not in ("True", "False"):
                raise AllocatorConfError(f"expandable_segments is True or False, not {value!r}")
            return replace(settings, expandable_segments=value == "True")
        case _:
            return replace(settings, roundup_power2_divisions=_divisions(value))


def _mebibytes(key: str, value: str) -> int:
    if not value.isdecimal() or int(value) < _LEAST_MIB[key]:
        raise AllocatorConfError(f"{key} is a whole number of MiB, at least {_LEAST_MIB[key]}, not {value!r}")
    return int(value) * _MIB


def _share(key: str, value: str, *, below_one: bool) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1 or (below_one and share == 1):
        raise AllocatorConfError(f"{key} lies between 0 and 1, not {value!r}")
    return share


def _divisions(value: str) -> tuple[int, ...]:
    """`8` for all sizes, or a list by size in MiB: `[256:1,512:2,1024:4,>:8]`.

    The first entry also holds below its size, `>` above the last size named (parsers before c10/core/AllocatorConfig.cpp
    was split off, up to about 2.7, also overwrote that last size).
    """
    if not value.startswith("["):
        return (_division(value, zero=False),) * _INTERVALS
    if not value.endswith("]"):
        raise AllocatorConfError(f"roundup_power2_divisions: the list {value!r} is not closed")
    divisions = [0] * _INTERVALS
    last = -1
    for position, item in enumerate(value[1:-1].split(",")):
        size, colon, text = item.partition(":")
        if not colon:
            raise AllocatorConfError(f"roundup_power2_divisions: {item!r} is not of the form size:divisions")
        division = _division(text, zero=True)
        if size == ">":
            divisions[last + 1 :] = [division] * (_INTERVALS - last - 1)
            continue
        if not size.isdecimal() or not _is_power_of_two(int(size)):
            raise AllocatorConfError(f"roundup_power2_divisions: sizes are powers of two in MiB, not {size!r}")
        last = min(int(size).bit_length() - 1, _INTERVALS - 1)
        if position == 0:
            divisions[:last] = [division] * last
        divisions[last] = division
    return tuple(divisions)


def _division(text: str, *, zero: bool) -> int:
    if text.isdecimal() and ((zero and int(text) == 0) or _is_power_of_two(int(text))):
        return int(text)
    raise AllocatorConfError(
        f"roundup_power2_divisions: divisions are powers of two{' or 0' if zero else ''}, not {text!r}"
    )


def _is_power_of_two(value: int) -> bool:
    return value > 0 and not value & (value - 1)
