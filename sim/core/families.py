"""Families: sequences of one request that share blocks by forks with copy-on-write (n samples, beams).

The first sequence computes the prompt; the others are held until it has, and then start as copies of it: running requests whose
tables are the same blocks. Whoever writes first into a shared block that is not full gets a copy of it (`BlockTables.grow`); since
blocks are only ever appended to, what the other writes behind a copy's end does not disturb it. Later a sequence may go on as a copy of
another one: it gives its own blocks back and shares those.

A held sequence that may not run when its turn comes (no sequence slot, admission says no) waits at the head of the queue and comes back
through the prefix cache, where its source's full blocks can be found. A fork takes no tokens away: a sequence that is ahead of its source,
or that would be finished by the copy, stays as it is.

The running sequences of a request give way together and are swapped together, what they share once; the swapped come back in one step.
Those that are to be computed again stand one behind the other in the queue and start when there is room for all of them; they find what
they shared in the prefix cache, or leave it there. If nothing else runs, they come back one by one as far as there is room.
Where steps are planned ahead (`lag`), the next step is planned before it is known which sequences of a beam search go on: those that got a
token rest in it, and the copies are made when it is over. Samples that never replace each other do not wait.
Source: vLLM V0 sequence groups (engine-policies §1.2), which forked tables like this and moved as wholes. V0 could only swap them, and
died without room to; here they are computed again then, and one that is done later than the others lags behind them until it is replaced
by a copy of one of them. V0 failed a request whose sequences together outgrew the pool; here they then run one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from .family import Family, Fork
from .forks import Forks
from .request import Request, State

if TYPE_CHECKING:
    from .scheduler import Scheduler


class Families:
    """Holds, forks and forgets the sequences of one engine's requests."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._forks = Forks(scheduler)
        self._families: dict[str, Family] = {}
        self.num_held = 0
        """Sequences that wait for the first of theirs to compute their prompt; they are in no queue."""
        self._planned_ahead = scheduler.config.async_scheduling
        self.undecided: frozenset[int] = frozenset()
        """Where steps are planned ahead, by admission order: the running sequences of requests some of whose sequences may die by what
        the step under way samples. They rest until that is known."""
        self._got_token: set[Request] = set()
        """Those of them that got a token in the latest step."""
        self._chosen: Mapping[str, str] | None = None
        """What a sampler asked for in the latest step."""

    def __bool__(self) -> bool:
        return bool(self._families)

    def members(self, name: str) -> list[Request]:
        """The sequences of request `name` that are in the engine."""
        family = self._families.get(name)
        return [] if family is None else list(family.members.values())

    # -- coming and going -------------------------------------------------------------------------------------------

    def join(self, request: Request) -> bool:
        """A sequence has arrived; True if it is held until the first of its family has computed their prompt."""
        family = self._families.get(request.spec.sample_of)
        if family is None:
            self._families[request.spec.sample_of] = Family(request)
            return False
        family.members[request.spec.slot] = request
        if family.leader.first_token_fs is not None:
            return False
        family.held.append(request)
        self.num_held += 1
        return True

    def drop(self, request: Request) -> bool:
        """The client of a sequence left; True if it was held here."""
        family = self._families.get(request.spec.sample_of)
        if family is None or request not in family.held:
            return False
        family.held.remove(request)
        self.num_held -= 1
        return True

    def ended(self, request: Request) -> None:
        """A sequence has ended. If others were to start as copies of it, the next of them computes the prompt instead."""
        family = self._families.get(request.spec.sample_of)
        if family is None or not family.remove(request):
            return
        if not family.members:
            del self._families[request.spec.sample_of]
        elif request is family.leader and family.held:
            family.leader = family.held.pop(0)
            self.num_held -= 1
            self._scheduler.enqueue(family.leader)

    # -- moving together ----------------------------------------------------------------------------------------------

    def moving_with(self, victim: Request) -> list[Request]:
        """The running requests that give way with this one, oldest admission first: all sequences of its request, of which one alone
        would give back few blocks and lag behind the others.

        If nobody else runs, there is nobody to make room for but the others of them: then it goes alone, and they can go on.
        """
        if victim.spec.forking is None:
            return [victim]
        running, members = self._scheduler.running, self._families[victim.spec.sample_of].members.values()
        group = sorted((each for each in members if each.order in running), key=lambda each: each.order)
        return group if len(group) < len(running) else [victim]

    def swapped_with(self, request: Request) -> list[Request]:
        """The swapped requests that come back with this one, in the order in which they stand."""
        if request.spec.forking is None:
            return [request]
        return [each for each in self._scheduler.swapping.swapped if each.spec.sample_of == request.spec.sample_of]

    def waiting_with(self, request: Request) -> list[Request]:
        """The requests in the queue that gave way with this one and come back with it."""
        if request.spec.forking is None or not request.num_preemptions:
            return [request]
        members = self._families[request.spec.sample_of].members.values()
        return [each for each in members if each.state is State.WAITING and each.num_preemptions]

    # -- looking ahead ------------------------------------------------------------------------------------------------

    def steps_to_next(self, limit: int) -> int:
        """Decode steps until a sequence is copied, at most `limit`."""
        for family in self._families.values():
            for member in family.members.values() if family.changes else ():
                if member.decoding:
                    has = self._output(member)
                    limit = min(limit, family.next_copy(member, has) - has)
        return max(limit, 1)

    def _output(self, member: Request) -> int:
        return self._scheduler.decode.known(member) - member.spec.input_tokens

    def blocks_to_copy(self) -> int:
        """Copies that sequences which have just become copies of others must make before they write."""
        scheduler = self._scheduler
        groups, ref_cnt = scheduler.config.groups, scheduler.pool.ref_cnt
        return sum(
            request.num_computed_tokens % group.block_size > 0 and ref_cnt(table.blocks[-1]) > 1
            for request in scheduler.catching_up.values()
            if request.spec.forking is not None
            for group, table in zip(groups, request.table.groups, strict=True)
            if table.blocks
        )

    # -- forking ------------------------------------------------------------------------------------------------------

    def after_step(self, chosen: Mapping[str, str] | None, stopped: Collection[str], now_fs: int) -> list[Fork]:
        """Make the forks that are due when a step has been counted.

        `chosen` are those that a sampler asks for, child to source; None leaves it to the requests' own fate. Raises ValueError if a
        sampler asks for what is no fork.
        """
        forks = self._starts(now_fs)
        if not self._planned_ahead:
            return forks + self._follows(chosen, stopped, now_fs)
        forks += self._follows(self._chosen, (), now_fs)
        self._chosen = chosen
        self.undecided = frozenset(
            member.order
            for name in {request.spec.sample_of for request in self._got_token}
            for member in (self._families[name].members.values() if name in self._families else ())
            if member.state is State.RUNNING
        )
        self._got_token.clear()
        return forks

    def got_token(self, request: Request) -> bool:
        """A sequence outside the decode set has got a token; True if the next step is planned before it is known who of its family goes
        on.
        """
        if not self._planned_ahead or not self._families[request.spec.sample_of].changes:
            return False
        self._got_token.add(request)
        return True

    def learn_outcomes(self, now_fs: int) -> list[Fork]:
        """Nothing could be planned ahead: who goes on after the latest step is known now."""
        forks = self._follows(self._chosen, (), now_fs)
        self._chosen, self.undecided = None, frozenset()
        return forks

    def _starts(self, now_fs: int) -> list[Fork]:
        """Held sequences whose prompt has been computed start."""
        forks: list[Fork] = []
        for family in self._families.values():
            if family.held and family.leader.first_token_fs is not None:
                self.num_held -= len(family.held)
                forks += [self._forks.start(child, family.leader, now_fs) for child in family.held]
                family.held = []
        return forks

    def _follows(self, chosen: Mapping[str, str] | None, stopped: Collection[str], now_fs: int) -> list[Fork]:
        """Sequences that others go on as copies of."""
        pairs = self._fated(stopped) if chosen is None else self._asked(chosen)
        return [self._forks.follow(child, source, now_fs) for child, source in pairs if self._may_follow(child, source)]

    def _fated(self, stopped: Collection[str]) -> list[tuple[Request, Request]]:
        """Children and sources, by the requests' own fate."""
        pairs: list[tuple[Request, Request]] = []
        for family in self._families.values():
            if not family.changes:
                continue
            for source in family.members.values():
                has = self._output(source)
                if source.state is not State.RUNNING or not family.has_new_output(source, has):
                    continue
                if source in self._got_token:
                    continue  # not known yet
                children = family.followers(source, has, stopped=source.request_id in stopped)
                pairs += [(child, source) for child in children]
        return pairs

    def _asked(self, chosen: Mapping[str, str]) -> list[tuple[Request, Request]]:
        by_id = {
            member.request_id: (family, member)
            for family in self._families.values()
            for member in family.members.values()
        }
        pairs: list[tuple[Request, Request]] = []
        for child_id, source_id in chosen.items():
            if child_id not in by_id or source_id not in by_id:
                continue  # a client left during the step: this choice comes too late
            (family, child), (other, source) = by_id[child_id], by_id[source_id]
            if self._planned_ahead and source.state is not State.RUNNING:
                continue  # it has lost its blocks since
            if family is not other or child is source or source.state is not State.RUNNING or source_id in chosen:
                raise ValueError(
                    f"the result says that {child_id!r} goes on as a copy of {source_id!r}; they must be two sequences of one request, "
                    "and the second must run and be no copy itself"
                )
            pairs.append((child, source))
        return pairs

    def _may_follow(self, child: Request, source: Request) -> bool:
        known = self._scheduler.decode.known
        return known(child) <= known(source) < child.target_tokens
