"""Family: the sequences of one request that are in the engine, and what their fate says of who goes on as a copy of whom."""

from __future__ import annotations

from dataclasses import dataclass

from .request import Request


@dataclass(frozen=True, slots=True)
class Fork:
    """A sequence that goes on as a copy of another one."""

    child: Request
    source: Request
    started: bool = False
    """Whether it was held, and runs now."""
    shared: tuple[int, ...] = ()
    """The source's blocks, which it has now too (a later fork of the same step may give it others); empty if it waits, and will have to
    find or compute them again."""
    released: list[int] | None = None
    """Blocks that it gave back for that; None if it had none."""


class Family:
    """The sequences of one request that are in the engine."""

    __slots__ = ("held", "leader", "members", "_counted", "_due", "_replaced")

    def __init__(self, leader: Request) -> None:
        self.leader = leader
        """Computes the prompt for all."""
        self.held: list[Request] = []
        """Those that will start as copies of it."""
        self.members = {leader.spec.slot: leader}
        """By place in the request."""
        self._due: dict[str, int] = {}  # by sequence: the number of output tokens at which others go on as copies of it
        self._counted: dict[str, int] = {}  # by sequence: the number of output tokens up to which that has been done
        self._replaced: dict[int, tuple[tuple[int, int], ...]] = {}

    @property
    def changes(self) -> bool:
        """Whether its sequences may go on as copies of each other."""
        return self.leader.spec.forking is not None and self.leader.spec.forking.change > 0

    def remove(self, member: Request) -> bool:
        """A sequence has left the engine; False if it is none of these."""
        if self.members.get(member.spec.slot) is not member:
            return False
        del self.members[member.spec.slot]
        self._due.pop(member.request_id, None)
        return True

    def next_copy(self, member: Request, has: int) -> int:
        """Output tokens at which a sequence that has `has` of them is copied next, or at which it ends; never before the next token."""
        spec = member.spec
        due = self._due.get(member.request_id, 0)
        if due <= has:
            stop = max(member.target_tokens - spec.input_tokens, has + 1)
            ahead = range(max(has + 1, 2), stop)
            due = next(
                (tokens for tokens in ahead if any(of == spec.slot for _, of in self._replaced_at(tokens))), stop
            )
            self._due[member.request_id] = due
        return due

    def has_new_output(self, source: Request, has: int) -> bool:
        """Whether a sequence has more output tokens than `followers` was told. At the first token all are copies of one anyway."""
        return has > self._counted.get(source.request_id, 1)

    def followers(self, source: Request, has: int, *, stopped: bool) -> list[Request]:
        """Who, by their fate, goes on as a copy of a sequence that has `has` output tokens now; nobody if it has stopped."""
        self._counted[source.request_id] = has
        if stopped:
            return []
        slot, members = source.spec.slot, self.members
        return [members[child] for child, of in self._replaced_at(has) if of == slot and child in members]

    def _replaced_at(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """As `Forking.replaced`, remembered."""
        pairs = self._replaced.get(tokens)
        if pairs is None:
            spec = self.leader.spec
            assert spec.forking is not None
            pairs = self._replaced[tokens] = spec.forking.replaced(spec.sample_of, tokens)
        return pairs
