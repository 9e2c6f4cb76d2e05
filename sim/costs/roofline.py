"""The embedded default prices: a roofline over a model's matrices and a GPU's data sheet.

Every operator takes the longer of its arithmetic and its memory traffic, at stated shares of the peak rates. The prices
are predictions to start with, within some tens of per cent of a real engine; a calibrated profile is the cure.

A decode step of n sequences that read S tokens of KV costs exactly `A(n) + B * S` femtoseconds, both integers: that is
what lets a stretch of steps be summed in closed form.
"""

from __future__ import annotations

from sim.catalog.dtypes import DTYPE_BYTES, weight_format
from sim.catalog.gpus import Gpu
from sim.catalog.shape import ModelShape
from sim.core.batch_shape import BatchShape
from sim.core.clock import to_fs
from sim.core.durations import Durations

from .efficiency import RooflineEfficiency
from .work import (
    Matrix,
    attended_pairs,
    decode_flops_per_context_token,
    distinct_experts,
    elementwise_bytes_per_token,
    head_matrix,
    prefill_flops_per_pair,
    rank_matrices,
)

SAMPLER_BYTES_PER_LOGIT = 10
"""Bytes the sampler moves for one logit: two passes over fp32 values and one over the 16-bit logits."""


class Roofline:
    """Prices the steps of one model on one kind of GPU.

    Pure: the same shape always costs the same; the caches only remember.
    """

    def __init__(
        self,
        model: ModelShape,
        gpu: Gpu,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        dtype: str = "auto",
        quantization: str | None = "auto",
        kv_cache_dtype: str = "auto",
        block_size: int = 16,
        block_bytes: int | None = None,
        efficiency: RooflineEfficiency | None = None,
    ) -> None:
        """Settings have the engine's names; `efficiency` defaults to the stated factors. `block_bytes` are those of one KV block where it
        holds the tokens of some layers only (`Ledger.block_bytes` of a model with several attention groups), else of all layers.

        Raises:
            ConfigError: the model cannot be divided so, or the GPU lacks the dtype.
        """
        self.name = f"roofline:{gpu.name}"
        self.model, self.gpu = model, gpu
        self.tensor_parallel_size, self.pipeline_parallel_size = tensor_parallel_size, pipeline_parallel_size
        self.efficiency = efficiency or RooflineEfficiency()
        model.check_parallel(tensor_parallel_size, pipeline_parallel_size)
        self._warnings: list[str] = []
        self.dtype = gpu.usable_dtype(model.dtype, dtype, self._warnings)
        self._form = weight_format(model.quantization if quantization == "auto" else quantization)
        self._element = DTYPE_BYTES[self.dtype]
        self._matrices = rank_matrices(model, self._form, self.dtype, tensor_parallel_size, pipeline_parallel_size)
        self._head = head_matrix(model, self.dtype, tensor_parallel_size)
        self._elementwise = elementwise_bytes_per_token(model, self._element, tensor_parallel_size)
        kinds = [model.attention_at(layer) for layer in range(model.num_layers)]
        self._kinds = {kind: kinds.count(kind) for kind in kinds}
        self._kv_bytes = {
            kind: kind.kv_bytes_per_token(kv_cache_dtype, self.dtype, tensor_parallel_size) for kind in self._kinds
        }
        stage_kv_bytes = (
            sum(self._kv_bytes[kind] * count for kind, count in self._kinds.items()) // pipeline_parallel_size
        )
        self._block_bytes = stage_kv_bytes * block_size if block_bytes is None else block_bytes
        self._context_token_fs = to_fs(self._context_token_s())
        self._copy_fs = to_fs(2 * self._block_bytes / (gpu.memory_bandwidth_bytes_per_s * self.efficiency.memory))
        self._swap_fs = to_fs(self._block_bytes / (gpu.pcie_bytes_per_s * self.efficiency.link))
        self._step_fs, self._seq_fs = to_fs(self.efficiency.step_s), to_fs(self.efficiency.seq_s)
        self._layers_fs: dict[int, int] = {}
        self._rows_fs: dict[int, int] = {}

    def copy_fs(self, num_blocks: int) -> int:
        """Time to move KV blocks over the host link, as swaps within a step are priced."""
        return self._swap_fs * num_blocks

    def step_fs(self, shape: BatchShape) -> int:
        """Duration of one step of this shape."""
        sequences = shape.decode_seqs + len(shape.prefill)
        total = self.host_fs(sequences) + self._copy_fs * shape.copied_blocks + self._swap_fs * shape.swapped_blocks
        if tokens := shape.num_tokens:
            total += self._layers(tokens) + self._rows(shape.sampled_seqs)
            total += self._context_token_fs * shape.decode_context_tokens
            for chunk, context in shape.prefill:
                total += self._prefill_attention_fs(chunk, context)
        return total

    def host_fs(self, sequences: int) -> int:
        """The host's part of a step with so many sequences."""
        return self._step_fs + self._seq_fs * sequences

    def decode_stretch(
        self, decode_seqs: int, context_tokens: int, steps: int, max_context_tokens: int = 0
    ) -> Durations:
        """Durations of `steps` pure decode steps, in closed form."""
        first_fs = self.host_fs(decode_seqs) + self._layers(decode_seqs) + self._rows(decode_seqs)
        first_fs += self._context_token_fs * context_tokens
        return Durations.affine(steps, first_fs, self._context_token_fs * decode_seqs)

    def warnings(self) -> list[str]:
        """What a reader of these prices must know."""
        found = [
            "step times come from the embedded roofline with stated efficiency factors, not from a measurement; "
            "expect errors of some tens of per cent"
        ]
        if self.model.has_window:
            found.append(
                f"{self.model.name} has sliding-window layers; decode attention is priced as if they read every token, "
                "too dear for long contexts"
            )
        if self.pipeline_parallel_size > 1:
            found.append(
                "pipeline stages are priced one after the other for every step: throughput with several batches in flight "
                "is understated"
            )
        if self.gpu.unverified:
            found.append(f"{self.gpu.name}: not verified are {', '.join(self.gpu.unverified)}")
        return found + self._warnings

    def _layers(self, tokens: int) -> int:
        """All layers without attention over the context, and communication, for `tokens` tokens."""
        if tokens not in self._layers_fs:
            gemm_s = sum(self._matrix_s(matrix, tokens) * count for matrix, count in self._matrices.items())
            traffic_s = tokens * self._elementwise / (self.gpu.memory_bandwidth_bytes_per_s * self.efficiency.memory)
            overhead_s = self.model.num_layers * self.efficiency.layer_s
            self._layers_fs[tokens] = to_fs(gemm_s + traffic_s + overhead_s + self._communication_s(tokens))
        return self._layers_fs[tokens]

    def _rows(self, rows: int) -> int:
        """LM head and sampler, for the rows that reach them."""
        if rows not in self._rows_fs:
            moved = rows * self.model.vocab_size * SAMPLER_BYTES_PER_LOGIT
            sampler_s = moved / (self.gpu.memory_bandwidth_bytes_per_s * self.efficiency.memory)
            self._rows_fs[rows] = to_fs(self._matrix_s(self._head, rows) + sampler_s) if rows else 0
        return self._rows_fs[rows]

    def _matrix_s(self, matrix: Matrix, tokens: int) -> float:
        """One multiplication: the longer of reading the matrix and of the arithmetic.

        A stack of experts is read as far as it is visited.
        """
        read, multiplied = float(matrix.bytes), float(tokens)
        if matrix.experts and self.model.moe is not None:
            read *= distinct_experts(matrix.experts, self.model.moe.experts_per_token, tokens)
            multiplied *= self.model.moe.experts_per_token
        memory_s = read / (self.gpu.memory_bandwidth_bytes_per_s * self.efficiency.memory)
        return max(
            memory_s, 2.0 * multiplied * matrix.elements / (self._peak(matrix.compute) * self.efficiency.compute)
        )

    def _peak(self, compute: str) -> float:
        """Dense peak rate of the matrix units in a format; formats the GPU lacks run in 16 bits, float32 at half of that (TF32)."""
        if compute == "fp8" and self.gpu.fp8_flops_per_s is not None:
            return self.gpu.fp8_flops_per_s
        if compute == "int8" and self.gpu.int8_ops_per_s is not None:
            return self.gpu.int8_ops_per_s
        return self.gpu.bf16_flops_per_s / (2 if compute == "float32" else 1)

    def _context_token_s(self) -> float:
        """Decode attention a token of context, over all layers: the longer of reading its KV and of the arithmetic on it."""
        total = 0.0
        for kind, layers in self._kinds.items():
            memory_s = self._kv_bytes[kind] / (self.gpu.memory_bandwidth_bytes_per_s * self.efficiency.attention_memory)
            flops = decode_flops_per_context_token(kind, self.tensor_parallel_size)
            total += layers * max(memory_s, flops / (self._peak(self.dtype) * self.efficiency.attention_compute))
        return total

    def _prefill_attention_fs(self, tokens: int, context: int) -> int:
        """Attention of one prefill chunk over all layers: arithmetic on the causal pairs, or streaming the context, whichever is longer."""
        total = 0.0
        for kind, layers in self._kinds.items():
            flops = attended_pairs(tokens, context, kind.window) * prefill_flops_per_pair(
                kind, self.tensor_parallel_size
            )
            compute_s = flops / (self._peak(self.dtype) * self.efficiency.attention_compute)
            read = min(context + tokens, (kind.window or context) + tokens)
            memory_s = (
                read * self._kv_bytes[kind] / (self.gpu.memory_bandwidth_bytes_per_s * self.efficiency.attention_memory)
            )
            total += layers * max(compute_s, memory_s, read * self.efficiency.attention_serial_s)
        return to_fs(total)

    def _communication_s(self, tokens: int) -> float:
        """Two all-reduces a layer over the tensor-parallel ranks, and one hand-over between pipeline stages.

        A ring all-reduce moves `2 * (ranks - 1) / ranks` times the hidden states over every link.
        """
        ranks, eff = self.tensor_parallel_size, self.efficiency
        rate = self.gpu.link_bytes_per_s * eff.link
        latency_s = eff.all_reduce_pcie_s if self.gpu.link == "pcie" else eff.all_reduce_nvlink_s
        hidden = tokens * self.model.hidden_size * self._element
        total = (self.pipeline_parallel_size - 1) * (latency_s + 2 * hidden / rate)
        if ranks > 1:
            total += 2 * self.model.num_layers * (latency_s + 2 * (ranks - 1) / ranks * hidden / rate)
        return total
