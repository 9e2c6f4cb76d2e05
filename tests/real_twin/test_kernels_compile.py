"""Every kernel is really compiled for GPUs that need not be there: no spills, within its budget, 16 bytes at a time."""

import json

import pytest
import torch

from gpu.compile_check import SHARED_LIMIT, TARGETS, Budget, CompileReport, compile_launch
from gpu.kernels.catalogue import CATALOGUE
from gpu.occupancy import Occupancy
from gpu.ops import OPERATIONS
from gpu.sass import Resources, parse
from tests.support.accounts import account

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function kernel:
  REG:40 STACK:8 SHARED:1024 LOCAL:0 CONSTANT[0]:592 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
CODE = """
        /*0050*/                   LDG.E R3, desc[UR4][R2.64] ;
        /*0060*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0070*/                   LDG.E.U8 R4, desc[UR4][R2.64] ;
        /*0080*/                   LDGSTS.E.BYPASS.LTC128B.128 [R7], desc[UR4][R2.64] ;
        /*0090*/                   LDGSTS.E.64 [R7], desc[UR4][R2.64] ;
        /*00a0*/                   LDGDEPBAR ;
        /*00b0*/                   LDS.128 R4, [R7] ;
        /*00c0*/                   STG.E.64 desc[UR4][R2.64], R4 ;
"""


def test_registers_stack_and_the_width_of_every_access_are_read_from_the_machine_code():
    found = parse(USAGE, CODE)
    assert (found.registers, found.stack_bytes) == (40, 8)
    assert found.loads == {1: 1, 4: 1, 8: 1, 16: 2}
    assert found.stores == {8: 1}
    assert (found.vector_bytes, found.narrow_loads) == (16, 2)


def test_text_that_is_not_cuobjdump_s_is_refused():
    with pytest.raises(ValueError, match="no register count"):
        parse("nothing here", "")


def test_a_report_says_what_its_budget_forbids():
    found = Resources(registers=200, stack_bytes=16, loads={4: 9, 8: 1}, stores={})
    slow = account(fits=Occupancy(1, "registers"), issued_bytes_per_s=2.4e12)
    budget = Budget(hidden_ns=1000, issued_share=0.6)
    report = CompileReport(name="k", target="sm_90", shared_bytes=60_000, resources=found, budget=budget, account=slow)
    assert not report.ok
    assert report.problems == [
        "16 bytes a thread are spilled",
        "200 registers of 128",
        "60000 bytes of shared memory of 49152",
        "reads 8 bytes at a time, not 16",
        "9 narrow reads of 8",
        "32 KiB in flight a multiprocessor hide 901 ns of 1000 at the bandwidth of h200-sxm-141gb",
        "instructions for 50% of the bandwidth of h200-sxm-141gb, not 60%",
    ]
    keys = {"name", "target", "registers", "spill_bytes", "shared_bytes", "vector_bytes", "ok"}
    assert keys <= set(json.loads(json.dumps(report.as_json())))


def test_the_catalogue_has_every_operation():
    operations = {name.partition("[")[0] for name in CATALOGUE}
    assert operations == {*OPERATIONS, "merge_splits"}


def test_a_launch_for_the_catalogue_takes_no_memory():
    make, _ = CATALOGUE["decode_attention[bf16,128,4]"]
    launch = make()
    assert all(each.device.type == "meta" for each in launch.arguments if isinstance(each, torch.Tensor))


def compiled(target, names):
    return {name: compile_launch(name, CATALOGUE[name][0](), target, CATALOGUE[name][1]) for name in names}


MAIN = [
    "store_kv[bf16]",
    "decode_attention[bf16,128,4,split]",
    "merge_splits[bf16,128]",
    "prefill_attention[bf16,128,4]",
]


def test_the_main_kernels_keep_their_budgets_on_hopper():
    reports = compiled("sm_90", MAIN)
    assert {name: report.problems for name, report in reports.items() if not report.ok} == {}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_every_kernel_keeps_its_budget(target):
    reports = compiled(target, CATALOGUE)
    assert {name: report.problems for name, report in reports.items() if not report.ok} == {}
    for report in reports.values():
        assert report.resources.stack_bytes == 0
        assert report.resources.vector_bytes >= 16
        assert report.shared_bytes <= SHARED_LIMIT[TARGETS[target]]


def test_the_loop_over_keys_and_values_reads_sixteen_bytes_at_a_time():
    # 32 positions x 128 numbers x 2 bytes of K and of V, by 128 threads: 4 reads of 16 bytes each, twice, and three times that
    # because the first two tiles are fetched before the loop; one more for the query. What is narrower are block ids and the length.
    report = compile_launch("decode", CATALOGUE["decode_attention[bf16,128,4]"][0](), "sm_90")
    assert report.resources.loads[16] == 25
    assert set(report.resources.loads) == {4, 16} and report.resources.narrow_loads <= 7
