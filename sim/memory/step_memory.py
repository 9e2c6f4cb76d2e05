"""What one engine step needs beside everything that is always there: its temporary tensors, by ledger line and operator.

The account prices the step that start-up profiling runs; here the same formulas price any step. They are affine in the tokens
and in the sampled rows of a step, so two evaluations of each give its coefficients, and pricing a step is a dozen integer
products. Only plain attention, whose scores grow with chunk times context, is counted from the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sim.catalog.dtypes import DTYPE_BYTES
from sim.catalog.gpus import Gpu
from sim.catalog.shape import ModelShape
from sim.core.batch_shape import BatchShape

from .activation import forward_peaks, plain_attention_ops
from .ops import Op, Peak, total
from .rounding import allocated_bytes
from .sampling import KERNEL_ROWS, logits_peak, prompt_logprobs_peak, sampler_peak, verification_peak
from .settings import Settings
from .workspaces import split_kv_partials

PROMPT_LOGPROBS = "prompt_logprobs"
"""Extra work of a step: log-probabilities of all its prompt tokens."""
PLAIN_ATTENTION = "plain_attention"
"""Extra work of a step: attention writes out the scores of every pair of tokens."""


_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One tensor as a function of the step: `per_token * tokens + per_row * min(rows, most_rows) + fixed` bytes."""

    name: str
    """What the memory is for, as in the account."""
    per_token: int
    """Bytes a token computed in the step."""
    per_row: int
    """Bytes a row that reaches the sampler."""
    fixed: int
    """Bytes whatever the step."""
    most_rows: int | None = None
    """Rows beyond which it does not grow; None without such a bound."""

    def requested_bytes(self, tokens: int, rows: int) -> int:
        """Bytes asked for in a step of `tokens` tokens and `rows` sampled rows."""
        if self.most_rows is not None and rows > self.most_rows:
            rows = self.most_rows
        return self.per_token * tokens + self.per_row * rows + self.fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One phase of a step: the tensors that are alive together at its widest point."""

    phase: str
    """`prefill` (a forward pass), `logits`, `sampler`, `verification` or `prompt_logprobs`, as in the account."""
    terms: tuple[Term, ...]
    """Those whose size follows from tokens and rows; what lives longest comes first."""
    is_attention: bool = False
    """Whether split-KV partials and the scores of plain attention are alive here too."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a step needs."""

    bytes: int
    """Allocated bytes at its widest point."""
    phase: str
    """The phase in which that is."""


class StepMemory:
    """Prices the steps of one engine. Results are remembered: most steps of a run are alike."""

    def __init__(self, model: ModelShape, gpu: Gpu, settings: Settings, *, samples: bool = True) -> None:
        self._model, self._gpu, self._settings = model, gpu, settings
        self._plain = settings.plain_attention
        self._element = DTYPE_BYTES[settings.dtype]
        self.demands = _demands(model, gpu, settings, samples=samples)
        """The phases of a step."""
        self._logprobs = _affine(
            "prompt_logprobs", lambda tokens, rows: prompt_logprobs_peak(model, settings, tokens=tokens).ops
        )
        self._known: dict[tuple[int, int, int, int], Need] = {}
        self._partials_bytes: dict[int, int] = {}
        self._last_shape: BatchShape | None = None
        self._last_extra: frozenset[str] = _NOTHING
        self._last = Need(0, "decode")

    def need(self, shape: BatchShape, steps: int = 1, extra: frozenset[str] = _NOTHING) -> Need:
        """What the widest of `steps` repetitions of the step `shape` needs; `extra` names unprofiled work that it does too.

        Only plain attention grows within a stretch, with the context: its last step is the widest. Everything else depends on
        tokens and rows alone, so a stretch costs what a step costs, and that is looked up. A step in several passes needs what
        the most demanding of them does.
        """
        if shape.passes > 1:
            return max((self.need(part, steps, extra) for part in shape.split()), key=lambda need: need.bytes)
        if self._plain or PLAIN_ATTENTION in extra:
            widest = max(self._peaks(shape, steps, extra), key=lambda peak: peak.bytes)
            return Need(widest.bytes, widest.phase)
        if shape is self._last_shape and extra is self._last_extra:
            return self._last  # whoever records a step asks again
        decode_seqs = tokens = shape.decode_seqs
        for num_tokens, _ in shape.prefill:
            tokens += num_tokens
        asked = tokens - decode_seqs if PROMPT_LOGPROBS in extra else 0
        key = (tokens, shape.sampled_seqs, decode_seqs, asked)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._price(*key)
        self._last_shape, self._last_extra, self._last = shape, extra, known
        return known

    def widest(self, shape: BatchShape, steps: int = 1, extra: frozenset[str] = _NOTHING) -> Peak:
        """The same, operator by operator, in the order in which they are asked for. For the last of `steps` steps."""
        return max(self._peaks(shape, steps, extra), key=lambda peak: peak.bytes)

    def phases(self, shape: BatchShape, extra: frozenset[str] = _NOTHING) -> list[Peak]:
        """Every phase of a step, operator by operator."""
        return self._peaks(shape, 1, extra)

    def _price(self, tokens: int, rows: int, decode_seqs: int, logprobs: int) -> Need:
        most, phase = 0, "decode"
        for demand in self.demands:
            size = sum([allocated_bytes(term.requested_bytes(tokens, rows)) for term in demand.terms])
            if demand.is_attention and decode_seqs:
                if decode_seqs not in self._partials_bytes:
                    self._partials_bytes[decode_seqs] = total(self._partials(decode_seqs))
                size += self._partials_bytes[decode_seqs]
            if size > most:
                most, phase = size, demand.phase
        if logprobs:
            size = sum(allocated_bytes(term.requested_bytes(logprobs, 0)) for term in self._logprobs.terms)
            if size > most:
                most, phase = size, self._logprobs.phase
        return Need(most, "decode" if phase == "prefill" and tokens == decode_seqs else phase)

    def _peaks(self, shape: BatchShape, steps: int, extra: frozenset[str]) -> list[Peak]:
        """Every phase of the last of `steps` steps, with its operators; of its most demanding pass."""
        if shape.passes > 1:
            return max(
                (self._peaks(part, steps, extra) for part in shape.split()),
                key=lambda peaks: max(peak.bytes for peak in peaks),
            )
        tokens, rows = shape.num_tokens, shape.sampled_seqs
        forward = "prefill" if shape.prefill else "decode"
        peaks = []
        for demand in self.demands:
            ops = [_op(term, tokens, rows) for term in demand.terms]
            if demand.is_attention:
                ops += self._partials(shape.decode_seqs)
                if self._plain or PLAIN_ATTENTION in extra:
                    ops += self._scores(shape, steps)
            phase = forward if demand.phase == "prefill" else demand.phase
            peaks.append(Peak(phase=phase, ops=tuple(ops), profiled=demand.phase != "verification"))
        if PROMPT_LOGPROBS in extra and shape.prefill:
            asked = [_op(term, shape.prefill_tokens, 0) for term in self._logprobs.terms]
            peaks.append(Peak(phase="prompt_logprobs", ops=tuple(asked), profiled=False))
        return peaks

    def _partials(self, decode_seqs: int) -> list[Op]:
        if not decode_seqs:
            return []
        tp = self._settings.tensor_parallel_size
        found = split_kv_partials(self._model.attention[0], self._gpu, decode_seqs, tp)
        return [] if found is None else [found]

    def _scores(self, shape: BatchShape, steps: int) -> list[Op]:
        """Scores of the largest prompt chunk, or of all decoding sequences at once: one query each over their whole context."""
        kind, tp = self._model.attention[0], self._settings.tensor_parallel_size
        context = shape.decode_context_tokens + (steps - 1) * shape.decode_seqs
        queries, keys = 1, context
        for num_tokens, cached in shape.prefill:
            if num_tokens * (cached + num_tokens) > queries * keys:
                queries, keys = num_tokens, cached + num_tokens
        return plain_attention_ops(kind, keys, tp, self._element, queries=queries) if keys else []


