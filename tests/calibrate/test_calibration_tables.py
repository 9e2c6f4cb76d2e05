"""Kernel tables: steps, scatter and few shapes are told apart, and what is judged was not looked at."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from calibration.errors import CalibrationError
from calibration.kernels.fit_gpu_attention import HEADS, fit_attention_tables
from calibration.kernels.gemm_few import TOKENS_HERE, Timed, as_table, fit_few, judge_few
from calibration.numerics.field import TIES, at, best_tie, fit_field
from calibration.readers.aiconfigurator import KernelTables
from calibration.recorded.host import Correction, fit_correction
from experiments.published.gaps import STATED_US, with_gap
from experiments.published.silicon_reasons import explained
from sim.catalog.gpus import GPUS
from sim.catalog.models import model_shape
from sim.core.batch_shape import BatchShape
from sim.costs.compose_attention import layer_attention
from sim.costs.fitted import FOLDER, fitted_cost
from sim.costs.piecewise import Line
from sim.costs.profile_file import read_profile

RNG = np.random.default_rng(11)
ISL = (1, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384)
SHORT_US, WIDE_US = 12.0, 5.0


# ── attention of a GPU ───────────────────────────────────────────────────────────────────────────────────────────────
def prompt_us(heads: int, kv_heads: int, isl: np.ndarray) -> np.ndarray:
    """A kernel that takes 5 us more to start from 65 rows on, a row being a token and a query head of a KV head."""
    wide = isl * heads // kv_heads > 64
    return SHORT_US + WIDE_US * wide + 1e-5 * heads * isl + 3e-7 * heads * isl**2


def kernel_tables() -> KernelTables:
    prompts, decodes = [], []
    for heads, kv_heads in HEADS[:5]:
        isl = np.asarray(ISL, dtype=float)
        prompts.append(
            pd.DataFrame(
                {
                    "num_heads": heads,
                    "num_key_value_heads": kv_heads,
                    "kv_cache_dtype": "bfloat16",
                    "isl": isl,
                    "us": prompt_us(heads, kv_heads, isl),
                }
            )
        )
        n, kv = (
            axis.ravel().astype(float) for axis in np.meshgrid([2**i for i in range(11)], [2**i for i in range(1, 15)])
        )
        decodes.append(
            pd.DataFrame(
                {
                    "num_heads": heads,
                    "num_key_value_heads": kv_heads,
                    "kv_cache_dtype": "bfloat16",
                    "batch_size": n,
                    "kv": kv,
                    "us": 10 + 0.05 * n + 2e-4 * kv_heads * n * kv,
                }
            )
        )
    none = pd.DataFrame()
    return KernelTables(
        folder=Path("x"),
        gpu="h100-sxm-80gb",
        device="x",
        engine="x",
        gemm=none,
        prefill=pd.concat(prompts),
        decode=pd.concat(decodes),
        all_reduce=none,
        eager_call_us=0.0,
    )


def test_prompts_of_32_and_64_tokens_that_no_fit_saw_lie_on_their_side_of_the_narrow_tile() -> None:
    entries, error = fit_attention_tables(kernel_tables(), 1 << 20, narrow_tile=True)
    assert error["held_out_prefill"]["points"] == 15, "32, 64 and 12,288 tokens of five pairs of heads"
    assert error["held_out_prefill"]["p95"] < 0.02
    by_heads = {(entry["heads"], entry["kv_heads"]): entry["prefill"] for entry in entries}
    assert {heads: entry["narrow_up_to"] for heads, entry in by_heads.items()} == {
        (32, 8): 16, (16, 4): 16, (8, 2): 16, (4, 1): 16, (64, 8): 8,
    }  # fmt: skip
    for (heads, kv_heads), entry in by_heads.items():
        edge = entry["chunk"].index(entry["narrow_up_to"])
        assert entry["chunk"][edge + 1] == entry["chunk"][edge] + 1
        known = prompt_us(heads, kv_heads, np.asarray(entry["chunk"], dtype=float))
        assert entry["us"] == pytest.approx(known, rel=0.02)


def test_without_the_narrow_tile_the_step_is_smeared_over_the_prompts_that_were_left_out() -> None:
    """The same table with one law: what the tile is for."""
    _, error = fit_attention_tables(kernel_tables(), 1 << 20, narrow_tile=False)
    assert error["held_out_prefill"]["p95"] > 0.10


def test_decodes_that_the_cache_served_are_counted_and_axes_are_held_out_whole() -> None:
    _, error = fit_attention_tables(kernel_tables(), 1 << 20, narrow_tile=True)
    assert error["held_out_decode"]["left_out_points"] == 0, "no call lies between 2 MiB and 1.2 of a cache of 1 MiB"
    assert error["held_out_axis: sequences > 128"]["points"] == 5 * 3 * 14
    assert error["held_out_axis: KV > 8192"]["points"] == 5 * 11
    _, cached = fit_attention_tables(kernel_tables(), 50 << 20, narrow_tile=True)
    assert cached["held_out_decode"]["left_out_points"] > 0


def test_no_table_of_any_known_heads_is_refused() -> None:
    tables = kernel_tables()
    odd = dataclasses.replace(tables, decode=tables.decode.assign(num_heads=7))
    with pytest.raises(CalibrationError, match="no attention rows"):
        fit_attention_tables(odd, 1 << 20, narrow_tile=True)


def test_chunks_that_share_a_call_pay_the_start_of_the_wide_tile_once() -> None:
    profile = read_profile(FOLDER / "h100-sxm-80gb.json")
    device, model = GPUS["h100-sxm-80gb"], model_shape("llama-3.1-8b")
    attention = layer_attention(profile, profile.data["kernels"], model.attention[0], 1, "auto", device, [])
    entry = profile.data["kernels"]["attention"][0]["prefill"]
    wide = [us for chunk, us in zip(entry["chunk"], entry["us"], strict=True) if chunk > entry["narrow_up_to"]]
    assert attention.launch_s == pytest.approx(min(wide) * 1e-6)
    assert attention.launch_s > attention.prefill.z[0][0]


# ── how much of a difference is scatter ──────────────────────────────────────────────────────────────────────────────
def test_a_noisy_table_is_tied_tighter_than_a_clean_one_with_steps() -> None:
    knots = [list(np.arange(1.0, 13.0)), list(np.arange(1.0, 13.0)), list(np.arange(1.0, 7.0))]
    points = [axis.ravel() for axis in np.meshgrid(*knots, indexing="ij")]
    law = np.full([len(axis) for axis in knots], 20.0)
    steps = 20 * np.where((points[0] * points[1]) % 5 < 2, 1.3, 1.0)
    noisy = 20 * RNG.normal(1.0, 0.1, points[0].size)
    clean_tie, noisy_tie = (best_tie(knots, points, time, law) for time in (steps, noisy))
    assert clean_tie < noisy_tie
    assert {clean_tie, noisy_tie} <= set(TIES)
    loose, tight = (fit_field(knots, points, noisy, law, tie=tie) for tie in (TIES[0], TIES[-1]))
    assert np.abs(tight - 20).mean() < np.abs(loose - 20).mean()
    assert at(tight, knots, points).shape == noisy.shape


# ── a few shapes ─────────────────────────────────────────────────────────────────────────────────────────────────────
def few_shapes() -> Timed:
    width, depth = (
        np.asarray(side, dtype=float) for side in ((6144, 4096, 28672, 4096, 3072), (4096, 4096, 4096, 14336, 2048))
    )
    tokens = np.asarray(TOKENS_HERE, dtype=float)[:, None]
    rate = 2e-6 * np.maximum(1.0, tokens / 200)
    return Timed(width, depth, 4.0 + 3e-6 * tokens * (width + depth) + rate * width * depth)


def test_start_traffic_and_rates_of_a_known_card_are_recovered_from_five_matrices() -> None:
    law = fit_few(few_shapes())
    assert law.start_us == pytest.approx(4.0, rel=1e-3)
    assert law.traffic_us == pytest.approx(3e-6, rel=1e-3)
    assert law.rate_us == pytest.approx(2e-6 * np.maximum(1.0, np.asarray(TOKENS_HERE) / 200), rel=1e-3)
    error = judge_few(few_shapes())
    assert error["points"] == 5 * len(TOKENS_HERE)
    assert error["p95"] < 1e-3
    table = as_table(law)
    assert table[0][0][0] == pytest.approx(4.0 + 3e-6 * 1024 + 2e-6 * 512**2, rel=1e-3)


# ── corrections ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_correction_is_found_although_statistics_jump_with_every_guess() -> None:
    """A simulation's statistics depend on which requests happen to meet: here by up to 1 % either way, whatever the guess."""

    def predict(times: Correction) -> np.ndarray:
        exact = np.asarray(
            [0.02 + times.step_s, 0.3 + 900 * times.token_s, 0.021 + times.step_s, 0.31 + 900 * times.token_s]
        )
        jump = np.sin(np.asarray([1e7, 3e7, 7e7, 9e7]) * (times.step_s + 50 * times.token_s) * 1e3)
        return np.asarray(exact * (1 + 0.01 * jump))

    truth = Correction(step_s=8e-4, token_s=4e-5)
    measured = np.asarray([0.0208, 0.336, 0.0218, 0.346])
    fit = fit_correction(predict, measured)
    assert fit.found.step_s == pytest.approx(truth.step_s, abs=1.5e-4)
    assert fit.found.token_s == pytest.approx(truth.token_s, rel=0.1)


