"""What a world may ask of an engine, and what it is told. Nothing here changes anything."""

from __future__ import annotations

from dataclasses import dataclass

from .admission import Admission
from .blocks import BlockPool
from .departures import Departures
from .lag import Lag
from .log import Decisions
from .offload import Offload
from .plan import Untold, as_told
from .pressure import Pressure
from .request import Request
from .scheduler import Scheduler


class ProgressError(RuntimeError):
    """Nothing runs, nothing is in flight, requests wait, and none of them can start: a fault of the policy in use (I8)."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """What became of an arrival."""

    request: Request
    may_change_plan: bool
    """True when the engine's next decision may differ because of it, so that a stretch under way must be cut."""
    may_start: bool
    """True when the next decision may admit it; otherwise it is waiting from now on."""


@dataclass(slots=True)
class Committed:
    """What the steps that were committed amounted to, for whoever keeps the record. Never changed."""

    steps: int
    computed: int
    """Those of them that computed something; all but the last if that ran out of memory."""
    usage: tuple[tuple[int, int], ...]
    """`(step index in the stretch, owned blocks from then on)`, from index 0."""
    table_slots: tuple[int, ...]
    """For each entry of `usage`: token slots in all block tables, a shared block counted for each holder."""
    emptied_slots: tuple[int, ...]
    """For each entry of `usage`: filled slots that slid out of a window after step 0."""
    written_tokens: int
    """Filled slots in those tables once step 0 is computed: with one table a request, the tokens in them."""
    written_per_step: int
    """What every further step that is computed adds: for each decoding sequence its new token, in every attention group."""
    first_gap_fs: int | None
    """Time from the end of the decode set's latest step before this plan to the end of its first step in it; None when
    the set did not compute. The gaps of the later steps are their durations."""


class EngineFacts:
    """The part of an engine that can be read."""

    pool: BlockPool
    _admission: Admission
    _scheduler: Scheduler
    _pressure: Pressure
    _offload: Offload | None
    _lag: Lag | None
    _requests: dict[str, Request]
    _departures: Departures
    _slid: list[tuple[str, list[int]]]

    @property
    def _decisions(self) -> Decisions:
        return self._departures.decisions

    @property
    def num_running(self) -> int:
        """Admitted requests."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the system that do not run: queued, swapped, loading their prefix, or to start as a copy of another one."""
        return self._scheduler.num_waiting

    @property
    def num_waiting_by_reason(self) -> dict[str, int]:
        """Of `num_waiting`, those that wait for `capacity`, and those that were set aside, by reason (see `deferral`)."""
        aside = {} if self._scheduler.aside is None else self._scheduler.aside.by_reason()
        return {"capacity": self.num_waiting - sum(aside.values()), **aside}

    @property
    def wake_fs(self) -> int | None:
        """When to plan again though nothing happens until then: somebody who was set aside must be sent away. None if nobody was."""
        return None if self._scheduler.aside is None else self._scheduler.aside.wake_fs

    @property
    def num_unfinished(self) -> int:
        """Requests in the system."""
        return len(self._requests)

    def owned_blocks_in(self, ahead: int) -> int:
        """Blocks owned in step `ahead` of the plan that is out."""
        return self.pool.num_owned + self._scheduler.growth.owned_change(ahead)

    @property
    def oom_events(self) -> int:
        """Steps that ran out of memory so far."""
        return self._pressure.oom_events

    @property
    def discarded_tokens(self) -> int:
        """Tokens computed for requests that had ended, because their step was planned before that was known."""
        return 0 if self._lag is None else self._lag.discarded_tokens

    @property
    def steps(self) -> int:
        """Steps committed."""
        return self._scheduler.steps_done

    @property
    def version(self) -> int:
        """Changes whenever the running requests, or those of them that decode steadily, change."""
        return self._scheduler.version

    @property
    def prefix_queried_tokens(self) -> int:
        """Prompt tokens looked up in the prefix cache, once a request."""
        return self._scheduler.prefix_queried_tokens

    @property
    def prefix_hit_tokens(self) -> int:
        """Prompt tokens found there."""
        return self._scheduler.prefix_hit_tokens

    @property
    def offload(self) -> Offload | None:
        """The CPU prefix tier and its copies, if there is one."""
        return self._offload

    @property
    def cpu_hit_tokens(self) -> int:
        """Prompt tokens that were not found in the prefix cache, and loaded from the CPU tier."""
        return 0 if self._offload is None else self._offload.loads.hit_tokens

    @property
    def untold(self) -> Untold:
        """What became of blocks and sequences since the latest plan, which an executor has not been told yet."""
        decisions = self._decisions
        return Untold(slid=as_told(self._slid), releases=as_told(decisions.released), forks=tuple(decisions.forked))

    @property
    def running_tables(self) -> list[tuple[str, tuple[int, ...]]]:
        """`(request_id, block_table)` of every running request, as they are now."""
        return [(request.request_id, tuple(request.table.blocks)) for request in self._scheduler.running.values()]

    def diagnose(self) -> tuple[str, ...]:
        """What the admission policy made requests wait for, in sentences, when a reader of the results should know."""
        return self._admission.diagnose()

    @property
    def may_wake(self) -> bool:
        """Whether `next_wake_fs` can ever be anything but None."""
        return self._scheduler.cpu_server is not None or self._scheduler.aside is not None

    def next_wake_fs(self, now_fs: int) -> int | None:
        """When `wake` is to be called: the next request on the CPU executor has all its tokens, or may go back to an idle device; or an
        idle engine has to plan again (`wake_fs`).
        """
        server = self._scheduler.cpu_server
        times = [self.wake_fs]
        if server is not None and server.serving:
            times += [server.next_end_fs, self._pressure.cpu_held_until_fs()]
        return min((time_fs for time_fs in times if time_fs is not None and time_fs > now_fs), default=None)

    @property
    def watches_workspace(self) -> bool:
        """Whether a decision depends on how much memory steps need."""
        return self._pressure.watches_workspace

    @property
    def cpu_tokens(self) -> int | None:
        """Tokens that the CPU executor produced; None without one."""
        server = self._scheduler.cpu_server
        return None if server is None else server.tokens

    @property
    def idle_holdings(self) -> tuple[int, int, int]:
        """Owned blocks, token slots in all tables, and those of them that are filled: what is held while no plan is out."""
        scheduler = self._scheduler
        loading = {} if self._offload is None else self._offload.loads.waiting
        filled = sum(
            loading[request].filled_slots
            if request in loading
            else scheduler.decode.slots_filled(request, scheduler.decode.computed(request))
            for request in scheduler.holders()
        )
        return self.pool.num_owned, scheduler.holdings.table_blocks * scheduler.decode.slots_per_block, filled
