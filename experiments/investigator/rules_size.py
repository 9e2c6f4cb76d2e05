"""Rules on the size that was tried, and on the operation the traceback stands in: transient peaks, weights, graphs, communication."""

from __future__ import annotations

from collections.abc import Iterator

from .arithmetic import Match, matches
from .case import Candidate, Case, Excluded, Verdict
from .diagnosis import Cause, Phase
from .sizes import GIB, MIB, show

_ENCODER = (
    r"get_multimodal_embeddings|get_image_features|vision_?tower|visual\.forward|vision_model|limit_mm_per_prompt|"
    r"multi-?modal|mm_encoder|\bencoder cache\b|dummy (?:image|video)"
)
_PROMPT_LOGPROBS = "prompt log-probabilities"
_OPERATIONS = (
    ("multimodal encoder", _ENCODER),
    (_PROMPT_LOGPROBS, r"prompt_?logprobs|log_softmax|compute_logprobs|gather_logprobs"),
    ("logits", r"compute_logits|logits_processor|_get_logits|lm_head"),
    ("sampler", r"topk_topp|apply_top_k|sampl(?:er|ing)\b|argsort|\bsort\("),
    (
        "attention scores [heads, S, S] in memory",
        r"scaled_dot_product_attention|sdpa_attention|eager_attention|_sdpa_math|torch\.matmul\(query|softmax\(attn",
    ),
    ("MLP", r"gate_up_proj|down_proj|\bmlp\b|feed_forward|SiluAndMul|fused_moe|fused_experts"),
)
_PEAK_OF_PHASE = {
    Phase.SAMPLER_WARM_UP: (0.62, "sampler", "the sampler's warm-up asks for its buffers at max_num_seqs rows"),
    Phase.PROFILING: (
        0.6,
        "profiled forward pass",
        "profiling runs one step of max_num_batched_tokens; its activations did not fit beside the weights",
    ),
    Phase.SAMPLING: (
        0.6,
        "logits",
        "logits and sampling take rows x vocabulary x 2 to 14 bytes, mostly outside the profile",
    ),
    Phase.PREFILL: (0.4, "activations", "a prefill's activations grow with its tokens"),
}


def transient(case: Case) -> Iterator[Verdict]:
    """A tensor that lives for one operation. Named by arithmetic on its size, else by the traceback, else by the phase."""
    named = _matched(case)
    yield from named
    phase, known = case.phase, case.known
    if phase in (Phase.LOADING, Phase.GRAPH_CAPTURE, Phase.COMMUNICATION, Phase.AFTER_RELEASE, Phase.DECODE):
        if phase is Phase.LOADING:
            yield Excluded(cause=Cause.TRANSIENT_PEAK, why="nothing is computed while weights are loaded")
        return
    if phase not in _PEAK_OF_PHASE or not (case.oom or case.speaks_of_oom or case.failures):
        return
    score, detail, sentence = _PEAK_OF_PHASE[phase]
    evidence = [sentence]
    operation, sign = _operation(case)
    if operation and phase is not Phase.SAMPLER_WARM_UP:
        score, detail = min(0.8, score + 0.15), operation
        evidence.append(f"operation: “{sign}” in the text")
    if phase is Phase.PROFILING and known.max_model_len and known.max_model_len > 100_000:
        evidence.append(
            f"max_model_len is {known.max_model_len}: without chunked prefill the profile runs that many tokens"
        )
    evidence += _rows(case, detail)
    if known.lora:
        evidence.append("LoRA adapters are enabled: their slots and merges are not in the profile")
    if case.oom is None:
        score *= 0.9
    elif _held_elsewhere(case, 4):
        score *= 0.7  # where it failed says what asked last, not who has the memory
    if any(
        verdict.cause is Cause.TRANSIENT_PEAK and verdict.score >= score
        for verdict in named
        if isinstance(verdict, Candidate)
    ):
        return
    yield Candidate(cause=Cause.TRANSIENT_PEAK, score=score, detail=detail, evidence=tuple(evidence), record=_RECORD)


