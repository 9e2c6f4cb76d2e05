"""What a language model is made of, in the few numbers from which its memory and its work follow.

A shape knows sizes, not where they came from (`hf_config` reads a file, `models` is a table) and not which GPU it runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.core.config import ConfigError

from .dtypes import DTYPE_BYTES, dtype_name, weight_format
from .layers import AttentionShape, MoeShape
from .weights import rank_weight_tensors, weight_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer: everything that decides how much memory it takes and how much work a token is."""

    name: str
    """How reports call it."""
    architecture: str
    """`model_type` of its configuration file, e.g. `llama`."""
    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the dense feed-forward network."""
    vocab_size: int
    """Entries of the vocabulary, not padded."""
    max_position_embeddings: int
    """Longest sequence it was made for, in tokens."""
    attention: tuple[AttentionShape, ...]
    """The kinds of attention layer."""
    attention_of_layer: tuple[int, ...] = ()
    """Index into `attention` a layer; empty when there is only one kind."""
    moe: MoeShape | None = None
    """The mixture of experts, where there is one."""
    dtype: str = "bfloat16"
    """Format its weights are published in, where they are not quantised."""
    quantization: str | None = None
    """Storage format its published weights have, or None."""
    tie_word_embeddings: bool = False
    """The LM head is the embedding matrix: counted, and stored, once."""
    qkv_bias: bool = False
    """The query, key and value projections have biases."""
    out_bias: bool = False
    """The attention output projection has a bias."""
    mlp_bias: bool = False
    """The feed-forward matrices have biases."""
    gated_mlp: bool = True
    """Three matrices (gate, up, down) instead of two."""
    qk_norm: bool = False
    """Queries and keys are normalised: two vectors of one head's size a layer."""
    attention_sinks: bool = False
    """One learned number a query head (gpt-oss)."""
    norms_per_layer: int = 2
    """Normalisation vectors of hidden size a layer."""
    rotary_dim: int = 0
    """Width of the rotary position table; 0 for the whole head."""
    encoder_parameters: int = 0
    """Parameters of encoders of other media and of what joins them to the language model: stored, and no part of the counts below."""
    notes: tuple[str, ...] = ()
    """What a reader of numbers derived from this shape must know."""

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden_size", "vocab_size", "max_position_embeddings"):
            if getattr(self, field) < 1:
                raise ConfigError(f"model {self.name}: {field} is {getattr(self, field)}; it must be at least 1")
        if self.attention_of_layer and len(self.attention_of_layer) != self.num_layers:
            raise ConfigError(
                f"model {self.name}: {len(self.attention_of_layer)} layer types are given for {self.num_layers} "
                f"layers; one a layer is needed"
            )

    def attention_at(self, layer: int) -> AttentionShape:
        """The attention of layer `layer`, counted from 0."""
        return self.attention[self.attention_of_layer[layer] if self.attention_of_layer else 0]

    def is_moe_layer(self, layer: int) -> bool:
        """True when layer `layer` routes its tokens to experts."""
        return self.moe is not None and layer >= self.moe.first_dense_layers

    @property
    def num_attention_heads(self) -> int:
        """Query heads of the first kind of layer."""
        return self.attention[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the first kind of layer."""
        return self.attention[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Head size of the first kind of layer."""
        return self.attention[0].head_dim

    @property
    def has_window(self) -> bool:
        """True when some layer reads only a sliding window."""
        return any(kind.window is not None for kind in self.attention)

    @property
    def num_parameters(self) -> int:
        """All parameters, tied embeddings once."""
        return sum(tensor.elements for tensor in weight_tensors(self))

    @property
    def active_parameters(self) -> int:
        """Parameters one token meets: all of them, less the experts it does not visit."""
        if self.moe is None:
            return self.num_parameters
        idle = self.moe.num_experts - self.moe.experts_per_token
        experts = sum(tensor.elements for tensor in weight_tensors(self) if tensor.is_expert)
        return self.num_parameters - experts * idle // self.moe.num_experts

    def layers_of_rank(self, pipeline_rank: int, pipeline_parallel_size: int) -> range:
        """Layers of one pipeline stage. What does not divide goes to the stages before the last, from the back.

        **Source:** vLLM `get_pp_indices`, 0.6.4 and later.
        """
        if pipeline_parallel_size > self.num_layers:
            raise ConfigError(
                f"pipeline_parallel_size {pipeline_parallel_size} is more than the {self.num_layers} layers of {self.name}"
            )
        sizes = [self.num_layers // pipeline_parallel_size] * pipeline_parallel_size
        for back in range(2, self.num_layers % pipeline_parallel_size + 2):
            sizes[-back] += 1
        start = sum(sizes[:pipeline_rank])
        return range(start, start + sizes[pipeline_rank])

    def kv_bytes_per_token(
        self,
        kv_cache_dtype: str = "auto",
        tensor_parallel_size: int = 1,
        *,
        layers: Sequence[int] | None = None,
        windowed: bool = True,
        dtype: str | None = None,
    ) -> int:
        """KV bytes of one token on one rank, over `layers` (all by default).

        `windowed=False` leaves out sliding-window layers, whose KV stops growing at the window: what a long sequence
        costs a token. With them it is an upper bound.
        """
        chosen = range(self.num_layers) if layers is None else layers
        kinds = [self.attention_at(layer) for layer in chosen]
        return sum(
            kind.kv_bytes_per_token(kv_cache_dtype, dtype or self.dtype, tensor_parallel_size)
            for kind in kinds
            if windowed or kind.window is None
        )

    def kv_bytes(self, tokens: int, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1) -> int:
        """KV bytes of one sequence of `tokens` tokens on one rank, each window layer holding at most its window."""
        return sum(
            min(tokens, kind.window or tokens)
            * kind.kv_bytes_per_token(kv_cache_dtype, self.dtype, tensor_parallel_size)
            for kind in map(self.attention_at, range(self.num_layers))
        )

    def weight_bytes(
        self,
        dtype: str | None = None,
        quantization: str | None = "auto",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        pipeline_rank: int = 0,
    ) -> int:
        """Bytes of the weights on one rank, as numbers to be stored; the allocator's rounding is the ledger's matter.

        `quantization="auto"` is how the model was published; None stores everything in `dtype`.
        """
        element = DTYPE_BYTES[dtype_name(dtype or self.dtype)]
        form = weight_format(self.quantization if quantization == "auto" else quantization)
        tensors = rank_weight_tensors(self, tensor_parallel_size, pipeline_parallel_size, pipeline_rank)
        return sum(tensor.stored_bytes(element, form) for tensor in tensors)

    def check_parallel(self, tensor_parallel_size: int, pipeline_parallel_size: int = 1) -> None:
        """Raise `ConfigError` unless the model can be divided so.

        **Source:** vLLM: query heads must divide evenly; KV heads divide, or are replicated a whole number of times.
        """
        for name, value in (
            ("tensor_parallel_size", tensor_parallel_size),
            ("pipeline_parallel_size", pipeline_parallel_size),
        ):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        for kind in self.attention:
            if kind.num_heads % tensor_parallel_size:
                fits = [size for size in range(1, kind.num_heads + 1) if kind.num_heads % size == 0 and size <= 16]
                raise ConfigError(
                    f"tensor_parallel_size {tensor_parallel_size} does not divide the {kind.num_heads} attention heads "
                    f"of {self.name}; "
                    f"sizes that do: {', '.join(map(str, fits))}"
                )
            high, low = max(kind.num_kv_heads, tensor_parallel_size), min(kind.num_kv_heads, tensor_parallel_size)
            if not kind.is_mla and high % low:
                raise ConfigError(
                    f"tensor_parallel_size {tensor_parallel_size} neither divides nor is a multiple of "
                    f"the {kind.num_kv_heads} KV heads of {self.name}"
                )
        self.layers_of_rank(0, pipeline_parallel_size)
