"""Faults are planted in plans, slots and copies; the device's own books must catch each of them, by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.real_run import run_scenario
from experiments.validation import SCENARIOS, reference_answers, run_for_real
from experiments.validation.worlds import changed_answers, preset
from gpu.cpu_moves import ChangedBlockError, CpuMoves
from gpu.fences import FenceError
from gpu.group_rows import slots_of
from gpu.pool import PoisonedReadError
from gpu.swap import BlockMover
from sim.core.blocks import DoubleFreeError, IntegrityError
from sim.core.request import Outcome
from sim.scenario import Scenario
from tests.support.scenarios import with_engine
from tests.support.tampered import Tampered, tampering

pytestmark = pytest.mark.usefixtures("steady_time")


UNCACHED = with_engine(SCENARIOS["pressure-0"], enable_prefix_caching=False)


def test_a_block_released_while_it_is_read_is_named():
    planted: list[int] = []

    def release_early(plan):
        reader = plan.scheduled(0)[0]
        if plan.step < 5 or planted or reader.context_tokens < 4:
            return plan
        planted.append(plan.step)
        whole = reader.block_table[: reader.context_tokens // 4]
        return replace(plan, releases=(*plan.releases, (reader.request_id, whole)))

    with pytest.raises(
        PoisonedReadError, match=r"^(r\d) reads block \d+ at step (\d+): token 0 .*released by \1 at step \2$"
    ):
        run_for_real(UNCACHED, preset("vllm-v1"), wrap=tampering(release_early))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", ["pressure-0", "samples-0", "hybrid-0"])
def test_a_cached_block_released_while_it_is_used_is_named(name, whole):
    """The prefix cache keeps what is in it, so that no NaN tells: that its owner gave it back, and uses it on, does. One block of the
    context, which others may hold too, or all of them.
    """
    planted: list[int] = []

    def release_early(plan):
        reader = next((r for r in plan.scheduled(0) if r.context_tokens > 8), None)
        if plan.step < 5 or planted or reader is None:
            return plan
        planted.append(plan.step)
        table = reader.block_table[: reader.context_tokens // 4]
        return replace(plan, releases=(*plan.releases, (reader.request_id, table if whole else table[-1:])))

    with pytest.raises(
        (IntegrityError, PoisonedReadError),
        match=r"^(r\d\S*) (uses|reads) block \d+ at step (\d+).* released by \1 at step \3",
    ):
        run_for_real(SCENARIOS[name], preset("vllm-v1"), wrap=tampering(release_early))


def test_a_prefix_block_that_was_dropped_too_soon_is_named():
    """Somebody else's table shares it: only the last one to hold it may make room."""
    scenario = SCENARIOS["prefixes-0"]

    def forget(inner):
        inner._moves._is_cached = lambda block: False  # the device is told that nobody will look for it again
        return inner

    with pytest.raises(PoisonedReadError, match=r"reads block \d+ at step \d+"):
        run_for_real(scenario, preset("trtllm-no-evict"), wrap=forget)


def test_a_double_release_names_both():
    done: dict[str, tuple[int, ...]] = {}

    def release_twice(plan):
        again = [(name, blocks) for name, blocks in done.items() if blocks][:1]
        done.update((name, blocks) for name, blocks in plan.releases if name not in plan.preempted)
        return replace(plan, releases=(*plan.releases, *again))

    with pytest.raises(
        DoubleFreeError, match=r"block \d+ is released twice: first by (r\d) at step \d+, now by \1 at step"
    ):
        run_for_real(UNCACHED, preset("trtllm-no-evict"), wrap=tampering(release_twice))


def test_a_leak_on_abort_is_named():
    """The core's books add up; the device was never told."""
    scenario = SCENARIOS["leavers-0"]
    requests = {spec.request_id: spec for spec in scenario.requests}

    lost: list[str] = []

    def forget(plan):
        for name, _ in plan.releases:
            if requests[name].cancel_after_s is not None and name not in plan.preempted and not lost:
                lost.append(name)
        return replace(plan, releases=tuple(entry for entry in plan.releases if entry[0] not in lost[:1]))

    with pytest.raises(
        IntegrityError,
        match=r"blocks differ: block \d+ is held by (r\d) \(since step \d+\) on the device and by nobody in the tables",
    ):
        run_for_real(scenario, preset("vllm-v1"), wrap=tampering(forget))
    assert lost