def test_a_time_a_sequence_is_told_from_a_time_a_step_by_two_batch_sizes() -> None:
    def predict(times: Correction) -> np.ndarray:
        return np.asarray(
            [
                0.02 + times.step_s + 8 * times.seq_s,
                0.3 + 900 * times.token_s,
                0.03 + times.step_s + 30 * times.seq_s,
                0.31 + 900 * times.token_s,
            ]
        )

    truth = Correction(step_s=2e-4, token_s=5e-5, seq_s=1e-4)
    fit = fit_correction(predict, predict(truth), ("step_s", "token_s", "seq_s"))
    assert (fit.found.step_s, fit.found.token_s, fit.found.seq_s) == pytest.approx((2e-4, 5e-5, 1e-4), rel=1e-4)
    assert fit.residuals == pytest.approx([0.0] * 4, abs=1e-8)


# ── readings of a published row ──────────────────────────────────────────────────────────────────────────────────────
class Row:
    """A published row that two replicas shared, though it does not say so."""

    batch_size, tp_size, isl, osl, how = 64, 4, 1024, 512, "steady state"
    silicon_tpot_ms, tpot_error = 10.0, 1.0


def test_a_row_is_explained_by_the_reading_that_comes_nearest_or_by_none() -> None:
    cost = fitted_cost("auto", model_shape("llama-3.1-8b"), GPUS["h100-sxm-80gb"], tensor_parallel_size=4)
    assert explained(Row, cost, lambda prices, clients: clients * 20e-3 / 64) == "+0% if 2 replicas shared the clients"
    assert explained(Row, cost, lambda prices, clients: 20e-3).startswith("no reading halves it; nearest +100%")


def test_a_gap_is_scaled_and_nothing_else() -> None:
    cost = fitted_cost("h100-sxm-80gb", model_shape("llama-3.1-8b"), GPUS["h100-sxm-80gb"])
    step = BatchShape(decode_seqs=4, decode_context_tokens=4000, sampled_seqs=4)
    none, stated, twice = (with_gap(cost, gap).step_fs(step) for gap in (0.0, STATED_US, 2 * STATED_US))
    assert stated == cost.step_fs(step)
    assert twice - stated == pytest.approx(stated - none, abs=2)
    assert stated - none == pytest.approx(cost.terms.gap_s * 1e15, abs=2)
    assert isinstance(cost.terms.dense, Line)
