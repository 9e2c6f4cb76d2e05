"""The built-in workloads have the figures of the traces that they stand for. Tolerances are part of the statement."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from sim.workload import build_requests, read_trace
from sim.workload.builtin import TABLES
from sim.workload.on_off import OnOff

TRACES = {
    "azure-conv": "traces/azure2023/AzureLLMInferenceTrace_conv.csv",
    "azure-code": "traces/azure2023/AzureLLMInferenceTrace_code.csv",
    "mooncake-chat": "traces/mooncake/conversation_trace.jsonl",
    "sharegpt": "runs/llmservingsim/workloads/sharegpt-llama-3.1-8b-300-sps10.lengths.csv",
}
RANKS = 1000  # a grid of 1,000 x 1,000 ranks shows the table itself, without sampling noise


@dataclass(frozen=True)
class Figures:
    inputs: np.ndarray
    outputs: np.ndarray

    def correlation(self):
        return np.corrcoef(self.inputs, self.outputs)[0, 1]


def of_table(name):
    mid_ranks = (np.arange(RANKS) + 0.5) / RANKS
    return Figures(*TABLES[name].lengths.sample(np.repeat(mid_ranks, RANKS), np.tile(mid_ranks, RANKS)))


def of_trace(trace):
    return Figures(
        np.array([spec.input_tokens for spec in trace.requests]),
        np.array([spec.output_tokens for spec in trace.requests]),
    )


def prompt_hits(requests):
    """Share of prompt blocks seen before in an earlier prompt, and share of requests with a hit beyond the blocks all share."""
    seen, hit, total, following = set(), 0, 0, 0
    shared = 1 if requests[0].content_block_tokens == 512 else 0
    for spec in requests:
        prompt = spec.content_ids[: -(-spec.input_tokens // spec.content_block_tokens)]
        hits = next((k for k, block in enumerate(prompt) if block not in seen), len(prompt))
        hit, total, following = hit + hits, total + len(prompt), following + (hits > shared)
        seen.update(prompt)
    return hit / total, following / len(requests)


@pytest.fixture(scope="module", params=sorted(TRACES))
def fitted(request, data_dir):
    return request.param, read_trace(data_dir / TRACES[request.param])


def test_lengths_have_the_means_and_percentiles_of_the_trace(fitted):
    name, trace = fitted
    table, real = of_table(name), of_trace(trace)
    for ours, theirs in ((table.inputs, real.inputs), (table.outputs, real.outputs)):
        assert ours.mean() == pytest.approx(theirs.mean(), rel=0.02)
        for q in (0.5, 0.9, 0.99):
            assert np.quantile(ours, q) == pytest.approx(np.quantile(theirs, q), rel=0.05, abs=1)
        assert ours.min() >= theirs.min()
        assert ours.max() <= theirs.max()


def test_outputs_depend_on_inputs_as_in_the_trace(fitted):
    name, trace = fitted
    table, real = of_table(name), of_trace(trace)
    assert table.correlation() == pytest.approx(real.correlation(), abs=0.03)
    for part in range(4):  # not only the coefficient: the mean output of each quarter of the prompts
        ours, theirs = (
            f.outputs[np.argsort(f.inputs, kind="stable")][
                len(f.inputs) * part // 4 : len(f.inputs) * (part + 1) // 4
            ].mean()
            for f in (table, real)
        )
        assert ours == pytest.approx(theirs, rel=0.06)


def test_arrivals_have_the_rate_and_the_gap_variation_of_the_trace(fitted):
    name, trace = fitted
    process = TABLES[name].arrivals
    gaps_s = np.diff([spec.arrival_s for spec in trace.requests])
    gap_cv = process.gap_cv if isinstance(process, OnOff) else getattr(process, "burstiness", 1.0) ** -0.5
    assert process.rate_per_s == pytest.approx(trace.rate_per_s, rel=0.01)
    assert gap_cv == pytest.approx(
        gaps_s.std() / gaps_s.mean(), rel=0.07 if name == "sharegpt" else 0.02
    )  # 300 rows: 6 % is noise


def test_fitted_bursts_have_the_dispersion_of_the_trace(fitted):
    name, trace = fitted
    bursts = TABLES[name].bursts
    if bursts is None:
        assert name == "sharegpt"  # 29 seconds say nothing about bursts that last
        return
    times_s = np.array([spec.arrival_s for spec in trace.requests])
    gaps_s = np.diff(times_s)
    assert bursts.rate_per_s == pytest.approx(trace.rate_per_s, rel=0.01)
    assert bursts.gap_cv == pytest.approx(gaps_s.std() / gaps_s.mean(), rel=0.02)
    for window_s in (1.0, 10.0, 60.0):
        counts = np.bincount((times_s / window_s).astype(int))[:-1]
        assert bursts.dispersion(window_s) == pytest.approx(counts.var() / counts.mean(), rel=0.4)


def test_prompts_share_as_much_as_in_the_trace(fitted):
    name, trace = fitted
    if TABLES[name].prefixes is None:
        assert not any(spec.content_ids for spec in build_requests(name).requests)
        return
    real_share, real_following = prompt_hits(trace.requests)
    share, following = prompt_hits(build_requests(name, num_requests=12_000).requests)
    assert share == pytest.approx(real_share, abs=0.01)
    assert following == pytest.approx(real_following, abs=0.015)


def test_mooncake_chat_shares_36_6_percent_at_any_size_without_the_data():
    for num_requests, tolerance in ((1000, 0.03), (12_000, 0.01)):
        shares = [
            prompt_hits(build_requests("mooncake-chat", num_requests=num_requests, seed=s).requests)[0]
            for s in range(4)
        ]
        assert np.mean(shares) == pytest.approx(0.366, abs=tolerance)


def test_turns_continue_conversations_one_after_another():
    # In the trace all but a few prompts are continued at most once: conversations are chains, not stars.
    requests = build_requests("mooncake-chat", num_requests=4000).requests
    owner, continued = {}, {}
    for i, spec in enumerate(requests):
        hits = next((k for k, block in enumerate(spec.content_ids) if block not in owner), len(spec.content_ids))
        if hits > 1:
            parent = owner[spec.content_ids[hits - 1]]
            continued[parent] = continued.get(parent, 0) + 1
        owner.update(dict.fromkeys(spec.content_ids, i))
    assert np.mean(np.array(list(continued.values())) == 1) > 0.95


def test_the_tables_are_what_the_script_fits(data_dir, monkeypatch):
    script = Path(__file__).parents[2] / "experiments" / "fit_workload_tables.py"
    spec = importlib.util.spec_from_file_location("fit_workload_tables", script)
    fit = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, fit)  # dataclasses look their module up
    spec.loader.exec_module(fit)
    for recipe, name in zip(fit.RECIPES, ("azure-conv", "azure-code", "mooncake-chat", "sharegpt"), strict=True):
        trace = read_trace(data_dir / recipe.path)
        assert fit.fit_lengths(trace, recipe.length_classes) == TABLES[name].lengths
        if recipe.prefix_classes:
            assert fit.fit_prefixes(trace, recipe.prefix_classes) == TABLES[name].prefixes


def test_tables_are_well_formed():
    for table in TABLES.values():
        lengths = table.lengths
        assert lengths.input_probabilities[0] == lengths.output_probabilities[0] == 0
        assert lengths.input_probabilities[-1] == lengths.output_probabilities[-1] == 1
        assert list(lengths.input_quantiles) == sorted(lengths.input_quantiles)
        assert lengths.input_quantiles[0] >= 1
        for row in lengths.output_quantiles:
            assert list(row) == sorted(row)
            assert row[0] >= 1
            assert len(row) == len(lengths.output_probabilities)
        assert any(licence in table.source for licence in ("CC-BY-4.0", "Apache-2.0", "MIT"))