def test_a_run_that_leaks_ends_with_the_block_its_owner_and_when_it_got_it(tmp_path):
    """Also without `--check`: the device's book is kept in every run."""
    scenario = tmp_path / "leaks.toml"
    scenario.write_text(
        "[model]\nmodel = 'tiny-llama-test'\n[engine]\nnum_gpu_blocks_override = 40\nmax_model_len = 64\n"
        "[workload]\nworkload = 'uniform'\nnum_requests = 3\nrate = 20.0\ninput_tokens = [9, 20]\noutput_tokens = [3, 9]\n"
        "[run]\nexecutor = 'torch'\n",
        encoding="utf-8",
    )

    class Forgetful(Tampered):
        def close(self, untold):
            self.inner.close(replace(untold, releases=()))

    with pytest.raises(
        IntegrityError, match=r"block \d+ is held by \S+ \(since step \d+\) on the device and by nobody"
    ):
        run_scenario(Scenario.load(scenario), wrap=lambda inner: Forgetful(inner, lambda plan: plan))


def test_a_wrong_slot_is_named(monkeypatch):
    def one_off(name, table, start, stop, block_size):
        slots = slots_of(name, table, start, stop, block_size)
        if name == "r3" and start:
            slots[-1] = slots[-1] - 1 if slots[-1] % block_size else slots[-1] + 1
        return slots

    monkeypatch.setattr("gpu.batch_parts.slots_of", one_off)
    with pytest.raises(
        PoisonedReadError, match=r"^r3 reads block \d+ at step \d+: token \d+ of its table is NaN in layer 0"
    ):
        run_for_real(SCENARIOS["pressure-0"], preset("vllm-v1"))


def test_a_table_that_lost_a_block_is_named():
    planted: list[int] = []

    def swap_for_another(plan):
        first, *rest = plan.scheduled(0)
        if plan.step < 6 or planted or not first.context_tokens:
            return plan
        planted.append(plan.step)
        spare = next(block for block in range(1, 99) if all(block not in r.block_table for r in (first, *rest)))
        changed = replace(first, block_table=(spare, *first.block_table[1:]))
        return replace(plan, repeat=1, scheduled=lambda ahead: (changed, *rest))

    with pytest.raises(
        IntegrityError, match=r"r\d no longer uses blocks \[\d+\] at step \d+, and no plan released them"
    ):
        run_for_real(UNCACHED, preset("vllm-v1"), wrap=tampering(swap_for_another))


class OnASlowBus:
    """Copies between the device and the CPU pool arrive one step late."""

    def __init__(self, inner) -> None:
        self.inner, self.mover = inner, inner.moves.cpu._mover
        assert isinstance(self.mover, BlockMover)
        self.mover.latency_steps = 1

    def execute(self, plan):
        self.mover.poll()
        return self.inner.execute(plan)

    def close(self, untold):
        self.inner.close(untold)


def test_a_copy_that_has_not_arrived_is_waited_for():
    """On a device without streams nothing would end the wait, so it is an error there."""
    with pytest.raises(FenceError, match=r"step \d+ is not done"):
        run_for_real(SCENARIOS["swaps-2"], preset("vllm-v1"), wrap=OnASlowBus)


def test_a_copy_without_its_fence_is_named(monkeypatch):
    """What it saves has been given away, and poisoned, by the time it is read. The sums taken before tell."""
    scenario = with_engine(SCENARIOS["swaps-2"], enable_prefix_caching=False)
    monkeypatch.setattr(CpuMoves, "_await", lambda self, fence: None)
    with pytest.raises(
        ChangedBlockError,
        match=r"^block \d+ of r\d, restored at step \d+, is not what was saved at step \d+: checksum [0-9a-f]{8}",
    ):
        run_for_real(scenario, preset("vllm-v1"), wrap=OnASlowBus)


def test_without_the_checks_a_copy_without_its_fence_changes_answers(monkeypatch):
    """The fault is one that matters: unchecked, it goes unnoticed until somebody reads the answer."""
    scenario = with_engine(SCENARIOS["swaps-2"], enable_prefix_caching=False)
    monkeypatch.setattr(CpuMoves, "_await", lambda self, fence: None)
    run = run_for_real(scenario, preset("vllm-v1"), wrap=OnASlowBus, checked=False)
    assert changed_answers(run, reference_answers(scenario))


@pytest.mark.parametrize("checked", [True, False])
def test_without_a_fault_nothing_is_found(checked):
    for name in ("swaps-2", "prefixes-0", "leavers-0"):
        run = run_for_real(SCENARIOS[name], preset("vllm-v1"), checked=checked)
        assert run.leaked_blocks == 0
        assert run.fallbacks == 0
        assert all(request.outcome in tuple(Outcome) for request in run.requests)
