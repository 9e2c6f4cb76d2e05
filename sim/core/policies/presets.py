"""Engines as compositions of policies, by name.

A preset is a `Policy` and the settings it goes with (`engine_settings`), and nothing else. Each function takes the settings as its engine
has them, and says what it models and what it leaves out; sources and versions are those of engine-policies §1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ..admission import Admission, CanEverFit, Every, FreeBlocks
from ..config import EngineConfig
from ..policy import Batching, Policy, scheduling_policy
from ..preemption import fewest_generated, last_admitted, worst_priority
from ..rungs import standard_ladder
from ..waiting import priority_queue
from .engine_settings import as_in
from .new_token_ratio import NewTokenRatio
from .predicted_peak import PredictedPeak
from .queues import BackOfTheQueue, arrival_queue
from .reservation import ContiguousReservation, FullReservation


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What makes an engine behave like another."""

    config: EngineConfig
    """The settings as the engine has them."""
    policy: Policy
    preempts: bool = True
    """Whether a running request may have to give way to another one."""


def vllm_v1(config: EngineConfig) -> Preset:
    """vLLM V1 (upstream of 2026-05): no reservation beyond the prompt; when blocks run out the last admitted (or the worst
    priority) is recomputed, from the front of the queue. Left out: KV connectors to other servers, encoder budgets.
    Added: what can never fit is rejected on arrival (#39734 waits for ever).
    """
    return Preset(config=config, policy=scheduling_policy(config))


def vllm_v0(config: EngineConfig) -> Preset:
    """vLLM V0 (until 2025-09): prompts first and whole, a watermark of 1 % of the pool, the last running is recomputed; what is
    swapped goes before what waits. Sequences that fork (`fork_samples`, beams) share blocks and move together as V0's
    did. Prompts in pieces, which V0 computed by default where the context is above 32,768 tokens, share steps with decodes, which go
    first. Left out: V0 swapped such groups only; its priorities; that in pieces it took in prompts while others had just given way
    or were swapped (#5578); the rejection of prompts above the pool less the watermark (here the watermark is waived when nothing
    runs).
    """
    batching = Batching.MIXED if config.enable_chunked_prefill else Batching.PREFILL_FIRST
    return Preset(
        config=config,
        policy=Policy(name="vllm-v0", batching=batching),
    )


def sglang(config: EngineConfig) -> Preset:
    """SGLang v0.5.17: prompts first, in chunks; a falling share of the output caps is reserved; who generated least is retracted,
    to the back of the queue. Left out: longest-prefix-first order, the radix tree's leaf-first eviction and reuse below a block,
    clamping of caps to the context, priorities, the host cache, the exact simulation for `ignore_eos`, chunks that end at whole pages.
    """
    return Preset(
        config=config,
        policy=Policy(
            name="sglang",
            admission=lambda config: Every([CanEverFit(config), NewTokenRatio()]),
            queue=BackOfTheQueue,
            victim=fewest_generated,
            batching=Batching.PREFILL_FIRST,
        ),
    )


def _no_evict(config: EngineConfig) -> Admission:
    return Every([CanEverFit(config), FullReservation(config)])


def trtllm_no_evict(config: EngineConfig) -> Preset:
    """TensorRT-LLM (2026) with GUARANTEED_NO_EVICT, its default: a request starts when its worst case fits, and is never preempted.
    Left out: counting the beams of a request at admission, `beneficialToSkip`, priority retention and offload of its KV manager, reuse of
    partial blocks.
    """
    return Preset(
        config=config,
        policy=Policy(name="trtllm-no-evict", admission=_no_evict, queue=arrival_queue),
        preempts=False,
    )


def trtllm_max_util(config: EngineConfig) -> Preset:
    """TensorRT-LLM (2026) with MAX_UTILIZATION: a request starts when its next step fits; when one does not, the most recently
    started is paused and recomputed, in its place by arrival. Left out: the two-step look-ahead with several micro-batches, and as above.
    """
    return Preset(
        config=config,
        policy=Policy(
            name="trtllm-max-util",
            admission=lambda config: Every([CanEverFit(config), FreeBlocks()]),
            queue=arrival_queue,
            victim=last_admitted,
        ),
    )


def static_batch(config: EngineConfig) -> Preset:
    """Batches that are filled when nothing runs and then run to the end of their longest request, as before Orca; TensorRT-LLM
    STATIC_BATCH. Every request has its worst case reserved. Left out: padding of prompts to the longest, and computing for what has
    finished.
    """
    return Preset(
        config=config,
        policy=Policy(name="static-batch", admission=_no_evict, batching=Batching.STATIC),
        preempts=False,
    )


def orca(config: EngineConfig) -> Preset:
    """Orca (OSDI 2022) as "Orca (Max)" of the vLLM paper: continuous batching over contiguous reservations of `max_model_len` tokens;
    nothing is shared or reused. Left out: its batching rule that mixes no prompts of different lengths in attention kernels.
    """
    return Preset(
        config=config,
        policy=Policy(
            name="orca",
            admission=lambda config: Every([CanEverFit(config), ContiguousReservation(config)]),
        ),
        preempts=False,
    )


def nano_vllm(config: EngineConfig) -> Preset:
    """nano-vllm (2026-04): prompts first, of which only the first of a step may be cut, blocks for the whole prompt, no watermark; the
    last running is recomputed from the front of the queue. Left out: its block size of 256 (set `block_size`), that `max_num_seqs` bounds
    a batch and not the running requests, and its crash when a lone request outgrows the pool (#274): here that request fails.
    """
    return Preset(
        config=config,
        policy=Policy(name="nano-vllm", batching=Batching.PREFILL_FIRST, cuts_first_only=True),
    )


def predicted_peak(config: EngineConfig) -> Preset:
    """kvtwin's own: vLLM V1 that admits by the predicted peak of memory, with a risk of 5 %. No engine that was read does this."""
    return Preset(
        config=config,
        policy=replace(
            scheduling_policy(config),
            name="predicted-peak",
            admission=lambda config: Every([CanEverFit(config), FreeBlocks(), PredictedPeak()]),
        ),
    )


def ladder(config: EngineConfig) -> Preset:
    """kvtwin's own: vLLM V1 with strict priorities and the standard degradation ladder. Requests less important than the guard
    (priority 0) are held back before decodes run out of blocks, shortened when the queue grows old, and at last sent away with a
    time to come back; the important ones never are. Left out: rungs that need CPU memory or a CPU executor, which a scenario must have.
    """
    return Preset(
        config=config,
        policy=Policy(name="ladder", queue=priority_queue, victim=worst_priority, ladder=standard_ladder()),
    )


PRESETS: dict[str, Callable[[EngineConfig], Preset]] = {
    "vllm-v1": vllm_v1,
    "vllm-v0": vllm_v0,
    "sglang": sglang,
    "trtllm-no-evict": trtllm_no_evict,
    "trtllm-max-util": trtllm_max_util,
    "static-batch": static_batch,
    "orca": orca,
    "nano-vllm": nano_vllm,
    "predicted-peak": predicted_peak,
    "ladder": ladder,
}
"""Presets by name: each from the settings as its engine has them."""


def preset_of(name: str, config: EngineConfig, typed: Collection[str] = ()) -> Preset:
    """The preset `name`, with `config` as its engine has it: the settings in `typed` as they are, what else the engine decides its own.

    Raises ConfigError for a typed setting that the engine cannot have, and for settings that contradict each other.
    """
    return PRESETS[name](as_in(name, config, typed))