def _demands(model: ModelShape, gpu: Gpu, settings: Settings, *, samples: bool) -> tuple[Demand, ...]:
    """Every phase of a step that serves: the profile's, without what only the profile does."""
    serving = replace(settings, plain_attention=False)

    def forward(tokens: int, rows: int) -> tuple[Peak, ...]:
        return forward_peaks(model, gpu, serving, tokens=tokens, tuned=False)

    def operator(index: int) -> Callable[[int, int], Sequence[Op]]:
        return lambda tokens, rows: _common_first(forward(tokens, rows)[index].ops)

    found = []
    for index in range(len(forward(1, 1))):
        found.append(replace(_affine("prefill", operator(index)), is_attention=index < len(model.attention)))
    if not samples:
        return tuple(found)
    found.append(
        _affine("logits", lambda t, r: logits_peak(model, gpu, serving, tokens=t, sampled_rows=r).ops, gpu.sm_count)
    )
    found.append(
        _affine("sampler", lambda t, r: sampler_peak(model, gpu, serving, tokens=t, sampled_rows=r).ops, gpu.sm_count)
    )
    if settings.num_speculative_tokens:
        # Every sampled row stands for a sequence whose draft tokens are verified beside it.
        found.append(_affine("verification", lambda t, r: _verification(model, serving, r)))
    return tuple(found)


def _verification(model: ModelShape, settings: Settings, seqs: int) -> tuple[Op, ...]:
    peak = verification_peak(model, settings, seqs=seqs)
    assert peak is not None  # there are draft tokens
    return peak.ops


def _common_first(ops: Sequence[Op]) -> tuple[Op, ...]:
    """What is alive throughout the layer before what its widest operator asks for, which is what fails."""
    own = [op for op in ops if not op.name.startswith(_COMMON)]
    return (*(op for op in ops if op.name.startswith(_COMMON)), *own)


_COMMON = ("residual", "cuBLAS", "input from the stage", "encoder outputs", "merged embeddings")


def _affine(phase: str, ops: Callable[[int, int], Sequence[Op]], kernel_rows: int | None = None) -> Demand:
    """The coefficients of a phase's operators, from their sizes at three steps: every one of them is affine."""
    base, token, row = ops(1, 1), ops(2, 1), ops(1, 2)
    terms = []
    for at, more_tokens, more_rows in zip(base, token, row, strict=True):
        per_token = more_tokens.requested_bytes - at.requested_bytes
        per_row = more_rows.requested_bytes - at.requested_bytes
        fixed = at.requested_bytes - per_token - per_row
        most = kernel_rows if at.name == KERNEL_ROWS else None
        terms.append(Term(name=at.name, per_token=per_token, per_row=per_row, fixed=fixed, most_rows=most))
    return Demand(phase=phase, terms=tuple(terms))


def _op(term: Term, tokens: int, rows: int) -> Op:
    parts = ((term.per_token, f"{tokens} tokens"), (term.per_row, f"{min(rows, term.most_rows or rows)} rows"))
    text = " + ".join([f"{what} x {each} B" for each, what in parts if each] + [f"{term.fixed} B"] * bool(term.fixed))
    return Op(name=term.name, requested_bytes=term.requested_bytes(tokens, rows), formula=text or "0 B")
