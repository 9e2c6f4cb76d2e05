"""The bill of a request: shares that are right by hand, and add up to what the pool had in use."""

from __future__ import annotations

from fractions import Fraction

import pytest

from sim.core.clock import to_fs
from sim.core.config import EngineConfig
from sim.core.request import RequestSpec
from sim.costs.constant import FixedCost
from sim.results.bill import Bill, bill_columns, bill_of
from sim.world import run_world

STEP = to_fs(1.0)
"""Every step takes a second."""


def bills(*requests: RequestSpec, **settings: object) -> tuple[dict[str, Bill], int]:
    """The bills by request, and the pool's integral of owned blocks."""
    roomy = {"num_gpu_blocks": 100, "block_size": 4, "max_model_len": 128, "max_num_seqs": 8}
    config = EngineConfig(**({**roomy, "max_num_batched_tokens": 128} | settings))
    record = run_world(config, FixedCost(1.0), requests, check=True)
    found = {request.request_id: bill_of(request, config.block_size) for request in record.requests}
    return found, record.recorders[0].integrals.block_fs


def request(name: str, arrival_s: float, input_tokens: int, output_tokens: int, content: str = "") -> RequestSpec:
    return RequestSpec(
        request_id=name,
        arrival_s=arrival_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        content_ids=tuple(content),
        content_block_tokens=4 if content else 0,
    )


def test_a_request_alone_pays_for_the_blocks_it_holds() -> None:
    """6 prompt tokens and 4 answers: steps with 6, 7, 8 and 9 tokens hold 2, 2, 2 and 3 blocks of 4."""
    found, pool = bills(request("alone", 0.0, 6, 4))
    bill = found["alone"]
    assert bill.owed_fs == bill.held_fs == pool == (2 + 2 + 2 + 3) * STEP
    assert bill.unfilled_slot_fs == ((8 - 6) + (8 - 7) + (8 - 8) + (12 - 9)) * STEP
    assert bill.shared_fs == 0


def test_two_requests_pay_half_of_what_they_share() -> None:
    """Both prompts are 13 tokens of which 12 are alike. The first steps alone for a second and both hold the 3 blocks for two;
    then the second, which has one answer more, has them alone for one more. The fourth block of each is its own."""
    found, pool = bills(request("first", 0.0, 13, 3, "abc"), request("second", 0.5, 13, 3, "abc"))
    # Steps: [0, 1) first alone; [1, 2) and [2, 3) both; [3, 4) second alone.
    assert found["first"].held_fs == found["second"].held_fs == 3 * 4 * STEP
    assert found["first"].saved_fs == found["second"].saved_fs == Fraction(2 * 3 * STEP, 2)
    assert found["first"].owed_fs == (4 + 2 * (Fraction(3, 2) + 1)) * STEP
    assert sum(bill.owed_fs for bill in found.values()) == pool == (4 + 5 + 5 + 4) * STEP


def test_three_requests_pay_a_third_and_forks_of_the_prefix_are_split() -> None:
    """All start in one step with 2 equal blocks; two of them share a third one too. Each has one block of its own."""
    found, pool = bills(
        request("a", 0.0, 13, 1, "xyz"), request("b", 0.0, 13, 1, "xyz"), request("c", 0.0, 13, 1, "xyw")
    )
    assert found["a"].owed_fs == found["b"].owed_fs == (Fraction(2, 3) + Fraction(1, 2) + 1) * STEP
    assert found["c"].owed_fs == (Fraction(2, 3) + 1 + 1) * STEP
    assert pool == sum(bill.owed_fs for bill in found.values()) == (2 + 1 + 1 + 3) * STEP


def test_thirds_are_exact_fractions_and_the_columns_show_them() -> None:
    config = EngineConfig(
        num_gpu_blocks=100, block_size=4, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=128
    )
    alike = [request(name, 0.0, 5, 1, "p") for name in "abc"]
    record = run_world(config, FixedCost(1.0), alike)
    columns = bill_columns(record.requests, 4, 1 << 20)
    exact = [Fraction(text) for text in columns["kv_block_fs"]]
    assert exact == [Fraction(4, 3) * STEP] * 3
    assert sum(exact) == record.recorders[0].integrals.block_fs == 4 * STEP
    assert columns["kv_gib_seconds"] == pytest.approx([4 / 3 / 1024] * 3)
    assert columns["waste_share"] == [pytest.approx(3 / 8)] * 3


def test_a_cached_prefix_that_nobody_holds_any_more_is_not_shared() -> None:
    found, _ = bills(request("first", 0.0, 13, 1, "abc"), request("later", 5.0, 13, 1, "abc"))
    assert [bill.saved_fs for bill in found.values()] == [0, 0]
    assert [bill.held_fs for bill in found.values()] == [4 * STEP, 4 * STEP]


def test_a_preempted_request_pays_for_both_of_its_stays() -> None:
    """Two requests that grow to ten blocks each, in a pool of twelve: the bills are still the pool's."""
    found, pool = bills(request("older", 0.0, 8, 30), request("younger", 0.0, 8, 30), num_gpu_blocks=12)
    assert sum(bill.owed_fs for bill in found.values()) == pool
    assert found["younger"].owed_fs > 0
