"""What changed between engine releases in how memory is measured and spent. Ledgers are only right for a release."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sim.core.config import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRelease:
    """The memory behaviour of vLLM from one release on (V1 from 0.8, V0 before)."""

    since: tuple[int, int]
    """First release, (major, minor)."""
    sampler_bytes_per_logit: int
    """Bytes alive at the sampler's peak for one logit (one row, one vocabulary entry)."""
    sampler_rows_buffer: bool
    """The top-k / top-p kernel keeps one fp32 row a streaming multiprocessor."""
    moe_workspace_persists: bool
    """The mixture-of-experts workspace stays allocated after the forward pass, under the sampler's peak."""
    graphs_in_budget: bool
    """An estimate of CUDA graph memory is taken off the KV pool; before, graphs were captured on top of the budget."""
    compiled: bool
    """The forward pass is compiled: its first run tunes kernels with tensors alive."""


# Bytes a logit, counted tensor by tensor:
#   0.17 and later, a Triton top-k / top-p kernel in place: bf16 logits 2 + fp32 copy 4 + probabilities 4 + exponential
#   noise 4 = 14;
#   V1 before that, by sorting: bf16 logits 2 + fp32 copy 4 + sorted values 4 + sorted indices 8 + index input 8 +
#   radix-sort scratch 12 = 38;
#   V0, whose profile did not reach the sort: bf16 logits 2 + fp32 copy 4 = 6.
# Public figures: Qwen3-14B with 1,024 sequences 5.64 GiB at 0.15 and 0.16, 2.23 at 0.17; Qwen3-0.6B on V0 0.23 GiB.
_RELEASES = (
    EngineRelease(
        since=(0, 21),
        sampler_bytes_per_logit=14,
        sampler_rows_buffer=True,
        moe_workspace_persists=True,
        graphs_in_budget=True,
        compiled=True,
    ),
    EngineRelease(
        since=(0, 17),
        sampler_bytes_per_logit=14,
        sampler_rows_buffer=True,
        moe_workspace_persists=True,
        graphs_in_budget=False,
        compiled=True,
    ),
    EngineRelease(
        since=(0, 8),
        sampler_bytes_per_logit=38,
        sampler_rows_buffer=False,
        moe_workspace_persists=False,
        graphs_in_budget=False,
        compiled=True,
    ),
    EngineRelease(
        since=(0, 6),
        sampler_bytes_per_logit=6,
        sampler_rows_buffer=False,
        moe_workspace_persists=False,
        graphs_in_budget=False,
        compiled=False,
    ),
)

DEFAULT_ENGINE_VERSION = "0.29"
"""The release whose behaviour is assumed unless another is named."""


def engine_release(version: str) -> EngineRelease:
    """The behaviour of a vLLM release, e.g. `0.19` or `0.19.1`.

    Raises:
        ConfigError: not a version, or older than the first one whose accounting is known.
    """
    match = re.fullmatch(r"v?(\d+)\.(\d+)([.+a-z-].*)?", version.strip())
    if not match:
        raise ConfigError(f"engine version {version!r} is not a vLLM release such as 0.19 or {DEFAULT_ENGINE_VERSION}")
    number = (int(match[1]), int(match[2]))
    for release in _RELEASES:
        if number >= release.since:
            return release
    raise ConfigError(
        f"engine version {version} is older than 0.6, the first release whose memory accounting kvtwin knows"
    )
