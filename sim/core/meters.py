"""What an engine has measured of itself: how fast it computes prompts and gives room back, and how long outputs were.

All of it changes only when a step is committed in which a prompt is done or a request finishes; no leap passes over such a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .clock import FS_PER_S
from .look import Look
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

    @property
    def tenants(self) -> Iterable[str]:
        """Those of whom a request has finished, in order of the first."""
        return self._by_tenant.keys()

    def of(self, tenant: str) -> deque[int]:
        """The latest output lengths of a tenant."""
        return self._by_tenant.get(tenant, deque())

    def mean(self, tenant: str, at_least: int = 8) -> float | None:
        """Mean output length of a tenant, or of everybody while the tenant has fewer than `at_least` finished; None without any."""
        own = self.of(tenant)
        if len(own) >= at_least:
            return self._sum_by_tenant[tenant] / len(own)
        return self._sum / len(self.all) if self.all else None


class Rate:
    """Amounts and the times they took: how much a second, over the last so many."""

    def __init__(self, keep: int) -> None:
        self._last: deque[tuple[int, int]] = deque(maxlen=keep)
        self._fs = self._amount = self._squares = 0

    def __len__(self) -> int:
        return len(self._last)

    def add(self, took_fs: int, amount: int) -> None:
        """So much in so much time."""
        if len(self._last) == self._last.maxlen:
            gone_fs, gone = self._last[0]
            self._fs -= gone_fs
            self._amount -= gone
            self._squares -= gone * gone
        self._last.append((took_fs, amount))
        self._fs += took_fs
        self._amount += amount
        self._squares += amount * amount

    def per_s(self) -> float | None:
        """Amount a second; None before any time has passed."""
        return self._amount * FS_PER_S / self._fs if self._fs else None

    def piece(self) -> float | None:
        """Mean amount, each weighted with itself: the size that a sum of amounts is as uncertain as if all had it; None without any."""
        return self._squares / self._amount if self._amount else None


class DrainMeter:
    """How fast the engine computes prompts and gives room back."""

    KEEP_GAPS = 256
    """Completions that a rate is taken over."""
    KEEP_PROMPTS = 256
    """Prompts that a rate is taken over."""
    ENOUGH = 8
    """Completions of a full engine after which those of one that was not full are ignored."""

    def __init__(self) -> None:
        self._full_gaps, self._all_gaps = Rate(self.KEEP_GAPS), Rate(self.KEEP_GAPS)
        self._full_prompts, self._all_prompts = Rate(self.KEEP_PROMPTS), Rate(self.KEEP_PROMPTS)
        self._last_end_fs: int | None = None
        self._last_prompt_fs = 0
        self.outputs = OutputLengths()
        """How long outputs were."""

    def ended(self, now_fs: int, spec: RequestSpec, output_tokens: int, *, others_wait: bool) -> None:
        """A request has left after being served. If `others_wait` the engine was full, and what it does is what it can."""
        if self._last_end_fs is not None:
            for gaps in (self._all_gaps, self._full_gaps) if others_wait else (self._all_gaps,):
                gaps.add(now_fs - self._last_end_fs, 1)
        self._last_end_fs = now_fs
        self.outputs.add(spec.tenant, output_tokens)

    def prompt_done(self, now_fs: int, arrival_fs: int, tokens: int) -> None:
        """A request has its first token. The time it took, from its arrival or the prompt done before it, is time with a backlog. If it
        had arrived before the one before it was done, it queued behind that one, and the engine does what it can.
        """
        queued = arrival_fs < self._last_prompt_fs
        for prompts in (self._all_prompts, self._full_prompts) if queued else (self._all_prompts,):
            prompts.add(now_fs - max(arrival_fs, self._last_prompt_fs), tokens)
        self._last_prompt_fs = now_fs

    def requests_per_s(self) -> float | None:
        """Requests that leave a second while others wait, or at all until that has been seen; None before two have left.

        Counting the time in which nobody waits would measure how few requests come, not how many the engine can serve.
        """
        return (self._full_gaps if len(self._full_gaps) >= self.ENOUGH else self._all_gaps).per_s()

    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens computed a second while others queued behind them, or at all until that has been seen; None before the first.

        It counts what a new arrival will meet: steps shared with decodes, and waiting for slots and blocks. A prompt that finds nobody
        before it is computed at once, which says nothing about how fast a queue is drained.
        """
        return (self._full_prompts if len(self._full_prompts) >= self.ENOUGH else self._all_prompts).per_s()

    def num_prompts(self) -> int:
        """Prompts that `prefill_tokens_per_s` was measured over."""
        return len(self._full_prompts if len(self._full_prompts) >= self.ENOUGH else self._all_prompts)

    def prompt_piece_tokens(self) -> float | None:
        """Mean length of the last prompts computed, each weighted with its length: what the uncertainty of their sum grows with."""
        return self._all_prompts.piece()


class OutputsView(Look):
    """`OutputLengths`, to look at."""

    __slots__ = ("_outputs",)
    _outputs: OutputLengths

    def __init__(self, outputs: OutputLengths) -> None:
        object.__setattr__(self, "_outputs", outputs)

    @property
    def all(self) -> tuple[int, ...]:
        """The latest output lengths of everybody."""
        return tuple(self._outputs.all)

    @property
    def num_finished(self) -> int:
        """Finished requests ever; changes whenever anything here does."""
        return self._outputs.num_finished

    @property
    def tenants(self) -> tuple[str, ...]:
        """Those of whom a request has finished, in order of the first."""
        return tuple(self._outputs.tenants)

    def of(self, tenant: str) -> tuple[int, ...]:
        """The latest output lengths of a tenant."""
        return tuple(self._outputs.of(tenant))

    def mean(self, tenant: str, at_least: int = 8) -> float | None:
        """As `OutputLengths.mean`."""
        return self._outputs.mean(tenant, at_least)


class DrainView(Look):
    """`DrainMeter`, to look at."""

    __slots__ = ("_meter", "outputs")
    _meter: DrainMeter
    outputs: OutputsView
    """How long outputs were."""

    def __init__(self, meter: DrainMeter) -> None:
        object.__setattr__(self, "_meter", meter)
        object.__setattr__(self, "outputs", OutputsView(meter.outputs))

    def requests_per_s(self) -> float | None:
        """As `DrainMeter.requests_per_s`."""
        return self._meter.requests_per_s()

    def prefill_tokens_per_s(self) -> float | None:
        """As `DrainMeter.prefill_tokens_per_s`."""
        return self._meter.prefill_tokens_per_s()

    def num_prompts(self) -> int:
        """As `DrainMeter.num_prompts`."""
        return self._meter.num_prompts()

    def prompt_piece_tokens(self) -> float | None:
        """As `DrainMeter.prompt_piece_tokens`."""
        return self._meter.prompt_piece_tokens()
