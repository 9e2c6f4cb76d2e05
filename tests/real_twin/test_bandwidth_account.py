"""The bandwidth account: programs a multiprocessor, bytes in flight, Little's law, waves; each worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.bandwidth import CARDS, LATENCY_NS, clock_hz
from gpu.compile_check import Budget, compile_launch
from gpu.decode_account import SHAPES, decode_accounts
from gpu.kernels.catalogue import CATALOGUE
from gpu.kernels.splits import RESIDENT, choose_splits, resident_programs, wave_share
from gpu.occupancy import LIMITS, Occupancy, occupancy
from gpu.sass_walk import instructions, traffic
from sim.catalog.gpus import GPUS
from tests.support.accounts import account


def code(*lines: str) -> str:
    """Machine code as it is dumped: an instruction every 16 bytes."""
    return "\n".join(f"        /*{16 * index:04x}*/   {line} ;   /* 0x0 */" for index, line in enumerate(lines))


def walked(*lines: str):
    return traffic(instructions(code(*lines)))


# -- programs a multiprocessor -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "architecture", "programs", "held_by"),
    [
        (32, 0, 8, 90, 8, "warps"),  # 64 warps of 8; 65,536 registers for 256 threads of 32 would be 8 too
        (64, 0, 8, 90, 4, "registers"),  # 64 x 32 x 8 = 16,384
        (65, 0, 8, 90, 3, "registers"),  # rounded up to 72: 2,304 a warp, 28 warps
        (86, 38_144, 4, 90, 5, "registers"),  # 88 x 32 = 2,816 a warp: 23, in fours 20
        (86, 38_144, 4, 80, 4, "shared memory"),  # 164 KiB for 38,144 + 1,024 each
        (86, 38_144, 4, 89, 2, "shared memory"),  # 100 KiB
        (16, 0, 1, 90, 32, "programs"),
        (16, 0, 1, 89, 24, "programs"),
        (16, 0, 4, 89, 12, "warps"),  # 48
        (255, 0, 16, 90, 0, "registers"),  # 16 warps of 8,160 registers: not one fits
        (32, 232_448, 4, 90, 1, "shared memory"),
        (32, 232_449, 4, 90, 0, "shared memory"),
    ],
)
def test_as_many_programs_fit_as_the_published_limits_allow(
    registers, shared_bytes, num_warps, architecture, programs, held_by
):
    found = occupancy(registers=registers, shared_bytes=shared_bytes, num_warps=num_warps, architecture=architecture)
    assert found == Occupancy(programs, held_by)


def test_the_clock_is_that_of_the_data_sheet_s_peak():
    assert clock_hz(GPUS["a100-sxm-80gb"]) == pytest.approx(1.41e9, rel=0.001)  # its boost clock, by the data sheet
    for name in CARDS.values():
        assert 1.2e9 < clock_hz(GPUS[name]) < 2.7e9, name
    assert set(CARDS) == set(LIMITS)


# -- bytes in flight, from machine code ----------------------------------------------------------------------------------


def test_reads_that_nothing_waits_for_are_in_flight_together():
    found = walked(
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "LDG.E.128 R8, desc[UR4][R2.64+0x10]",
        "STG.E.128 desc[UR4][R16.64], R4",
        "STG.E.128 desc[UR4][R16.64+0x10], R8",
        "EXIT",
    )
    assert (found.read_bytes, found.written_bytes, found.latencies, found.in_flight_bytes) == (32, 32, 1, 32)
    assert (found.instructions, found.loops) == (5, False)


def test_a_read_whose_address_is_read_first_waits_a_second_latency():
    found = walked(
        "LDG.E.64 R2, desc[UR4][R6.64]",
        "LDG.E.128 R8, desc[UR4][R2.64]",
        "STG.E.128 desc[UR4][R16.64], R8",
        "EXIT",
    )
    assert (found.read_bytes, found.latencies, found.in_flight_bytes) == (24, 2, 12)


def test_tables_and_scales_take_time_but_are_no_data():
    found = walked("LDG.E R3, desc[UR4][R6.64]", "IMAD R2, R3, 0x10, RZ", "LDG.E.128 R8, desc[UR4][R2.64]", "EXIT")
    assert (found.read_bytes, found.latencies) == (16, 2)


def test_each_part_of_a_vector_is_waited_for():
    together = walked("LDG.E.128 R4, desc[UR4][R2.64]", "LDG.E.128 R8, desc[UR4][R2.64]", "EXIT")
    apart = walked("LDG.E.128 R4, desc[UR4][R2.64]", "FADD R0, R7, R7", "LDG.E.128 R8, desc[UR4][R2.64]", "EXIT")
    wide = walked("LDG.E.ENL2.256 R12, R4, desc[UR4][R2.64]", "FADD R0, R15, R7", "LDG.E R8, desc[UR4][R2.64]", "EXIT")
    assert (together.latencies, apart.latencies, wide.latencies) == (1, 2, 2)
    assert wide.read_bytes == 32


def test_of_two_branches_one_is_walked_and_what_is_never_carried_out_is_not_counted():
    found = walked(
        "@P0 BRA 0x40",
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "@!PT LDS RZ, [RZ]",
        "BRA 0x50",
        "LDG.E.128 R8, desc[UR4][R2.64]",
        "STG.E.128 desc[UR4][R16.64], R4",
        "EXIT",
        "LDG.E.128 R8, desc[UR4][R2.64]",
        "BRA 0x80",
    )
    assert (found.read_bytes, found.written_bytes, found.instructions) == (16, 16, 5)


def ring(left: int) -> str:
    """A loop that waits until `left` groups of copies are under way, uses one, and asks for the next."""
    return code(
        "MOV R1, c[0x0][0x28]",
        f"DEPBAR.LE SB0, {left:#x}",
        "HMMA.16816.F32.BF16 R32, R32, R24, RZ",
        "LDGSTS.E.BYPASS.128 [R7], desc[UR4][R2.64]",
        "LDGSTS.E.BYPASS.128 [R7+0x800], desc[UR4][R2.64]",
        "LDGDEPBAR",
        "@P5 BRA 0x10",
        "EXIT",
    )


@pytest.mark.parametrize(("left", "bytes_per_latency"), [(0, 32), (1, 64), (2, 96), (7, 256)])
def test_a_ring_of_copies_keeps_one_more_in_flight_than_it_may_leave_under_way(left, bytes_per_latency):
    # Asked for when an older one has come: with n left under way at the wait, n + 1 come in every latency.
    found = traffic(instructions(ring(left)))
    assert found.loops and found.read_bytes == 32 and found.instructions == 6
    assert found.in_flight_bytes == pytest.approx(bytes_per_latency)


def test_a_loop_that_reads_and_uses_at_once_has_one_read_in_flight():
    found = walked(
        "MOV R1, c[0x0][0x28]",
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "FADD R0, R4, R0",
        "BRA.U UP0, 0x10",
        "EXIT",
    )
    assert (found.loops, found.latencies, found.in_flight_bytes, found.instructions) == (True, 1, 16, 3)


def test_code_without_reads_has_nothing_in_flight():
    assert walked("MOV R1, c[0x0][0x28]", "EXIT").in_flight_bytes == 0
    assert traffic([]).in_flight_bytes == 0


# -- Little's law ---------------------------------------------------------------------------------------------------------


def test_what_is_in_flight_hides_a_latency_by_little_s_law():
    found = account()
    assert found.in_flight_bytes == 163_840
    assert found.hidden_ns == pytest.approx(163_840 * 132 / 4800)  # bytes over bytes a nanosecond: 4,506 ns
    assert found.waves == pytest.approx(1024 / 660)
    assert found.sustained_share == pytest.approx(2.0)  # its instructions are the narrower bound
    assert account(fits=Occupancy(1, "registers")).sustained_share == pytest.approx(0.9011, abs=1e-4)
    none = account(fits=Occupancy(0, "registers"))
    assert (none.hidden_ns, none.waves, none.sustained_share) == (0, 0, 0)


def test_a_kernel_that_cannot_sustain_the_bandwidth_breaks_its_budget():
    make, budget = CATALOGUE["decode_attention[bf16,128,4,split]"]
    launch = make()
    kept = compile_launch("five programs", launch, "sm_90", budget)
    assert kept.problems == []
    # 4 warps x 32 threads x 8 reads of 16 bytes, two tiles in every latency
    assert kept.account.program_in_flight_bytes == 32_768
    assert kept.account.fits.programs == RESIDENT[9, 0]
    assert kept.as_json()["bandwidth"]["hidden_ns"] == 4506
    small = replace(launch, constants={**launch.constants, "BLOCK_N": 16}, num_warps=8)
    broken = compile_launch("small tiles", small, "sm_90", budget)
    assert any("KiB in flight a multiprocessor hide" in text for text in broken.problems)


def test_instructions_may_be_what_there_is_too_much_of():
    make, _ = CATALOGUE["decode_attention[fp8,128,4]"]
    report = compile_launch("fp8", make(), "sm_90", Budget(registers=200, narrow_loads=44, issued_share=1.0))
    assert len(report.problems) == 1 and "of the bandwidth of h200-sxm-141gb, not 100%" in report.problems[0]


def test_every_kernel_of_decode_is_held_to_the_bandwidth_of_its_card():
    for name, (_, budget) in CATALOGUE.items():
        if name.startswith("decode_attention"):
            assert budget.hidden_ns >= (900 if "fp8" in name else 1800) and budget.issued_share > 0, name
    assert CATALOGUE["decode_attention[bf16,128,4]"][1].hidden_ns >= 3 * LATENCY_NS


# -- waves and splits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("programs", "share"),
    [
        (660, 1.0),  # one full wave
        (1320, 1.0),
        (396, 1.0),  # a part of one that fills the memory
        (198, 0.5),  # half of what fills it
        (1056, 1.0),  # 660 and 396
        (664, 664 / (660 + 396)),  # four are left over
        (1024, 1024 / (660 + 396)),  # 364 are left over
    ],
)
def test_the_last_wave_costs_what_fills_the_memory(programs, share):
    assert wave_share(programs=programs, slots=660, enough=396) == pytest.approx(share)


def test_full_waves_that_do_not_fill_the_memory_cost_more():
    assert wave_share(programs=200, slots=100, enough=150) == pytest.approx(200 / 300)


@given(st.integers(1, 5000), st.integers(1, 800), st.integers(1, 800))
def test_a_share_is_never_more_than_all(programs, slots, enough):
    assert 0 < wave_share(programs=programs, slots=slots, enough=enough) <= 1


def test_a_batch_that_fills_the_device_is_not_split_and_one_sequence_is_spread_over_it():
    splits = {
        batch: choose_splits(num_seqs=batch, num_kv_heads=8, max_tokens=tokens, num_sms=132)
        for batch, tokens in ((1, 8192), (16, 8192), (64, 8192), (83, 8192), (128, 4096))
    }
    # 64 x 8 programs run at once, 128 x 8 leave 364 of 396 for a second wave; of 83 x 8 = 664 four would run alone.
    assert (splits[64], splits[128]) == (1, 1)
    assert splits[83] > 1
    assert 8 * splits[1] >= 396 and 16 * 8 * splits[16] >= 0.9 * 396


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_splits_are_chosen_with_the_programs_that_really_fit(target):
    report = compile_launch("decode", CATALOGUE["decode_attention[bf16,128,4,split]"][0](), target)
    assert report.account.fits.programs == resident_programs(report.account.gpu.compute_capability)


def test_the_shapes_with_a_bar_can_use_the_whole_bandwidth():
    report = compile_launch("decode", CATALOGUE["decode_attention[bf16,128,4,split]"][0](), "sm_90")
    shapes = {(each.batch_size, each.context_tokens): each for each in decode_accounts(report.account)}
    assert tuple(shapes) == SHAPES
    assert shapes[64, 8192].busy_share == shapes[128, 4096].busy_share == 1.0
    # 4.8 TB/s for a microsecond, of programs with 32 KiB each
    assert shapes[64, 8192].enough == 147
    one = shapes[1, 8192]
    assert one.merge_bytes == 2 * 32 * one.num_splits * 129 * 4
    assert one.num_bytes == 8192 * 8 * 128 * 2 * 2 + 2 * 32 * 128 * 2
    assert one.as_json()["programs"] == 8 * one.num_splits
    assert decode_accounts(account(fits=Occupancy(0, "registers"))) == []
