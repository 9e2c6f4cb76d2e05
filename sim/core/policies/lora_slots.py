"""Adapters: requests whose LoRA has no slot on the device step aside for those that can run."""

from __future__ import annotations

from ..admission import AdmissionBase, Deferral, Rejection
from ..config import ConfigError
from ..look import RequestLook
from ..view import EngineView


class LoraSlots(AdmissionBase):
    """At most `max_loras` different adapters among the running requests; the base model needs none.

    A request whose adapter would be one too many is set aside, and those behind it may start; after `give_up_after_s` seconds aside it is
    sent away. Steady: while requests only decode, none of them stops running.
    Source: vLLM V1 `--max-loras` (engine-policies §1.1.2, waiting pass d), without the deadline.
    """

    may_defer = True

    def __init__(self, max_loras: int, *, give_up_after_s: float = 60.0) -> None:
        if max_loras < 1 or give_up_after_s <= 0:
            raise ConfigError(
                f"max_loras is {max_loras} and give_up_after_s {give_up_after_s}; a number of at least 1, and seconds above 0"
            )
        self.max_loras = max_loras
        self.give_up_after_s = give_up_after_s

    def may_start(self, request: RequestLook, need_blocks: int, view: EngineView) -> bool | Rejection | Deferral:
        """Count the adapters that run."""
        wanted = request.spec.namespace.lora
        if not wanted:
            return True
        loaded = {running.lora for running in view.running()} - {""}
        if wanted in loaded or len(loaded) < self.max_loras:
            return True
        return Deferral(
            reason="lora_slots",
            why=f"all {self.max_loras} adapter slots are taken by running requests, none with adapter {wanted!r}",
            give_up_after_s=self.give_up_after_s,
        )
