"""Requests set aside for a reason of their own (B06): they take no slot, nobody waits behind them, and their time runs out."""

from __future__ import annotations

import pytest

from sim.core.admission import AdmissionBase, CanEverFit, Deferral, Every, FreeBlocks
from sim.core.config import ConfigError, EngineConfig
from sim.core.policies import LoraSlots
from sim.core.policy import Policy
from sim.core.request import Namespace, Outcome, RequestSpec
from sim.costs.constant import FixedCost
from sim.world import run_world


class RemoteKv(AdmissionBase):
    """The KV of requests called `remote…` comes from elsewhere: when `arrived` says so, or never."""

    may_defer = True

    def __init__(self) -> None:
        self.arrived: set[str] = set()

    def may_start(self, request, need_blocks, view):
        if not request.request_id.startswith("remote") or request.request_id in self.arrived:
            return True
        return Deferral(reason="remote_kv", why="its KV has not arrived from its prefill node", give_up_after_s=5.0)


def beside(gate):
    return Policy(admission=lambda config: Every([CanEverFit(config), gate, FreeBlocks()]))


def test_b06_four_deferred_requests_take_none_of_four_slots(drive):
    """max_num_seqs 4; the KV of four requests never arrives; the fifth, a plain one, runs at once. After their 5 s they are told so."""
    engine = drive(num_gpu_blocks=100, block_size=16, max_num_seqs=4, policy=beside(RemoteKv()))
    stuck = [engine.add(f"remote {index}", 32, output_tokens=4) for index in range(4)]
    plain = engine.add("plain", 32, output_tokens=3)
    assert engine.step().tokens == {"plain": 32}
    assert engine.core.num_waiting_by_reason == {"capacity": 0, "remote_kv": 4}
    assert engine.core.num_running == 1
    engine.run()
    assert plain.outcome is Outcome.FINISHED
    assert engine.core.wake_fs == 5 * 10**15
    engine.now_fs = engine.core.wake_fs
    assert engine.step() is None
    assert {request.outcome for request in stuck} == {Outcome.REJECTED}
    assert {request.finish_reason for request in stuck} == {"deferred_remote_kv"}
    assert stuck[0].reason == "waited 5.0 s aside: its KV has not arrived from its prefill node"
    assert (engine.core.wake_fs, engine.core.num_waiting) == (None, 0)


def test_when_the_reason_is_gone_they_start_before_those_who_came_later(drive):
    kv = RemoteKv()
    engine = drive(num_gpu_blocks=100, block_size=16, max_num_seqs=2, policy=beside(kv))
    engine.add("remote 1", 32, output_tokens=4)
    engine.add("plain 1", 32, output_tokens=2)
    engine.step()
    engine.add("plain 2", 32)
    engine.add("plain 3", 32)
    kv.arrived.add("remote 1")
    assert engine.step().tokens == {"plain 1": 1, "remote 1": 32}
    assert list(engine.step().tokens) == ["remote 1", "plain 2"]


def test_a_deferred_request_can_leave(drive):
    engine = drive(num_gpu_blocks=100, block_size=16, policy=beside(RemoteKv()))
    engine.add("plain", 32, output_tokens=3)
    gone = engine.add("remote", 32)
    engine.step()
    assert engine.abort("remote")
    assert gone.outcome is Outcome.ABORTED
    assert engine.core.num_waiting_by_reason == {"capacity": 0}
    engine.run()
    assert engine.core.num_unfinished == 0


@pytest.mark.parametrize("stepping", [True, False])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_an_idle_engine_wakes_to_send_them_away(stepping, async_scheduling):
    """Nothing else happens after the first request is done; without a wake-up nobody would ever hear of the other."""
    config = EngineConfig(num_gpu_blocks=100, max_num_seqs=4, async_scheduling=async_scheduling)
    requests = [
        RequestSpec(request_id=name, arrival_s=0.0, input_tokens=32, output_tokens=3) for name in ("remote", "plain")
    ]
    record = run_world(config, FixedCost(1.0), requests, policy=beside(RemoteKv()), stepping=stepping, check=True)
    remote, plain = record.requests
    assert (plain.outcome, remote.outcome) == (Outcome.FINISHED, Outcome.REJECTED)
    assert remote.ended_fs == 5 * 10**15


def test_adapters_beyond_the_slots_step_aside_for_those_that_run(drive):
    """One slot: b waits for a's adapter to be gone; a2, which shares it, and the base model do not wait behind b."""
    engine = drive(num_gpu_blocks=100, block_size=16, policy=beside(LoraSlots(1)))
    engine.add("a1", 16, output_tokens=4, namespace=Namespace(lora="a"))
    engine.step()
    for name, lora in (("b", "b"), ("a2", "a"), ("base", "")):
        engine.add(name, 16, output_tokens=2, namespace=Namespace(lora=lora))
    assert engine.step().tokens == {"a1": 1, "a2": 16, "base": 16}
    assert engine.core.num_waiting_by_reason == {"capacity": 0, "lora_slots": 1}
    engine.step()
    engine.step()
    assert engine.step().tokens == {"b": 16}


def test_adapter_slots_must_be_some():
    with pytest.raises(ConfigError, match="max_loras is 0"):
        LoraSlots(0)
