"""Attention loads the next tiles while it multiplies: read from the machine code, and held in the budgets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu.compile_check import SHARED_LIMIT, Budget, CompileReport, compile_launch
from gpu.kernels.catalogue import CATALOGUE
from gpu.sass import Resources, parse
from tests.support.accounts import account

USAGE = " Function kernel:\n  REG:40 STACK:0 SHARED:1024 LOCAL:0"
CODE = """
        /*0080*/                   LDGSTS.E.BYPASS.LTC128B.128 [R7], desc[UR4][R2.64] ;
        /*00a0*/                   LDGDEPBAR ;
        /*00b0*/                   DEPBAR.LE SB0, {left} ;
        /*00c0*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*00d0*/                   DEPBAR.LE SB0, 0x0 ;
"""


@pytest.mark.parametrize(("left", "groups"), [("0x0", 0), ("0x1", 1), ("0xa", 10)])
def test_what_is_under_way_at_a_wait_is_read_from_the_machine_code(left, groups):
    assert parse(USAGE, CODE.format(left=left)).copies_in_flight == groups


def test_code_without_asynchronous_copies_has_none_under_way():
    assert parse(USAGE, "").copies_in_flight == 0


def test_a_loop_that_waits_for_all_it_has_asked_for_breaks_its_budget():
    found = Resources(registers=40, stack_bytes=0, loads={16: 4}, stores={})
    budget = Budget(copies_in_flight=3)
    report = CompileReport(name="k", target="sm_90", shared_bytes=0, resources=found, budget=budget, account=account())
    assert report.problems == ["0 groups of copies in flight, not 3: loads do not overlap"]
    assert report.as_json()["copies_in_flight"] == 0


def test_every_attention_kernel_is_held_to_it():
    held = {name.partition("[")[0] for name, (_, budget) in CATALOGUE.items() if budget.copies_in_flight >= 3}
    assert held == {"decode_attention", "prefill_attention"}
    for name, (_, budget) in CATALOGUE.items():
        if "attention" in name:
            assert budget.copies_in_flight >= 3, name
            assert budget.shared_bytes <= min(SHARED_LIMIT.values())


def test_with_three_stages_loads_and_products_take_turns():
    """Why there are five: the fault that the budget is there to find."""
    make, budget = CATALOGUE["decode_attention[bf16,128,4]"]
    launch = make()
    fewer = replace(launch, constants={**launch.constants, "STAGES": 3})
    report = compile_launch("three stages", fewer, "sm_90", budget)
    assert report.problems == [
        "0 groups of copies in flight, not 3: loads do not overlap",
        "96 KiB in flight a multiprocessor hide 2703 ns of 3000 at the bandwidth of h200-sxm-141gb",
    ]
