"""The peak of temporary tensors in one engine step, counted tensor by tensor.

Two peaks compete and the larger one is what start-up profiling measures: the widest point of the forward pass, and the
sampler, whose tensors have one number for every row and every vocabulary entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.catalog.dtypes import DTYPE_BYTES
from sim.catalog.gpus import Gpu
from sim.catalog.shape import ModelShape

from .releases import EngineRelease


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One named addend of a peak."""

    name: str
    """What the memory is for."""
    bytes: int
    """Its size."""
    text: str
    """The formula with its numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """One candidate for the peak of temporary memory."""

    phase: str
    """`forward` or `sampler`."""
    terms: tuple[Term, ...]
    """What is alive at the same time."""

    @property
    def bytes(self) -> int:
        """Bytes alive at the peak."""
        return sum(term.bytes for term in self.terms)

    @property
    def text(self) -> str:
        """All terms, with their numbers."""
        return f"{self.phase}: " + " + ".join(f"{term.name} {term.text}" for term in self.terms)


def cublas_workspace_bytes(gpu: Gpu) -> int:
    """Workspace PyTorch keeps for cuBLAS. **Source:** PyTorch 2.x, `CUBLAS_WORKSPACE_CONFIG` defaults: 32 MiB on data-centre
    Hopper and Blackwell, 8.1 MiB elsewhere.
    """
    return 32 << 20 if gpu.compute_capability in ((9, 0), (10, 0)) else (8 << 20) + (128 << 10)


def moe_workspace_bytes(model: ModelShape, tokens: int, tensor_parallel_size: int, element_bytes: int) -> int:
    """The two buffers of a fused mixture-of-experts kernel; 0 for a dense model.

    One row for every (token, visited expert). The first buffer holds the activated hidden rows and later the outputs, the
    second the gate and up rows and later the weighted outputs. **Source:** vLLM `TritonExperts.workspace_shapes`.
    """
    if model.moe is None:
        return 0
    rows = tokens * model.moe.experts_per_token
    width = -(-model.moe.intermediate_size // tensor_parallel_size)
    return rows * (max(width, model.hidden_size) + max(2 * width, model.hidden_size)) * element_bytes


def forward_peak(
    model: ModelShape,
    gpu: Gpu,
    release: EngineRelease,
    *,
    tokens: int,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    dtype: str,
    tuned: bool,
) -> Peak:
    """The widest point of a forward pass over `tokens` tokens on one rank.

    Alive throughout a layer: the residual, the block's input and its output, three tensors `[tokens, hidden_size]`. The widest
    operator adds its own inputs and outputs. `tuned` is True when kernels are tuned in this very pass: the tuner flushes
    the L2 cache with a buffer of its size while the tensors are alive.
    """
    element = DTYPE_BYTES[dtype]
    hidden = model.hidden_size
    terms = [
        Term(
            name="hidden states",
            bytes=3 * tokens * hidden * element,
            text=f"3 x {tokens} tokens x {hidden} x {element} B",
        )
    ]
    name, numbers = max(_operators(model, tensor_parallel_size).items(), key=lambda item: item[1])
    terms.append(Term(name=name, bytes=tokens * numbers * element, text=f"{tokens} tokens x {numbers} x {element} B"))
    terms.append(
        Term(name="cuBLAS workspace", bytes=cublas_workspace_bytes(gpu), text=f"{cublas_workspace_bytes(gpu)} B")
    )
    if tuned and release.compiled:
        terms.append(Term(name="kernel tuner's cache flush", bytes=gpu.l2_cache_bytes, text=f"{gpu.l2_cache_bytes} B"))
    if pipeline_parallel_size > 1:
        terms.append(
            Term(
                name="stage input",
                bytes=2 * tokens * hidden * element,
                text=f"2 x {tokens} tokens x {hidden} x {element} B",
            )
        )
    return Peak(phase="forward", terms=tuple(terms))


def _operators(model: ModelShape, tp: int) -> dict[str, int]:
    """Numbers a token that the wide operators of a layer hold at their peak, inputs and outputs together."""
    found: dict[str, int] = {}
    if model.moe is None or model.moe.first_dense_layers:
        width = -(-model.intermediate_size // tp)
        found["MLP gate, up and product"] = (3 if model.gated_mlp else 2) * width
    if model.moe is not None:
        found["experts' workspaces"] = moe_workspace_bytes(model, 1, tp, 1)
    for kind in model.attention:
        heads = kind.num_heads // tp
        if kind.is_mla:
            # Query, up-projected key and value, the key with its rotary part in place, and the output.
            numbers = heads * (kind.qk_head_dim + kind.head_dim + kind.v_head_dim + kind.qk_head_dim + kind.v_head_dim)
        else:
            # Fused QKV, rotated query and key, and the output.
            kv = kind.kv_heads_per_rank(tp) * kind.head_dim
            numbers = (heads * kind.head_dim + 2 * kv) + (heads * kind.head_dim + kv) + heads * kind.head_dim
        found["attention"] = max(numbers, found.get("attention", 0))
    return found


def sampler_peak(
    model: ModelShape,
    gpu: Gpu,
    release: EngineRelease,
    *,
    tokens: int,
    rows: int,
    tensor_parallel_size: int,
    dtype: str,
) -> Peak:
    """The sampler's peak over `rows` sequences, after a forward pass over `tokens` tokens.

    Logits are gathered, so that the peak does not depend on tensor parallelism. The forward pass's result is still alive.
    """
    element = DTYPE_BYTES[dtype]
    # The logits themselves come in the model's dtype: the counted 2 bytes become 4 for a float32 model.
    per_logit = release.sampler_bytes_per_logit - 2 + element
    vocabulary, hidden = model.vocab_size, model.hidden_size
    terms = [
        Term(
            name="logits and sampling",
            bytes=rows * vocabulary * per_logit,
            text=f"{rows} rows x {vocabulary} x {per_logit} B",
        ),
        Term(
            name="hidden states",
            bytes=(tokens + rows) * hidden * element,
            text=f"({tokens} + {rows}) x {hidden} x {element} B",
        ),
        Term(name="cuBLAS workspace", bytes=cublas_workspace_bytes(gpu), text=f"{cublas_workspace_bytes(gpu)} B"),
    ]
    if release.sampler_rows_buffer:
        programs = min(gpu.sm_count, rows)
        terms.append(
            Term(name="top-k buffer", bytes=programs * vocabulary * 4, text=f"{programs} x {vocabulary} x 4 B")
        )
    workspace = moe_workspace_bytes(model, tokens, tensor_parallel_size, element)
    if workspace and release.moe_workspace_persists:
        terms.append(Term(name="experts' workspaces", bytes=workspace, text=f"{workspace} B"))
    return Peak(phase="sampler", terms=tuple(terms))