def _held_elsewhere(case: Case, times: int) -> bool:
    """Whether so many times what was asked for lies where no step can have it: with others, beside PyTorch, or reserved and unused."""
    oom, total = case.oom, case.total_bytes
    if oom is None or oom.tried is None or total is None:
        return False
    held = (
        sum(size.bytes for _, size in oom.others),
        (oom.non_torch_bytes or 0.0) - _ORDINARY_OUTSIDE,
        oom.unallocated.bytes if oom.unallocated else 0.0,
    )
    return max(held) >= max(_ELSEWHERE * total, times * oom.tried.bytes)


_ELSEWHERE = 0.05
"""Share of the GPU."""
_ORDINARY_OUTSIDE = 3 * GIB
"""Context, libraries and communication of a process together are hardly ever more."""
_RECORD = (
    "the traceback of the failure, and max_num_seqs, max_num_batched_tokens and the vocabulary size: they name the tensor",
)


def _rows(case: Case, detail: str) -> list[str]:
    """How many rows of the vocabulary the size comes to, for operations on logits."""
    oom, vocabulary = case.oom, case.known.vocabulary
    if oom is None or oom.tried is None or vocabulary is None or oom.tried.bytes <= 20 * MIB:
        return []
    if not any(word in detail for word in ("log", "sampler")):
        return []
    rows = oom.tried.bytes / vocabulary
    return [
        f"{oom.tried} are {int(rows // 4):,} rows x {vocabulary} vocabulary x 4 B, or {int(rows // 2):,} rows x 2 B"
    ]


def _matched(case: Case) -> list[Verdict]:
    if case.oom is None or case.oom.tried is None:
        return []
    found: list[Verdict] = []
    seen: set[tuple[Cause, str]] = set()
    for match in matches(case.oom.tried, case.known, case.phase):
        if (match.cause, match.detail) in seen or len(seen) >= 4:
            continue
        seen.add((match.cause, match.detail))
        found.append(_verdict(case, match))
    return found


def _verdict(case: Case, match: Match) -> Candidate:
    score, phase = match.believed, match.phase
    oom = case.oom
    assert oom is not None
    if case.phase is Phase.GRAPH_CAPTURE and match.cause is Cause.TRANSIENT_PEAK:
        score *= 0.4  # a capture computes no logits
    if match.cause is Cause.WEIGHTS and case.phase is Phase.LOADING:
        score = min(0.95, max(score, 0.72))
    if match.cause is Cause.WEIGHTS and case.phase is Phase.UNKNOWN and oom.private_pools is not None:
        score *= 0.3  # graphs exist: the weights were loaded
    if match.cause is Cause.WEIGHTS and case.phase is Phase.UNKNOWN and _more_than_weights(case):
        score *= 0.3  # so much is allocated only once the KV pool is there
    if match.cause is Cause.TRANSIENT_PEAK and _held_elsewhere(case, 20):
        score *= 0.7
    operation, sign = _operation(case)
    evidence = [f"{oom.tried} = {match.text}"]
    if operation and match.cause is Cause.TRANSIENT_PEAK:
        evidence.append(f"operation: “{sign}” in the text")
        score = min(0.95, score + 0.15)
    if match.cause is Cause.TRANSIENT_PEAK and match.detail.startswith(("logits", "sampler")):
        # As many rows as the engine has sequences at most, with graphs already there: the warm-up after capture.
        dummy = match.value in (case.known.max_num_seqs, 256, 1024) and oom.private_pools is not None
        phase = Phase.SAMPLER_WARM_UP if dummy else Phase.SAMPLING
    detail = match.detail
    if operation == _PROMPT_LOGPROBS and detail.startswith("logits"):
        detail = f"{_PROMPT_LOGPROBS}: {detail}"
    return Candidate(cause=match.cause, score=score, detail=detail, evidence=tuple(evidence), phase=phase)


def _more_than_weights(case: Case) -> bool:
    """Whether more is allocated than loading ever holds: the weights twice, one copy in another format beside the other."""
    oom, need = case.oom, case.known.weight_bytes
    if oom is None or oom.allocated is None or need is None:
        return False
    return oom.allocated.bytes > _COPIES_WHILE_LOADING * need


_COPIES_WHILE_LOADING = 3
"""Weights of 16 bits and a copy in 32 are three times the weights."""


def _operation(case: Case) -> tuple[str, str]:
    for name, pattern in _OPERATIONS:
        sign = case.says(pattern)
        if sign:
            return name, sign
    return "", ""


