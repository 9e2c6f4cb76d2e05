"""Admission by reservation: a request starts only if the room for its worst case is free, so nobody is ever preempted.

What it costs is concurrency: an output cap that is missing, or far above what requests use, is reserved all the same. TensorRT-LLM
reports of requests that run one at a time are of this kind (#9412, #2866). The policy notices it and says so (`diagnose`).
"""

from __future__ import annotations

from ..admission import AdmissionBase, Rejection
from ..config import ConfigError, EngineConfig
from ..look import RequestLook
from ..view import EngineView, RunningView


class FullReservation(AdmissionBase):
    """Start the head of the queue if its worst case fits beside the worst cases of all who run; waived when nothing runs.

    The worst case is the prompt and `max_tokens` output tokens, or what the context has room for when the client gave no cap; never
    more than the pool. Blocks of a running request are counted to its end: `blocks_to_finish - held`.
    Source: TensorRT-LLM `GUARANTEED_NO_EVICT` (engine-policies §1.4, golden trace T9). It counts a block for the last sampled token too,
    whose KV is never written; kvtwin's need (I5) does not.

    Steady: while requests only decode, each block they take is one they had reserved, so what is left does not change.
    """

    def __init__(self, config: EngineConfig) -> None:
        if not config.reserve_full_prompt:
            raise ConfigError(
                "full reservation admits by the whole request, so it needs reserve_full_prompt (scheduler_reserve_full_isl) on"
            )
        self._num_blocks = config.num_gpu_blocks
        self._key: tuple[int, int] | None = None
        self._unreserved = 0
        self._worst: dict[str, int] = {}  # of the running; it does not change while they run
        self._judged: set[str] = set()
        self._waited_for_reservation = 0
        self._waited_for_blocks = 0
        self._uncapped = 0
        self._example = ""

    def worst_case(self, spec: RequestLook | RunningView, view: EngineView) -> int:
        """Blocks that this request is given the right to."""
        known = spec.spec if isinstance(spec, RequestLook) else spec
        return min(view.blocks_to_finish(known, view.output_cap(known)), self._num_blocks)

    def unreserved(self, view: EngineView) -> int:
        """Free blocks that nobody who runs has the right to.

        It does not change while the same requests run: what they take, they had reserved.
        """
        key = (view.num_admissions, view.num_running)
        if key != self._key:
            self._key = key
            known, self._worst, reserved = self._worst, {}, 0
            for running in view.running():
                name = running.request_id
                worst = known.get(name)
                if worst is None:
                    worst = self.worst_case(running, view)
                self._worst[name] = worst
                reserved += max(0, worst - running.held_blocks)
            self._unreserved = view.num_free_blocks - reserved - view.blocks_to_copy
        return self._unreserved

    def may_start(self, request: RequestLook, need_blocks: int, view: EngineView) -> bool | Rejection:
        """Compare the worst case with what is neither held nor reserved."""
        if not view.num_running:
            self._judged.discard(request.request_id)
            return True
        free = view.num_free_blocks
        if need_blocks > free:
            self._note(request, need_blocks, free, need_blocks, view)
            return False
        # `need_blocks` is what the known tokens take from the free queue, prefix hits subtracted; the rest is growth.
        known = view.blocks_to_finish(request.spec, request.num_output_tokens + 1)
        need = need_blocks + max(0, self.worst_case(request, view) - known)
        if need <= self.unreserved(view):
            self._judged.discard(request.request_id)
            return True
        self._note(request, need_blocks, free, need, view)
        return False

    def _note(self, request: RequestLook, need_blocks: int, free: int, need: int, view: EngineView) -> None:
        """Count what a request waits for, once: at its first refusal, which falls in the same step whether the engine leaps or not."""
        if request.request_id in self._judged:
            return
        self._judged.add(request.request_id)
        if need_blocks > free:
            self._waited_for_blocks += 1
            return
        self._waited_for_reservation += 1
        self._uncapped += request.spec.max_tokens is None
        if not self._example:
            self._example = (
                f"{request.request_id} needed {need_blocks} of {free} free blocks (the pool has {view.num_blocks}) "
                f"but reserves {need}, beside {view.num_running} running"
            )

    def diagnose(self) -> tuple[str, ...]:
        """Whether requests waited for memory, or only for the right to it."""
        waited = self._waited_for_reservation + self._waited_for_blocks
        if not waited or self._waited_for_reservation <= self._waited_for_blocks:
            return ()
        capless = (
            f"; {self._uncapped} of them gave no max_tokens, so max_model_len is reserved" if self._uncapped else ""
        )
        return (
            f"reservation-bound, not memory-bound: {self._waited_for_reservation} of the {waited} requests that waited had their "
            f"blocks free and only their worst case was not (first: {self._example}){capless}; give max_tokens, lower "
            "max_model_len, or use a policy that does not reserve the worst case",
        )


class ContiguousReservation(FullReservation):
    """Every request takes `max_model_len` tokens in one piece, whatever it asks for, and keeps them to its end.

    Pieces are of one size, so there is no external fragmentation; what a request does not fill is lost inside its piece.
    Source: Orca (Yu et al., OSDI 2022) as "Orca (Max)" in the vLLM paper (Kwon et al., SOSP 2023, §6).

    Raises ConfigError if the pool has no room for one piece. Steady, for the same reason as full reservation.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._piece = config.blocks_at(0, config.max_model_len)
        if self._piece > config.num_gpu_blocks:
            raise ConfigError(
                f"contiguous reservation gives every request max_model_len ({config.max_model_len}) tokens = {self._piece} blocks, "
                f"but the pool has {config.num_gpu_blocks}; lower max_model_len"
            )

    def worst_case(self, spec: RequestLook | RunningView, view: EngineView) -> int:
        """The same piece for everybody."""
        return self._piece
