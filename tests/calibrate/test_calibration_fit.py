"""Fits recover what they were given, judge themselves on points they did not see, and refuse what they cannot use."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from calibration.document import write
from calibration.errors import CalibrationError
from calibration.kernels.attention import fit_attention
from calibration.kernels.attention_mixed import tiles, together
from calibration.kernels.fit_model import fit_model_profile
from calibration.numerics.field import at, fit_field, unmeasured
from calibration.numerics.split import held_out_mask
from calibration.numerics.tent import fit_line, never_falling, robust_nonnegative
from calibration.readers.llmservingsim import read_profile
from calibration.recorded.host import Correction, fit_correction
from calibration.sources import fit_source
from calibration.tables import checked
from calibration.timed_steps.linear import LEAST_STEPS, TERMS, fit_steps
from experiments.self_test import INJECTED, NOISE, coverage, designed_steps, logged_steps
from sim.catalog.gpus import GPUS
from sim.catalog.models import model_shape
from sim.core.config import ConfigError
from sim.costs.fitted import FOLDER, fitted_cost, profile_names
from sim.costs.profile_file import read_profile as read_document

RNG = np.random.default_rng(7)


# ── the numeric core ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_table_is_recovered_from_scattered_points() -> None:
    knots = (1.0, 10.0, 100.0)
    x = RNG.uniform(1, 100, 200)
    fit = fit_line(x, np.interp(x, knots, (2.0, 3.0, 30.0)), knots)
    assert fit.values == pytest.approx([2.0, 3.0, 30.0], rel=1e-6)
    assert fit.identified.all()


def test_one_wild_measurement_in_twenty_changes_little() -> None:
    x = np.tile(np.linspace(1, 100, 40), 5)
    time = 5 + 0.1 * x
    time[::20] *= 6
    fit = fit_line(x, time, (1.0, 100.0))
    assert fit.values == pytest.approx([5.1, 15.0], rel=0.03)


def test_a_field_that_is_its_law_is_recovered_where_nothing_was_measured() -> None:
    knots = ([1.0, 2.0, 4.0, 8.0], [10.0, 20.0, 40.0, 80.0])
    x, y = (axis.ravel() for axis in np.meshgrid(*knots, indexing="ij"))
    law = (3 + x * y).reshape(4, 4)
    inner = (y < 80) & ~((x == 2.0) & (y == 20.0))
    fitted = fit_field(knots, (x[inner], y[inner]), (3 + x * y)[inner], law)
    assert fitted == pytest.approx(law, rel=1e-3)
    assert unmeasured(knots, (x[inner], y[inner])) == (5, 16)


def test_a_field_follows_measurements_across_a_jump_that_all_rows_have() -> None:
    """Half of the second variable costs twice: the tie across the jump is loose, so a hole on either side takes after its own side."""
    knots = (list(np.arange(1.0, 9.0)), list(np.arange(1.0, 9.0)))
    x, y = (axis.ravel() for axis in np.meshgrid(*knots, indexing="ij"))
    time = 10 * x * np.where(y > 4, 2.0, 1.0)
    hole = (x == 3) & ((y == 4) | (y == 5))
    law = (13 * x).reshape(8, 8)
    fitted = fit_field(knots, (x[~hole], y[~hole]), time[~hole], law)
    assert at(fitted, knots, (x[hole], y[hole])) == pytest.approx(time[hole], rel=0.05)


def test_one_wild_measurement_does_not_bend_a_field() -> None:
    knots = ([1.0, 2.0, 4.0, 8.0, 16.0], [10.0, 20.0, 40.0, 80.0])
    x, y = (np.tile(axis.ravel(), 4) for axis in np.meshgrid(*knots, indexing="ij"))
    time = 3 + x * y
    time[5] *= 4
    law = (3 + x * y)[:20].reshape(5, 4)
    assert fit_field(knots, (x, y), time, law) == pytest.approx(law, rel=0.05)


def test_coefficients_are_never_negative_and_units_do_not_matter() -> None:
    design = np.stack([np.ones(50), np.linspace(0, 1e9, 50)], axis=1)
    assert robust_nonnegative(design, 3 + 2e-9 * design[:, 1]).values == pytest.approx([3, 2e-9], rel=1e-6)
    falling = robust_nonnegative(design, 30 - 2e-8 * design[:, 1])
    assert (falling.values >= 0).all()


def test_never_falling_lies_between_the_tables_above_and_below() -> None:
    assert never_falling(np.asarray([1.0, 3.0, 2.0, 4.0])).tolist() == [1.0, 2.5, 2.5, 4.0]


def test_the_split_is_frozen() -> None:
    assert held_out_mask(10).sum() == 2
    assert (held_out_mask(1000) == held_out_mask(1000)).all()


# ── the loop tests itself ────────────────────────────────────────────────────────────────────────────────────────────
def test_an_injected_cost_vector_is_recovered_within_a_hundredth_of_a_per_cent_without_noise() -> None:
    fit = fit_steps(logged_steps(1), resamples=2)
    assert fit.unidentified == ()
    assert fit.values == pytest.approx(INJECTED, rel=1e-4)


def test_with_realistic_noise_a_designed_set_recovers_every_cost_within_a_per_cent() -> None:
    """2 % noise on each of 4,000 steps; a served log of the same noise cannot tell context from sequences."""
    fit = fit_steps(designed_steps(3, NOISE, 4000), resamples=2)
    assert fit.values == pytest.approx(INJECTED, rel=0.01)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    share, worst = coverage(12, resamples=60)
    assert 0.85 <= share <= 1.0
    assert worst < 0.03


def test_steps_that_are_all_alike_identify_nothing() -> None:
    log = logged_steps(1)
    with pytest.raises(CalibrationError, match=f"at least {LEAST_STEPS}"):
        fit_steps(log[:10])
    fit = fit_steps([log[100]] * 60, resamples=2)
    assert set(fit.unidentified) == set(TERMS)


def test_a_correction_is_recovered_and_no_more_terms_than_observations_are_fitted() -> None:
    def predict(times: Correction) -> np.ndarray:
        return np.asarray(
            [0.02 + times.step_s + 8 * times.seq_s, 0.04 + times.step_s + 64 * times.seq_s, 0.3 + 900 * times.token_s]
        )

    terms = ("step_s", "seq_s", "token_s")
    fit = fit_correction(predict, predict(Correction(step_s=5e-4, seq_s=1e-5, token_s=2e-5)), terms)
    assert (fit.found.step_s, fit.found.seq_s, fit.found.token_s) == pytest.approx((5e-4, 1e-5, 2e-5), rel=1e-5)
    one = fit_correction(lambda times: predict(times)[:1], np.asarray([0.0205]))
    assert one.identified == ("step_s",)
    assert one.found == Correction(step_s=pytest.approx(5e-4))
    slow = fit_correction(predict, predict(Correction()) * 0.9)
    assert slow.found == Correction(), "kernels already too slow: no negative times"


# ── attention ────────────────────────────────────────────────────────────────────────────────────────────────────────
def synthetic_calls() -> tuple[np.ndarray, np.ndarray]:
    """Calls of a card whose attention is known: 10 us to start, and so much a pair and a context token."""
    rows = []
    sizes, lengths = (1, 2, 4, 8, 16, 32, 64, 128), (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    for chunk in (0, 16, 32, 64, 128, 256, 512, 1024, 2048):
        for context in (0, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if chunk else (0,):
            for n in (0, *sizes) if chunk else sizes:
                rows += [(chunk, context, n, kv) for kv in (lengths if n else (0,))]
    calls = np.asarray(rows, dtype=np.float64)
    chunk, context, n, kv = calls.T
    prefill = 10 + 2e-4 * chunk * (context + chunk / 2)
    beside = 2 + 0.008 * n * kv
    mixed = 10 + together(prefill - 10, beside, np.where(tiles(n, chunk) < 5, 8.0, 1.0)) + 1e-3 * n * chunk
    alone = 8 + 0.004 * n * kv
    return calls, np.where(chunk == 0, alone, np.where(n == 0, prefill, mixed))


def test_attention_of_a_known_card_is_recovered() -> None:
    calls, time_us = synthetic_calls()
    fit = fit_attention(calls, time_us)
    assert fit.mixed.tile_us == pytest.approx(1e-3, rel=0.02)
    error = np.abs(fit.predict(calls) / time_us - 1)
    assert np.median(error) < 0.02
    many = (calls[:, 2] >= 16) & (calls[:, 0] > 0)
    assert np.quantile(error[many], 0.95) < 0.08


def test_too_few_calls_of_a_kind_are_refused() -> None:
    calls, time_us = synthetic_calls()
    keep = (calls[:, 0] == 0) | (calls[:, 2] == 0)
    with pytest.raises(CalibrationError, match="0 measured mixed calls cannot identify"):
        fit_attention(calls[keep], time_us[keep])


# ── tables that cannot be used ───────────────────────────────────────────────────────────────────────────────────────
def test_a_table_in_another_unit_is_refused_by_name() -> None:
    table = pd.DataFrame({"tokens": [1, 2], "time_ms": [1.0, 2.0]})
    with pytest.raises(CalibrationError, match=r"'time_us' is missing.*'time_ms' instead, which is another unit"):
        checked(table, ("tokens", "time_us"), "t.csv", 1)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"a": [1.0]}, "column 'b' is missing; it has a"),
        ({"b": [1.0, float("nan")]}, "row 2 has b = nan"),
        ({"b": [-1.0, 2.0]}, r"row 1 has b = -1.0; a finite number, at least 0"),
        ({"b": [1.0]}, "1 rows are too few"),
    ],
)
def test_a_bad_table_is_refused(table: dict[str, list[float]], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        checked(pd.DataFrame(table), ("b",), "t.csv", 2)


def kernel_folder(folder: Path, **files: str | None) -> Path:
    """A small LLMServingSim kernel profile of the known card; `files` replaces or removes parts."""
    calls, time_us = synthetic_calls()
    attention = pd.DataFrame(calls.astype(int), columns=["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"])
    tokens = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    dense = [
        (op, count, 5 + 0.05 * count)
        for op in ("qkv_proj", "o_proj", "layernorm", "act_fn", "embedding")
        for count in tokens
    ]
    rows = [(op, count, 20 + 0.5 * count) for op in ("lm_head", "sampler") for count in tokens[:9]]
    parts = {
        "meta.yaml": "gpu: NVIDIA GeForce RTX 4090\nmodel: meta-llama/Llama-3.1-8B\nvllm_version: 0.19.0\n",
        "tp1/attention.csv": attention.assign(time_us=time_us).to_csv(index=False),
        "tp1/dense.csv": pd.DataFrame(dense, columns=["layer", "tokens", "time_us"]).to_csv(index=False),
        "tp1/per_sequence.csv": pd.DataFrame(rows, columns=["layer", "sequences", "time_us"]).to_csv(index=False),
    } | {
        name.replace("__", "/").replace("_csv", ".csv").replace("_yaml", ".yaml"): text for name, text in files.items()
    }
    (folder / "tp1").mkdir(parents=True)
    for name, text in parts.items():
        if text is not None:
            (folder / name).write_text(text)
    return folder


def test_a_folder_of_kernel_tables_becomes_a_profile_that_can_be_read(tmp_path: Path) -> None:
    source = read_profile(kernel_folder(tmp_path / "k"))
    profile = fit_model_profile(source, date="2026-01-01", command="test")
    write(profile, tmp_path / "p.json")
    read = read_document(tmp_path / "p.json")
    assert (read.kind, read.gpu, read.model) == ("model", "rtx-4090-24gb", "llama-3.1-8b")
    assert profile["error"]["held_out"]["median"] < 0.02
    # 32 layers of qkv, o, two norms and activation, and the embedding once.
    assert profile["terms"]["dense"]["us"][0] == pytest.approx(32 * 5 * 5.05 + 5.05, rel=1e-3)
    assert any("unequal contexts" in note for note in profile["identifiability"])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"meta_yaml": None}, "nobody can say what was measured"),
        ({"meta_yaml": "gpu: X\nmodel: Y\n"}, "does not say 'vllm_version'"),
        ({"tp1__dense_csv": "layer,tokens,time_ms\na,1,2\n"}, "another unit"),
        (
            {"tp1__attention_csv": "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,9.3\n"},
            "1 rows are too few",
        ),
    ],
)
def test_a_kernel_folder_that_lacks_something_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        read_profile(kernel_folder(tmp_path / "k", **files))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="not a folder of measurements"):
        fit_source(tmp_path, tensor_parallel_size=1, date="", command="")
    with pytest.raises(CalibrationError, match=r"no tables for tensor-parallel size 4; there are: tp1"):
        read_profile(kernel_folder(tmp_path / "k"), 4)


# ── profile files ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema version 2, this version of kvtwin reads 1"),
        ({"schema": "other"}, "not a profile"),
        ({"time_unit": "ms"}, "time_unit is 'ms'"),
        ({"kind": "guess"}, "kind is 'guess'"),
        ({"provenance": {"source": "x"}}, "does not say 'licence'"),
        ({"error": None}, "does not say 'error'"),
        ({"range": None}, "does not say 'range'"),
        ({"model": None}, "must say which model"),
        ({"provenance": "mine"}, "provenance is 'mine'; it must be a table"),
        ({"host": "none"}, "host is 'none'; it must be a table"),
        ({"error": {"held_out": {}}}, "does not say 'held_out' with a 'median'"),
        ({"error": {"held_out": {"median": 0.1}}}, "does not say 'end_to_end'"),
        ({"tensor_parallel_size": "two"}, "tensor_parallel_size is 'two'"),
        (
            {"host": {"step_us": -1e6}},
            r"host\.step_us is -1000000\.0; times, sizes and rates are finite and at least 0",
        ),
        ({"host": {"step_us": math.nan}}, r"host\.step_us is nan; times"),
        ({"terms": {"dense": {"tokens": [1], "us": [math.inf]}}}, r"terms\.dense\.us\[0\] is inf; times"),
    ],
)
def test_a_profile_that_cannot_be_judged_is_not_used(tmp_path: Path, change: dict[str, object], message: str) -> None:
    data = json.loads((FOLDER / "rtx-4090-24gb.llama-3.1-8b.tp1.json").read_text())
    for key, value in change.items():
        if value is None:
            del data[key]
        else:
            data[key] = value
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message):
        read_document(path)


def test_kernel_terms_that_lack_something_are_refused(tmp_path: Path) -> None:
    data = json.loads((FOLDER / "h100-sxm-80gb.json").read_text())
    del data["kernels"]["head_dim"]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"p\.json: a kernel term is missing or malformed: KeyError 'head_dim'"):
        fitted_cost(str(path), model_shape("llama-3.1-8b"), GPUS["h100-sxm-80gb"])


def test_a_profile_that_is_not_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="not a profile"):
        read_document(path)


@pytest.mark.parametrize("name", profile_names())
def test_every_embedded_profile_says_where_it_comes_from_and_how_good_it_is(name: str) -> None:
    profile = read_document(FOLDER / f"{name}.json")
    assert profile.name == name
    assert profile.data["identifiability"]
    host = profile.data["host"]
    assert (host["step_us"], host["seq_us"]) == (0.0, 0.0), "kernels only: no run was looked at"
    assert "not fitted" in host["origin"]
    assert 0 < profile.data["error"]["held_out"]["median"] <= 0.05
    assert profile.data["error"]["held_out"]["p95"] <= 0.15
    assert all(len(drawn) == 40 for drawn in profile.data["samples"].values())
    assert profile.data["samples"].keys() == profile.data["intervals"].keys() != set()
    assert "/" not in profile.data["provenance"]["command"].replace("SYSTEM/", "")


def test_kernel_terms_of_a_card_come_from_tables_of_that_card_alone(tmp_path: Path) -> None:
    from calibration.kernels.fit_card import fit_card_profile

    one = read_profile(kernel_folder(tmp_path / "a"))
    other = read_profile(
        kernel_folder(
            tmp_path / "b", meta_yaml="gpu: NVIDIA RTX PRO 6000\nmodel: Qwen/Qwen3-32B\nvllm_version: 0.19.0\n"
        )
    )
    with pytest.raises(CalibrationError, match="of 2 cards"):
        fit_card_profile([one, other], date="", command="")
    with pytest.raises(CalibrationError, match="2 timed matrices cannot tell"):
        fit_card_profile([one], date="", command="")


def test_the_noise_floor_is_what_repeats_differ_by(tmp_path: Path) -> None:
    from calibration.readers.splitwise import noise_floor

    path = tmp_path / "perf.csv"
    head = "model,hardware,prompt_size,batch_size,token_size,tensor_parallel,prompt_time,token_time\n"
    rows = [f"m,h,512,{size},128,2,{time},{10}\n" for size in range(1, 5) for time in (100, 110, 90)]
    path.write_text(head + "".join(rows))
    assert noise_floor(path) == {
        "prompt_time": {"median": pytest.approx(0.1), "p95": pytest.approx(0.1)},
        "token_time": {"median": 0, "p95": 0},
    }
    path.write_text(head + "".join(f"m,h,{size},1,128,2,100,10\n" for size in range(20)))
    with pytest.raises(CalibrationError, match="repeats are needed"):
        noise_floor(path)


def test_kernel_tables_of_another_schema_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="writing Parquet tables needs pyarrow")
    from calibration.readers.aiconfigurator import read_tables

    with pytest.raises(CalibrationError, match="not a folder of kernel tables"):
        read_tables(tmp_path)
    folder = tmp_path / "h100_sxm"
    (folder / "vllm" / "1.0").mkdir(parents=True)
    with pytest.raises(CalibrationError, match="no vllm/VERSION/gemm_perf.parquet"):
        read_tables(folder)
    table = pd.DataFrame(
        {"device": ["x"] * 200, "gemm_dtype": ["bfloat16"] * 200, "m": 1, "n": 1, "k": 1, "latency_us": 1.0}
    )
    table.to_parquet(folder / "vllm" / "1.0" / "gemm_perf.parquet")
    with pytest.raises(CalibrationError, match="column 'latency' is missing"):
        read_tables(folder)
