"""What is measured: a model in its formats on a device, and the range of steps."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from calibration.errors import CalibrationError
from sim.catalog.dtypes import dtype_name, kv_cache_dtype_name
from sim.catalog.models import MODELS
from sim.catalog.shape import ModelShape
from sim.core.need import blocks_for

from .design import Limits

DEFAULT_MODEL = {"cpu": "tiny-llama-test", "cuda": "llama-3.2-1b"}
"""What is measured when no model is named, by device."""
LIMITS = {"cpu": (1024, 64, 2048), "cuda": (4096, 256, 8192)}
"""Tokens a step, sequences a step and longest sequence that are timed when nothing else is said, by device."""
POOL_BYTES = {"cpu": 1 << 30, "cuda": 16 << 30}
"""Most bytes of KV pool that are taken for it."""
HOST_BLOCKS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSettings:
    """What to measure."""

    model: str
    """A name of the catalogue, or the path of a `config.json`."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    seed: int = 0
    """Root of the design, its order, weights and contents."""
    clock: str = "wall"
    """What times a step on the CPU: `wall`, or `thread`, which stands still while other processes have the core."""

    def limits(self, shape: ModelShape) -> Limits:
        """The range of steps, and a pool with room for the widest of them, as far as the memory set aside for it goes.

        Raises: CalibrationError for a sequence that is longer than the model takes.
        """
        if self.max_model_len is not None and self.max_model_len > shape.max_position_embeddings:
            raise CalibrationError(
                f"--max-model-len is {self.max_model_len}; {shape.name} takes 1 to {shape.max_position_embeddings} tokens"
            )
        kind = "cuda" if self.device.startswith("cuda") else "cpu"
        tokens, seqs, longest = LIMITS[kind]
        tokens, seqs = self.max_num_batched_tokens or tokens, self.max_num_seqs or seqs
        longest = min(self.max_model_len or longest, shape.max_position_embeddings)
        wanted = seqs * blocks_for(longest, self.block_size) + 4 * HOST_BLOCKS
        return Limits(
            max_num_batched_tokens=tokens,
            max_num_seqs=min(seqs, tokens),
            max_model_len=longest,
            block_size=self.block_size,
            num_gpu_blocks=max(1, min(wanted, POOL_BYTES[kind] // self.block_bytes(shape))),
            num_cpu_blocks=HOST_BLOCKS,
        )

    def block_bytes(self, shape: ModelShape) -> int:
        """Bytes of one KV block, all layers together."""
        return self.block_size * shape.kv_bytes_per_token(self.kv_cache_dtype, 1, dtype=self.weights_dtype(shape))

    def weights_dtype(self, shape: ModelShape) -> str:
        """By its canonical name: a run that says bf16 is one of bfloat16."""
        return dtype_name(shape.dtype if self.dtype == "auto" else self.dtype)

    def cache_dtype(self, shape: ModelShape) -> str:
        """By its canonical name, or that of the weights."""
        return self.weights_dtype(shape) if self.kv_cache_dtype == "auto" else kv_cache_dtype_name(self.kv_cache_dtype)

    def formats(self, shape: ModelShape) -> dict[str, Any]:
        """The part `settings` of `run.json`."""
        return {
            "dtype": self.weights_dtype(shape),
            "kv_cache_dtype": self.cache_dtype(shape),
            "seed": self.seed,
            "clock": self.clock,
            "tensor_parallel_size": 1,
        }

    def model_facts(self, shape: ModelShape) -> dict[str, Any]:
        """The part `model` of `run.json`: name and sizes; of a configuration file the file's own name, not where it lies."""
        return {
            "name": shape.name,
            "catalogue": self.model in MODELS,
            **{size: getattr(shape, size) for size in ("num_layers", "hidden_size", "intermediate_size", "vocab_size")},
            "num_parameters": shape.num_parameters,
            "attention": [asdict(kind) for kind in shape.attention],
        }
