"""Whole steps, real runs and unequal contexts as sources of a fit: right answers first, and what cannot be used is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import sim
from calibration.document import write
from calibration.errors import CalibrationError
from calibration.judging.uncertainty import drawn, draws, with_intervals
from calibration.kernels.skew import SkewTable, skew_terms
from calibration.profile_page import page
from calibration.readers import distserve, splitwise
from calibration.recorded.bench_json import read_bench
from calibration.recorded.fit_requests import fit_requests
from calibration.recorded.runs import read_run
from calibration.recorded.twin import simulate_requests
from calibration.sources import fit_source, is_run
from calibration.timed_steps.whole_steps import fit_whole_steps
from experiments.cli import main
from experiments.published.exp0_sessions import with_sessions
from sim.catalog.gpus import gpu
from sim.catalog.models import model_shape
from sim.core.batch_shape import BatchShape
from sim.costs.fitted import fitted_cost
from sim.costs.overlap import OverlappedHost, overlapped
from sim.costs.profile import FittedProfile
from sim.costs.profile_file import read_profile

LAWS = {
    "facebook/opt-13b": {
        "1": {
            "decoding_large_small_bs_threshold": 95,
            "prefill": [20.0, 0.1, 4e-6],
            "decoding_smallbs": [20.0, 6e-4, 0.05],
            "decoding_largebs": [15.0, 5e-4, 0.12],
        }
    }
}


# ── DistServe's laws ─────────────────────────────────────────────────────────────────────────────────────────────────
def laws_file(folder: Path, **changes: object) -> Path:
    laws = json.loads(json.dumps(LAWS))
    laws["facebook/opt-13b"]["1"].update(changes)
    path = folder / "profiler-a100-80g.vllm.json"
    path.write_text(json.dumps(laws))
    return path


def test_a_law_of_others_is_priced_as_it_stands(tmp_path: Path) -> None:
    source = distserve.read_laws(laws_file(tmp_path), "opt-13b", 1)
    profile = fit_whole_steps(source, date="2026-01-01", command="test")
    write(profile, tmp_path / "p.json")
    cost = fitted_cost(str(tmp_path / "p.json"), model_shape("opt-13b"), gpu("a100-sxm-80gb"))
    decode = BatchShape(decode_seqs=32, decode_context_tokens=32 * 700, sampled_seqs=32)
    large = BatchShape(decode_seqs=128, decode_context_tokens=128 * 700, sampled_seqs=128)
    prompt = BatchShape(prefill=((1024, 0),), sampled_seqs=1)
    assert cost.step_fs(decode) / 1e12 == pytest.approx(20.0 + 6e-4 * 32 * 700 + 0.05 * 32, rel=1e-3)
    assert cost.step_fs(large) / 1e12 == pytest.approx(15.0 + 5e-4 * 128 * 700 + 0.12 * 128, rel=1e-3)
    assert cost.step_fs(prompt) / 1e12 == pytest.approx(20.0 + 0.1 * 1024 + 4e-6 * 1024**2, rel=1e-3)
    assert profile["error"]["held_out"]["median"] is None, "the measurements behind the law were not published"
    assert any("of unknown error" in text for text in cost.warnings())


@pytest.mark.parametrize(
    ("model", "ranks", "changes", "message"),
    [
        (None, 1, {}, r"no model is chosen; it holds opt-13b"),
        ("opt-66b", 1, {}, r"no model 'opt-66b'"),
        ("opt-13b", 2, {}, r"tensor-parallel size 2; there are: 1"),
        ("opt-13b", 1, {"prefill": [1.0, 2.0]}, r"'prefill' must be three coefficients"),
        ("opt-13b", 1, {"decoding_smallbs": [1.0, -2.0, 3.0]}, r"of at least 0"),
        ("opt-13b", 1, {"decoding_large_small_bs_threshold": None}, r"from which batch on"),
    ],
)
def test_laws_that_cannot_be_used_are_refused(
    tmp_path: Path, model: str | None, ranks: int, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(CalibrationError, match=message):
        distserve.read_laws(laws_file(tmp_path, **changes), model, ranks)


# ── Splitwise's batches ──────────────────────────────────────────────────────────────────────────────────────────────
def batches(path: Path) -> Path:
    """A model whose steps are known: 30 ms, 0.05 ms a token of a prompt, 0.1 ms a sequence and 1 us a KV token of a decode."""
    rows = []
    sizes = [(prompt, 1, 128) for prompt in (128, 256, 512, 1024, 2048, 4096)]
    sizes += [(512, batch, 128) for batch in (2, 4, 8, 16, 32, 64)] + [(512, 1, out) for out in (256, 512, 1024, 4096)]
    for prompt, batch, out in sizes:
        for noise in (0.99, 1.0, 1.01):
            prompt_ms = 30 + 0.05 * batch * prompt
            token_ms = 30 + 0.1 * batch + 1e-3 * batch * (prompt + out / 2)
            rows.append(("llama2-70b", "h100-80gb", prompt, batch, out, 2, prompt_ms * noise, token_ms * noise))
    columns = [
        *splitwise.KEYS[:2],
        "prompt_size",
        "batch_size",
        "token_size",
        "tensor_parallel",
        "prompt_time",
        "token_time",
    ]
    pd.DataFrame(rows, columns=columns).to_csv(path, index=False)
    return path


def test_static_batches_give_back_the_model_that_made_them(tmp_path: Path) -> None:
    path = batches(tmp_path / "perf_model.csv")
    profile = fit_source(path, tensor_parallel_size=2, model="llama-2-70b", gpu="h100-sxm-80gb", date="d", command="c")
    write(profile, tmp_path / "p.json")
    cost = fitted_cost(str(tmp_path / "p.json"), model_shape("llama-2-70b"), gpu("h100"), tensor_parallel_size=2)
    decode = BatchShape(decode_seqs=16, decode_context_tokens=16 * 576, sampled_seqs=16)
    assert cost.step_fs(decode) / 1e12 == pytest.approx(30 + 1.6 + 1e-3 * 16 * 576, rel=0.02)
    assert cost.step_fs(BatchShape(prefill=((2048, 0),), sampled_seqs=1)) / 1e12 == pytest.approx(
        30 + 0.05 * 2048, rel=0.02
    )
    assert profile["error"]["held_out"]["median"] < 0.02


@pytest.mark.parametrize(
    ("model", "device", "ranks", "message"),
    [
        (None, None, 2, "choose one of its models and GPUs"),
        ("llama-2-70b", "l40s-48gb", 2, "l40s-48gb were given"),
        ("llama-2-70b", "h100-sxm-80gb", 8, "tensor-parallel size 8; there are: 2"),
    ],
)
def test_batches_that_are_not_there_are_refused(
    tmp_path: Path, model: str | None, device: str | None, ranks: int, message: str
) -> None:
    with pytest.raises(CalibrationError, match=message):
        splitwise.read_steps(batches(tmp_path / "p.csv"), model, device, ranks)


# ── unequal contexts ─────────────────────────────────────────────────────────────────────────────────────────────────
def unequal(kv_heads: int = 8, sm_count: int = 188) -> SkewTable:
    """No cost of unequal lengths up to 37 sequences (0.8 x 2 x 188 / 8), and 3.8 / n beyond."""
    rows = []
    for n in (8, 16, 32, 64, 128):
        for big in (1024, 2048, 4096):
            for mean in (500, 900):
                gain = 0.0 if n <= 37 else 3.8 / n * (big / mean - 1)
                rows.append(("pure", n, 0, big, mean, 100.0, 300.0, 100.0 * (1 + gain)))
                rows.append(("mixed", n, 256, big, mean, 100.0, 300.0, 100.0 * (1 + 0.01 * (big / mean - 1))))
    columns = ["regime", "n", "pc", "kv_big", "kv_mean", "t_mean_us", "t_max_us", "t_skew_us"]
    return SkewTable(table=pd.DataFrame(rows, columns=columns), kv_heads=kv_heads, sm_count=sm_count)


def test_unequal_contexts_cost_nothing_while_the_kernel_splits_and_one_over_n_beyond() -> None:
    terms, errors = skew_terms(unequal())
    seqs, share = terms["decode_skew"]["seqs"], terms["decode_skew"]["share"]
    assert unequal().split_up_to == 37
    assert np.interp([32, 37, 38, 64, 128], seqs, share) == pytest.approx(
        [0, 0, 3.8 / 38, 3.8 / 64, 3.8 / 128], abs=1e-4
    )
    assert errors["pure"]["p95"] < 1e-6 < errors["pure"]["without_the_term"]["p95"]


def test_with_half_the_kv_heads_the_edge_comes_at_twice_the_batch() -> None:
    """Blocks of threads fill the GPU, one a sequence and KV head."""
    whole, half = (skew_terms(unequal(), heads)[0]["decode_skew"]["seqs"] for heads in (8, 4))
    assert half == [2 * count for count in whole]


# ── intervals of predictions ─────────────────────────────────────────────────────────────────────────────────────────
def test_a_draw_scales_each_term_by_its_own_factor() -> None:
    cost = fitted_cost("auto", model_shape("llama-3.1-8b"), gpu("h100"))
    number = 3
    assert cost.terms.spreads.keys() == {"composition", "gap"}
    scaled = drawn(FittedProfile(replace(cost.terms, spreads={}), name=cost.name), number).terms
    for name in ("dense", "rows", "decode", "prefill", "mixed"):
        factor = cost.terms.samples[name][number]
        before, after = getattr(cost.terms, name), getattr(scaled, name)
        values = [(one, two) for one, two in zip(_flat(before), _flat(after), strict=True) if one]
        assert all(two == pytest.approx(one * factor) for one, two in values)


def _flat(table: object) -> list[float]:
    return [value for row in table.z for value in row] if hasattr(table, "z") else list(table.y)


def test_an_interval_holds_its_share_and_few_draws_or_plain_prices_are_refused() -> None:
    cost = fitted_cost("auto", model_shape("llama-3.1-8b"), gpu("h100"))
    assert len(draws(cost, 5)) == 5
    assert all(isinstance(one, OverlappedHost) for one in draws(overlapped(cost), 4))
    with pytest.raises(CalibrationError, match="at least 4"):
        draws(cost, 2)
    with pytest.raises(CalibrationError, match="say nothing of their uncertainty"):
        draws(sim.costs.Roofline(model_shape("llama-3.1-8b"), gpu("h100")), 8)


# ── corrections from real runs ───────────────────────────────────────────────────────────────────────────────────────
def served(folder: Path) -> tuple[Path, sim.Scenario]:
    """A run of a server whose steps take 2 ms more than its kernels: simulated, and written down as a real run is."""
    from calibration.recorded.host import Correction, corrected

    scenario = sim.Scenario.from_flags({"model": "llama-3.1-8b", "gpu": "h100", "profile": "auto", "max_num_seqs": 64})
    workload = scenario.with_(workload="uniform", rate=6.0, num_requests=80)
    kernels = fitted_cost("auto", model_shape("llama-3.1-8b"), gpu("h100"))
    requests = sim.simulate(workload, cost=corrected(kernels, Correction(step_s=2e-3))).requests
    start = requests["arrival_s"].min()
    rows = [
        {
            "request_id": row.request_id,
            "input_toks": int(row.input_tokens),
            "output_toks": int(row.output_tokens),
            "arrival_time": 1e6 + row.arrival_s,
            "queued_ts": row.arrival_s - start,
            "scheduled_ts": row.scheduled_s - start,
            "first_token_ts": row.first_token_s - start,
            "last_token_ts": row.finished_s - start,
        }
        for row in requests.itertuples()
    ]
    run = folder / "run"
    run.mkdir()
    (run / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "meta.json").write_text(
        json.dumps({"model": "m", "vllm_version": "0", "started_at": "2026-01-01T00:00:00Z"})
    )
    return run, scenario


def test_host_time_is_found_in_the_first_requests_of_a_run_and_judged_on_the_others(tmp_path: Path) -> None:
    path, scenario = served(tmp_path)
    assert is_run(path)
    profile = fit_requests(read_run(path), scenario, 30, date="d", command="c")
    write(profile, tmp_path / "p.json")
    host = read_profile(tmp_path / "p.json").data["host"]
    assert host["step_us"] == pytest.approx(2000, rel=0.03)  # medians move in steps
    assert host["token_us"] == pytest.approx(0, abs=0.5)
    assert "first 30 requests" in host["origin"]
    drawn = np.asarray(host["samples"]["step_us"])
    assert drawn.shape == (40,)
    assert np.median(drawn) == pytest.approx(host["step_us"], rel=0.05)
    assert drawn.std() > 0.0, "which requests come first is chance"
    errors = profile["error"]
    assert abs(errors["corrected"]["tpot"]) < 0.01 < 0.1 < abs(errors["kernels_only"]["tpot"])
    again = fitted_cost(str(tmp_path / "p.json"), model_shape("llama-3.1-8b"), gpu("h100"))
    assert isinstance(again, FittedProfile)
    assert again.terms.gap_s == 0.0, "the correction replaces the stated gaps"


def test_a_run_with_too_few_requests_or_plain_prices_is_refused(tmp_path: Path) -> None:
    path, scenario = served(tmp_path)
    with pytest.raises(CalibrationError, match=r"70 of its 80 requests cannot be fitted to"):
        fit_requests(read_run(path), scenario, 70, date="", command="")
    with pytest.raises(CalibrationError, match="no fitted profile"):
        fit_requests(read_run(path), scenario.with_(profile="roofline"), 30, date="", command="")


def test_the_judgement_shows_the_interval_of_every_prediction(tmp_path: Path) -> None:
    from calibration.judging.judge import judge

    path, scenario = served(tmp_path)
    run = read_run(path)
    cost = fitted_cost("auto", model_shape("llama-3.1-8b"), gpu("h100"))
    plain = judge(run, simulate_requests(scenario, run.requests, cost))
    assert all(metric.predicted_low is None for metric in plain.metrics)
    wide = with_intervals(plain, draws(cost, 5), lambda one: simulate_requests(scenario, run.requests, one), judge)
    for metric in wide.metrics:
        assert metric.predicted_low <= metric.predicted <= metric.predicted_high
    makespan = next(metric for metric in wide.metrics if metric.name == "tpot_mean_s")
    assert makespan.predicted_low < makespan.predicted_high


# ── vLLM's own result file ───────────────────────────────────────────────────────────────────────────────────────────
def bench(**changes: object) -> dict[str, object]:
    return {
        "date": "20260101-000000",
        "backend": "vllm",
        "model_id": "m",
        "input_lens": [10, 20, 30],
        "output_lens": [3, 0, 1],
        "start_times": [101.0, 100.5, 100.0],
        "ttfts": [0.2, 0.0, 0.1],
        "itls": [[0.03, 0.05], [], []],
        "errors": ["", "refused", ""],
        **changes,
    }


def test_a_bench_result_is_a_recorded_run_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(bench()))
    run = read_run(path)
    assert [spec.input_tokens for spec in run.requests] == [30, 10]
    assert run.ttft_s.tolist() == [0.1, 0.2]
    assert run.tpot_s[1] == pytest.approx(0.04)
    assert np.isnan(run.tpot_s[0])
    assert run.finished_s == pytest.approx([0.1, 1.28])
    assert is_run(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"itls": None}, "no array 'itls'.*--save-detailed"), ({"model_id": ""}, "does not say 'model_id'")],
)
def test_a_bench_result_without_details_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(bench(**changes)))
    with pytest.raises(CalibrationError, match=message):
        read_bench(path)


# ── the command and its page ─────────────────────────────────────────────────────────────────────────────────────────
def test_the_command_fits_a_file_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = batches(tmp_path / "perf_model.csv")
    flags = ["--model", "llama-2-70b", "--gpu", "h100-sxm-80gb", "--tensor-parallel-size", "2"]
    out, html = tmp_path / "p.json", tmp_path / "p.html"
    assert main(["calibrate", "fit", str(path), *flags, "--out", str(out), "--html", str(html), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "h100-sxm-80gb.llama-2-70b.tp2.steps"
    assert "residuals" not in json.loads(out.read_text())
    assert all(
        text in html.read_text() for text in ("Residuals of held-out points", "<svg", "What the data cannot tell")
    )


def test_a_page_says_where_there_is_no_interval(tmp_path: Path) -> None:
    profile = fit_whole_steps(distserve.read_laws(laws_file(tmp_path), "opt-13b", 1), date="d", command="c")
    assert "None: the source does not tell" in page(profile)


# ── exp-0's conversations ────────────────────────────────────────────────────────────────────────────────────────────
def test_sessions_are_named_where_ttft_shows_a_cached_prefix(data_dir: Path) -> None:
    folder = data_dir / "runs" / "llm-d-benchmark" / "exp-0_llama-3.1-70b_2xA100"
    runs = {rate: read_run(folder / f"qps_{rate}.csv") for rate in ("0.5", "0.84", "1")}
    named = with_sessions(runs, ("0.5", "0.84"))
    first = {spec.content_ids[0] for spec in named["1"]}
    shared = len(named["1"]) - len(first)
    assert 20 <= shared <= 45, "about a seventh of the requests go on with an earlier one"
    assert all(
        len(spec.content_ids) == (spec.input_tokens + spec.output_tokens) // 16
        for rate in named
        for spec in named[rate]
    )
