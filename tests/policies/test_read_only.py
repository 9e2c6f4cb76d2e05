"""A plug-in policy that would change what it looks at is stopped at once, by name (a policy decides and never does)."""

from __future__ import annotations

import pytest

from sim.core.admission import AdmissionBase
from sim.core.look import ReadOnlyError
from sim.core.policy import Policy
from sim.core.preemption import fewest_generated
from sim.core.waiting import FcfsQueue, KeyedQueue
from tests.support.engine_driver import EngineDriver


class Admission(AdmissionBase):
    """Does something it may not when an arrival comes, or when the head of the queue is tried."""

    def __init__(self, does: object, at: str) -> None:
        self.does, self.at = does, at

    def arrive(self, spec, view):
        if self.at == "arrive":
            self.does(spec, view)

    def may_start(self, request, need_blocks, view):
        if self.at == "may_start":
            self.does(request, view)
        return True


def served_by(policy: Policy) -> EngineDriver:
    engine = EngineDriver(8, 4, policy=policy, max_num_seqs=4)
    engine.add("first", 9, 9)
    engine.step()
    engine.add("second", 9, 9)
    engine.run()
    return engine


def sets(thing: str, name: str, value: object):
    """What a policy does that sets `name` of the request or of the view."""

    def does(request, view):
        touched = {"request": request, "view": view, "drain": view.drain, "outputs": view.drain.outputs}.get(thing)
        if thing == "running":
            touched = next(view.running(), None)
        if touched is not None:
            setattr(touched, name, value)

    return does


@pytest.mark.parametrize(
    ("thing", "name", "at"),
    [
        ("view", "now_fs", "arrive"),
        ("view", "num_free_blocks", "may_start"),
        ("view", "mine", "may_start"),
        ("view", "_scheduler", "may_start"),
        ("drain", "outputs", "arrive"),
        ("outputs", "num_finished", "may_start"),
        ("request", "num_tokens", "may_start"),
        ("request", "spec", "may_start"),
        ("request", "priority", "may_start"),
        ("running", "held_blocks", "may_start"),
        ("running", "_request", "arrive"),
    ],
)
def test_an_admission_policy_that_sets_something_is_named(thing, name, at):
    policy = Policy(admission=lambda config: Admission(sets(thing, name, 5), at))
    with pytest.raises(
        ReadOnlyError, match=rf"test_read_only:sets\.<locals>\.does would set {name} of .* to 5; a policy may look"
    ):
        served_by(policy)


def test_a_request_itself_is_never_shown():
    """What `may_start` is given has no lists, tables or counts of the engine's."""
    seen = []
    served_by(Policy(admission=lambda config: Admission(lambda request, view: seen.append(request), "may_start")))
    assert {request.request_id for request in seen} == {"first", "second"}
    for name in ("table", "cpu_blocks", "keys", "degraded", "target_tokens"):
        assert not hasattr(seen[0], name)
    with pytest.raises(ReadOnlyError, match="would delete state of request 'first'"):
        del seen[0].state


def shoves(running, known):
    """A victim policy that would take somebody out of the running set itself."""
    running.pop(next(iter(running)))


def marks(running, known):
    """A victim policy that would write on its victim."""
    victim = running[next(reversed(running))]
    victim.num_preemptions = 99
    return victim


def gentle(running, known):
    """One that only looks, with the help of one of kvtwin's."""
    assert all(
        known(request) == request.num_tokens or known(request) > request.num_tokens for request in running.values()
    )
    return fewest_generated(running, known)


@pytest.mark.parametrize(
    ("victim", "what"),
    [(shoves, "change the running requests"), (marks, "set num_preemptions of request 'second' to 99")],
)
def test_a_victim_policy_that_changes_something_is_named(victim, what):
    with pytest.raises(ReadOnlyError, match=f"test_read_only:{victim.__name__} would {what}"):
        served_by(Policy(victim=victim))


def test_a_victim_policy_that_only_looks_chooses_as_kvtwin_s_own_does():
    logs = [served_by(Policy(victim=victim)).log for victim in (gentle, fewest_generated)]
    assert logs[0] == logs[1]
    assert any(entry["preempted"] for entry in logs[0])


class Latest:
    """An order of a user's, from nothing of kvtwin's: who came last goes first."""

    steady = True

    def __init__(self, view) -> None:
        self.entries = []

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, request) -> bool:
        self.entries.append(request)
        return True

    put_back = add

    def started(self, request) -> None: ...

    def head(self, *, important: bool = False):
        return self.entries[-1] if self.entries else None

    def pop(self, request) -> None:
        assert self.entries.pop() is request

    def discard(self, request) -> None:
        self.entries.remove(request)


class Grabbing(Latest):
    def add(self, request) -> bool:
        request.order = 0
        return super().add(request)


class Named(FcfsQueue):
    """First come, first served, under a name of its own."""


def ordered(queue) -> EngineDriver:
    engine = EngineDriver(6, 4, policy=Policy(queue=queue), max_num_seqs=1)
    for name in ("first", "second", "third", "gone"):
        engine.add(name, 5, 2)
    engine.abort("gone")
    engine.run()
    return engine


def test_an_order_of_a_user_s_is_kept_and_sees_no_request():
    assert [entry["admitted"] for entry in ordered(Latest).log if entry["admitted"]] == [
        ["third"],
        ["second"],
        ["first"],
    ]
    assert ordered(Named).log == ordered(FcfsQueue).log
    with pytest.raises(ReadOnlyError, match=r"test_read_only:Grabbing\.add would set order of request 'first' to 0"):
        ordered(Grabbing)


def test_a_key_of_a_user_s_sees_no_request():
    def key(request):
        request.num_tokens = 1
        return 0

    with pytest.raises(ReadOnlyError, match=r"key would set num_tokens of request 'first' to 1"):
        ordered(lambda view: KeyedQueue(key, view))
