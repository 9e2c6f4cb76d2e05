"""After the forward pass: logits, the sampler, prompt log-probabilities and the verification of draft tokens.

These tensors have one number for every row and every vocabulary entry, so that few rows outweigh a whole layer. Logits are gathered:
none of it shrinks with tensor parallelism.
"""

from __future__ import annotations

from sim.catalog.dtypes import DTYPE_BYTES
from sim.catalog.gpus import Gpu
from sim.catalog.shape import ModelShape

from .activation import encoder_outputs
from .ops import Op, Peak
from .settings import Settings
from .workspaces import cublas_workspace, moe_workspace

# What one logit costs at the sampler's peak, by the bytes a logit that a release is known for (see `releases`).
_PARTS: dict[int, tuple[tuple[str, int], ...]] = {
    2: (),
    6: (("fp32 copy", 4),),
    14: (("fp32 copy", 4), ("probabilities", 4), ("exponential noise", 4)),
    38: (
        ("fp32 copy", 4),
        ("sorted values", 4),
        ("sorted indices", 8),
        ("index input of the sort", 8),
        ("radix sort scratch", 12),
    ),
}


KERNEL_ROWS = "rows of the top-k / top-p kernel"
"""The one operator here that stops growing with the rows: at one a multiprocessor."""


def sampler_peak(
    model: ModelShape, gpu: Gpu, settings: Settings, *, tokens: int, sampled_rows: int | None = None
) -> Peak:
    """The sampler's peak after a forward pass over `tokens` tokens whose result is still alive.

    `sampled_rows=None` is the start-up profile: `max_num_seqs` rows, and random states to sample from. A step that serves samples
    its own rows of the states it computed.
    """
    release = settings.release
    rows = min(settings.max_num_seqs, tokens) if sampled_rows is None else sampled_rows
    ops = [*_logits(model, settings, rows, tokens), cublas_workspace(gpu)]
    parts = _PARTS[release.sampler_bytes_per_logit]
    ops += [_rows(name, rows, model.vocab_size, size) for name, size in parts]
    if release.sampler_kernel:
        # vLLM draws random states to sample from, beside the gathered ones; and keeps a row for every program of the kernel.
        if sampled_rows is None:
            ops.append(_rows("random hidden states", rows, model.hidden_size, DTYPE_BYTES[settings.dtype]))
        ops.append(_rows(KERNEL_ROWS, min(gpu.sm_count, rows), model.vocab_size, 4))
    workspace = moe_workspace(model, tokens, settings.tensor_parallel_size, DTYPE_BYTES[settings.dtype])
    if workspace is not None and release.moe_workspace_persists:
        ops.append(workspace)
    ops += encoder_outputs(model, settings, tokens)
    return Peak(phase="sampler", ops=tuple(ops), profiled=True)


def logits_peak(
    model: ModelShape, gpu: Gpu, settings: Settings, *, tokens: int, sampled_rows: int | None = None
) -> Peak:
    """The LM head alone: gathered logits of `sampled_rows` rows, `max_num_seqs` in the profile."""
    rows = min(settings.max_num_seqs, tokens) if sampled_rows is None else sampled_rows
    ops = (*_logits(model, settings, rows, tokens), cublas_workspace(gpu))
    return Peak(phase="logits", ops=ops, profiled=True)


def prompt_logprobs_peak(model: ModelShape, settings: Settings, *, tokens: int) -> Peak:
    """Prompt log-probabilities of one chunk of `tokens` tokens: logits of every position and their fp32 log-softmax.

    No release profiles it: one request that asks for it needs this much beyond the account (vLLM issue 5907).
    """
    element = DTYPE_BYTES[settings.dtype]
    ops = (
        _rows("logits of every position", tokens, model.vocab_size, element),
        _rows("fp32 log-softmax", tokens, model.vocab_size, 4),
    )
    return Peak(phase="prompt_logprobs", ops=ops, profiled=False)


def verification_peak(model: ModelShape, settings: Settings, *, seqs: int | None = None) -> Peak | None:
    """Rejection sampling of K draft tokens for each of `seqs` sequences (None: `max_num_seqs`); None without speculation.

    The target's logits of (1 + K) rows a sequence, their fp32 form for the K draft rows, and its clone. Profiled by no release up to
    0.29: with 1,024 sequences, K = 7 and a vocabulary of 151,936 the fp32 form alone is 4.06 GiB (vLLM issue 48037).
    """
    drafts = settings.num_speculative_tokens
    if not drafts:
        return None
    seqs, vocabulary = settings.max_num_seqs if seqs is None else seqs, model.vocab_size
    ops = (
        _rows("target logits", (1 + drafts) * seqs, vocabulary, DTYPE_BYTES[settings.dtype]),
        _rows("draft rows in fp32", drafts * seqs, vocabulary, 4),
        _rows("their copy for constraints", drafts * seqs, vocabulary, 4),
    )
    return Peak(phase="verification", ops=ops, profiled=False)


def _logits(model: ModelShape, settings: Settings, rows: int, tokens: int) -> list[Op]:
    element, hidden = DTYPE_BYTES[settings.dtype], model.hidden_size
    return [
        _rows("logits", rows, model.vocab_size, element),
        Op(
            name="hidden states",
            requested_bytes=(tokens + rows) * hidden * element,
            formula=f"({tokens} + {rows}) x {hidden} x {element} B",
        ),
    ]


def _rows(name: str, rows: int, numbers: int, element: int) -> Op:
    return Op(name=name, requested_bytes=rows * numbers * element, formula=f"{rows} rows x {numbers} x {element} B")
