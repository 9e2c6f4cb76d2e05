"""What an engine has measured of itself: how fast it computes prompts and gives room back, and how long outputs were.

All of it changes only when a step is committed in which a prompt is done or a request finishes; no leap passes over such a step.
"""

from __future__ import annotations

from collections import deque

from .clock import FS_PER_S
from .request import RequestSpec


class OutputLengths:
    """Output lengths of the latest finished requests, of everybody and by tenant."""

    KEEP = 512
    """Requests that are remembered, of all and of each tenant."""

    def __init__(self) -> None:
        self.all: deque[int] = deque(maxlen=self.KEEP)
        self.num_finished = 0
        """Finished requests ever; changes whenever anything here does."""
        self._sum = 0
        self._by_tenant: dict[str, deque[int]] = {}
        self._sum_by_tenant: dict[str, int] = {}

    def add(self, tenant: str, output_tokens: int) -> None:
        """A request has finished."""
        self.num_finished += 1
        self._sum += output_tokens - (self.all[0] if len(self.all) == self.KEEP else 0)
        self.all.append(output_tokens)
        own = self._by_tenant.setdefault(tenant, deque(maxlen=self.KEEP))
        dropped = own[0] if len(own) == self.KEEP else 0
        self._sum_by_tenant[tenant] = self._sum_by_tenant.get(tenant, 0) + output_tokens - dropped
        own.append(output_tokens)

    def of(self, tenant: str) -> deque[int]:
        """The latest output lengths of a tenant."""
        return self._by_tenant.get(tenant, deque())

    def mean(self, tenant: str, at_least: int = 8) -> float | None:
        """Mean output length of a tenant, or of everybody while the tenant has fewer than `at_least` finished; None without any."""
        own = self.of(tenant)
        if len(own) >= at_least:
            return self._sum_by_tenant[tenant] / len(own)
        return self._sum / len(self.all) if self.all else None


class DrainMeter:
    """How fast the engine gives room back: the last completions and prompt tokens served, with their times."""

    KEEP = 64
    """Events that a rate is taken over."""

    def __init__(self) -> None:
        self._times_fs: deque[int] = deque(maxlen=self.KEEP)
        self._tokens: deque[int] = deque(maxlen=self.KEEP)
        self._blocks: deque[int] = deque(maxlen=self.KEEP)
        self._prompts: deque[tuple[int, int]] = deque(maxlen=self.KEEP)
        self._prompt_fs = self._prompt_tokens = self._last_prompt_fs = 0
        self.outputs = OutputLengths()
        """How long outputs were."""

    def ended(self, now_fs: int, spec: RequestSpec, blocks: int, output_tokens: int) -> None:
        """A request has left after being served."""
        self._times_fs.append(now_fs)
        self._tokens.append(spec.input_tokens)
        self._blocks.append(blocks)
        self.outputs.add(spec.tenant, output_tokens)

    def prompt_done(self, now_fs: int, arrival_fs: int, tokens: int) -> None:
        """A request has its first token. The time it took, from its arrival or the prompt done before it, is time with a backlog."""
        if len(self._prompts) == self.KEEP:
            self._prompt_fs -= self._prompts[0][0]
            self._prompt_tokens -= self._prompts[0][1]
        took_fs = now_fs - max(arrival_fs, self._last_prompt_fs)
        self._last_prompt_fs = now_fs
        self._prompts.append((took_fs, tokens))
        self._prompt_fs += took_fs
        self._prompt_tokens += tokens

    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens computed a second of time in which some prompt waited or was being computed; None before the first.

        Over the last 64 prompts. It counts what a new arrival will meet: steps shared with decodes, and waiting for blocks.
        """
        return self._prompt_tokens * FS_PER_S / self._prompt_fs if self._prompt_fs else None

    def mean_prompt_tokens(self) -> float | None:
        """Mean length of the last 64 prompts computed."""
        return self._prompt_tokens / len(self._prompts) if self._prompts else None

    def _per_s(self, amount: int, now_fs: int) -> float | None:
        elapsed_fs = now_fs - self._times_fs[0] if len(self._times_fs) > 1 else 0
        return amount * FS_PER_S / elapsed_fs if elapsed_fs > 0 else None

    def requests_per_s(self, now_fs: int) -> float | None:
        """Requests that leave a second, over the last 64; None before two have left."""
        return self._per_s(len(self._times_fs) - 1, now_fs)

    def prompt_tokens_per_s(self, now_fs: int) -> float | None:
        """Prompt tokens of requests that leave a second."""
        return self._per_s(sum(self._tokens) - self._tokens[0] if self._tokens else 0, now_fs)

    def blocks_per_s(self, now_fs: int) -> float | None:
        """KV blocks that requests give back a second as they leave."""
        return self._per_s(sum(self._blocks) - self._blocks[0] if self._blocks else 0, now_fs)