def encoder(case: Case) -> Iterator[Verdict]:
    """The limits of multimodal inputs are named, and nothing was served yet, or nothing says: start-up profiles the largest inputs."""
    sign = case.says(r"limit[_-]mm[_-]per[_-]prompt|mm[_-]processor[_-]kwargs|max_pixels")
    if not sign or case.phase not in (Phase.UNKNOWN, Phase.START_UP) or not (case.oom or case.speaks_of_oom):
        return
    sentence = f"“{sign}” is set: start-up profiles the encoder with the largest inputs that the limits allow, beside the weights"
    yield Candidate(
        cause=Cause.TRANSIENT_PEAK, score=0.55, detail="multimodal encoder", evidence=(sentence,), phase=Phase.PROFILING
    )


def weights(case: Case) -> Iterator[Verdict]:
    """Weights, or what loading them needs beside them."""
    oom, known, total = case.oom, case.known, case.total_bytes
    need = known.weight_bytes
    if case.phase not in (Phase.LOADING, Phase.UNKNOWN, Phase.START_UP):
        yield Excluded(cause=Cause.WEIGHTS, why=f"in phase {case.phase} the weights are loaded")
        return
    loading = case.phase is Phase.LOADING
    if oom is None or oom.allocated is None:
        if loading and (case.speaks_of_oom or oom):
            yield Candidate(
                cause=Cause.WEIGHTS, score=0.6, evidence=("it failed while weights were loaded",), phase=Phase.LOADING
            )
        return
    evidence = ["it failed while weights were loaded"] if loading else []
    score = 0.68 if loading else 0.0
    if need is not None and total is not None:
        says = f"the weights need about {show(need)} ({known.weight_basis})"
        if need > 0.95 * total:
            evidence.append(f"{says}, the GPU has {show(total)}")
            sure = 0.9 if known.weight_format_stated or loading else 0.62
            score = sure if oom.allocated.bytes > 0.8 * total else max(score, 0.5)
        elif loading and oom.allocated.bytes > 1.02 * need:
            evidence.append(
                f"{says}, but {oom.allocated} are allocated: tensors of another format, or copies, are held beside them"
            )
        elif oom.allocated.bytes < 0.95 * need:
            evidence.append(f"{says}, and {oom.allocated} are allocated: they are not all loaded")
            score = max(score, 0.45)
        elif loading:
            evidence.append(says)
    if loading:
        evidence.append(f"{oom.allocated} are allocated, {oom.tried} more were tried")
    if score and oom.private_pools is None:
        yield Candidate(cause=Cause.WEIGHTS, score=score, evidence=tuple(evidence), phase=Phase.LOADING)


def graphs(case: Case) -> Iterator[Verdict]:
    """CUDA graphs while they are captured."""
    if case.phase is not Phase.GRAPH_CAPTURE:
        if case.oom is not None and case.oom.private_pools is None and case.oom.allocated is not None:
            yield Excluded(
                cause=Cause.CUDA_GRAPHS, why="the message names no private pools: no graph holds memory of PyTorch"
            )
        return
    evidence = ["it failed while CUDA graphs were captured, after the KV pool had been given its share"]
    oom = case.oom
    if oom is not None and oom.private_pools is not None:
        evidence.append(f"{oom.private_pools} lie free in the graphs' private pools")
    if case.shortage_bytes is not None and case.shortage_bytes > 0:
        evidence.append(
            f"the capture needed {show(case.shortage_bytes)} more than was left: actual less estimated graph memory is at least that"
        )
    score = 0.8 if oom is not None else 0.65
    yield Candidate(cause=Cause.CUDA_GRAPHS, score=score, evidence=tuple(evidence), phase=Phase.GRAPH_CAPTURE)


def communication(case: Case) -> Iterator[Verdict]:
    """Buffers of the communication library, which come when two ranks first talk."""
    if case.phase is Phase.COMMUNICATION and (case.oom or case.speaks_of_oom or case.failures):
        sentence = "it failed in communication between ranks, whose buffers are allocated outside PyTorch at first use, outside the budget"
        yield Candidate(cause=Cause.NON_TORCH, score=0.66, detail="communication buffers", evidence=(sentence,))
