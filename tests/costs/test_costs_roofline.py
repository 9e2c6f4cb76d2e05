"""The roofline: exact in form (closed-form stretches), right in its limits, and honestly near public measurements."""

from __future__ import annotations

import csv
import pickle
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.catalog.gpus import gpu
from sim.catalog.models import model_shape
from sim.core.batch_shape import BatchShape
from sim.core.clock import to_s
from sim.core.config import ConfigError
from sim.costs import Roofline, RooflineEfficiency
from sim.costs.work import attended_pairs, distinct_experts

PERFECT = RooflineEfficiency(
    compute=1, memory=1, attention_memory=1, attention_compute=1, link=1, layer_s=0, attention_serial_s=0,
    all_reduce_nvlink_s=0, all_reduce_pcie_s=0, step_s=0, seq_s=0,
)  # fmt: skip


def roofline(model: str = "llama-3.1-8b", card: str = "h100", **settings: object) -> Roofline:
    return Roofline(model_shape(model), gpu(card), **settings)  # type: ignore[arg-type]


def decode(seqs: int, context: int) -> BatchShape:
    return BatchShape(decode_seqs=seqs, decode_context_tokens=context, sampled_seqs=seqs)


MODELS = ["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"]


@given(
    model=st.sampled_from(MODELS), tp=st.sampled_from([1, 4]), kv=st.sampled_from(["auto", "fp8"]),
    seqs=st.integers(1, 1024), context=st.integers(1, 5_000_000), steps=st.integers(1, 40),
)  # fmt: skip
def test_a_decode_stretch_is_exactly_its_steps(
    model: str, tp: int, kv: str, seqs: int, context: int, steps: int
) -> None:
    cost = roofline(model, tensor_parallel_size=tp, kv_cache_dtype=kv)
    stretch = cost.decode_stretch(seqs, context, steps)
    singles = [cost.step_fs(decode(seqs, context + i * seqs)) for i in range(steps)]
    assert [stretch.before_fs(i + 1) - stretch.before_fs(i) for i in range(steps)] == singles


@pytest.mark.parametrize("model", MODELS)
def test_a_decode_step_is_affine_in_its_context(model: str) -> None:
    cost = roofline(model)
    points = [cost.step_fs(decode(8, context)) for context in (0, 1, 1000, 10**6)]
    slope = points[1] - points[0]
    assert points == [points[0] + slope * context for context in (0, 1, 1000, 10**6)]


def test_the_lower_limit_of_a_decode_step_is_reading_the_weights_once() -> None:
    cost = roofline(efficiency=PERFECT)
    shape = model_shape("llama-3.1-8b")
    matrices = shape.num_parameters - shape.vocab_size * shape.hidden_size - 65 * 4096
    assert to_s(cost.step_fs(decode(1, 0))) == pytest.approx(2 * matrices / 3350e9, rel=0.001)


def test_the_slope_of_a_decode_step_is_reading_the_kv() -> None:
    cost = roofline(efficiency=PERFECT)
    assert cost.step_fs(decode(1, 1000)) - cost.step_fs(decode(1, 0)) == pytest.approx(1000 * 131_072 / 3350e9 * 1e15)


def test_a_long_prefill_is_bound_by_arithmetic() -> None:
    cost = roofline(efficiency=PERFECT)
    matrices = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    attention = 32 * 4 * 4096 * attended_pairs(8192, 0)
    arithmetic = (2 * 8192 * matrices + attention) / 989e12
    # Norms with the residual, the activation, and the rotary embedding of 32 + 8 heads move bytes and compute little.
    moved = 32 * 8192 * 2 * (8 * 4096 + 3 * 14336 + 2 * 40 * 128) / 3350e9
    seconds = to_s(cost.step_fs(BatchShape(prefill=((8192, 0),), sampled_seqs=0)))
    assert seconds == pytest.approx(arithmetic + moved, rel=1e-6)


def test_chunks_of_a_prompt_do_the_attention_of_the_whole_prompt() -> None:
    assert attended_pairs(1000, 0) == attended_pairs(400, 0) + attended_pairs(600, 400) == 500_500
    windowed = [attended_pairs(chunk, done, window=128) for chunk, done in ((400, 0), (600, 400))]
    assert attended_pairs(1000, 0, window=128) == sum(windowed) == sum(min(i + 1, 128) for i in range(1000))


def test_more_work_costs_more() -> None:
    base = BatchShape(prefill=((128, 512),), decode_seqs=8, decode_context_tokens=9000, sampled_seqs=8)
    more: list[dict[str, object]] = [
        {"prefill": ((256, 512),)},
        {"prefill": ((128, 8192),)},
        {"prefill": ((128, 512), (1, 0))},
        {"decode_seqs": 9},
        {"decode_context_tokens": 9001},
        {"sampled_seqs": 9},
        {"copied_blocks": 1},
        {"swapped_blocks": 1},
    ]
    for change in more:
        assert roofline().step_fs(replace(base, **change)) > roofline().step_fs(base), change


def test_a_copied_block_crosses_device_memory_twice_and_a_swapped_block_pcie_once() -> None:
    cost = roofline(efficiency=PERFECT)
    assert cost.step_fs(BatchShape(copied_blocks=1000)) == pytest.approx(1000 * 2 * 2 * 2**20 / 3350e9 * 1e15)
    assert cost.step_fs(BatchShape(swapped_blocks=1000)) == pytest.approx(1000 * 2 * 2**20 / 64e9 * 1e15)


def test_a_block_of_one_attention_group_is_moved_for_its_own_bytes() -> None:
    # gpt-oss-20b: 24 layers of 2,048 B a token; a block of one of two groups has 12 of them.
    model, device = model_shape("gpt-oss-20b"), gpu("h100-sxm-80gb")
    whole = Roofline(model, device, efficiency=PERFECT)
    group = Roofline(model, device, efficiency=PERFECT, block_bytes=12 * 2048 * 16)
    for moved in ("copied_blocks", "swapped_blocks"):
        shape = BatchShape(**{moved: 1000})
        assert whole.step_fs(shape) == pytest.approx(2 * group.step_fs(shape))


def test_only_sampled_rows_pay_for_the_lm_head() -> None:
    cost = roofline(efficiency=PERFECT)
    unsampled, sampled = (cost.step_fs(BatchShape(prefill=((512, 0),), sampled_seqs=rows)) for rows in (0, 1))
    assert sampled - unsampled == pytest.approx(128256 * 4096 * 2 / 3350e9 * 1e15, rel=0.01)


def test_a_mixture_reads_the_experts_that_its_tokens_visit() -> None:
    assert distinct_experts(128, 8, 1) == pytest.approx(8)
    assert distinct_experts(128, 8, 10_000) == pytest.approx(128)
    cost = roofline("qwen3-30b-a3b", efficiency=PERFECT)
    one, many = (cost.step_fs(decode(seqs, 0)) for seqs in (1, 256))
    assert 5 < many / one < 10.5  # 3.3 billion parameters for one token, 30.5 for many


def test_more_ranks_are_faster_but_pay_for_communication() -> None:
    times = [roofline("llama-3.1-70b", tensor_parallel_size=tp).step_fs(decode(16, 20_000)) for tp in (2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[0] < 4 * times[2]


def test_quantised_weights_are_read_faster_and_computed_in_fp8_only_where_there_is_hardware() -> None:
    assert roofline(quantization="fp8").step_fs(decode(1, 1)) < 0.65 * roofline().step_fs(decode(1, 1))
    prompt = BatchShape(prefill=((8192, 0),))
    assert roofline(quantization="fp8").step_fs(prompt) < 0.65 * roofline().step_fs(prompt)
    assert roofline(card="a100", quantization="fp8").step_fs(prompt) == pytest.approx(
        roofline(card="a100").step_fs(prompt), rel=0.02
    )


def test_it_says_what_a_reader_must_know() -> None:
    assert "not from a measurement" in roofline().warnings()[0]
    assert any("sliding-window" in warning for warning in roofline("gpt-oss-20b").warnings())
    assert any("pipeline" in warning for warning in roofline(pipeline_parallel_size=2).warnings())
    assert not any("float16" in warning for warning in roofline("tiny-llama-test", "t4").warnings())
    assert any("float16" in warning for warning in roofline(card="t4").warnings())


def test_it_is_pure_and_can_be_pickled() -> None:
    cost = roofline()
    shape = BatchShape(prefill=((700, 33),), decode_seqs=3, decode_context_tokens=99, sampled_seqs=4)
    first = cost.step_fs(shape)
    assert pickle.loads(pickle.dumps(cost)).step_fs(shape) == cost.step_fs(shape) == roofline().step_fs(shape) == first


@pytest.mark.parametrize(
    ("field", "value"), [("memory", 0.0), ("compute", 2.0), ("step_s", -1.0), ("link", float("nan"))]
)
def test_an_impossible_efficiency_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        RooflineEfficiency(**{field: value})


def mean_tpot_s(cost: Roofline, seqs: float, context: float, prompt: int, prompts_per_s: float) -> float:
    """Mean time between tokens when `seqs` sequences decode and `prompts_per_s` prompts of `prompt` tokens arrive.

    The prompts' time is what they add to a mixed step; the decodes get the rest of every second.
    """
    n = round(seqs)
    alone = to_s(cost.step_fs(decode(n, round(context))))
    mixed = BatchShape(prefill=((prompt, 0),), decode_seqs=n, decode_context_tokens=round(context), sampled_seqs=n + 1)
    return alone / (1 - prompts_per_s * (to_s(cost.step_fs(mixed)) - alone))


# Recorded states of public runs: sequences decoding, their KV in tokens, prompt length, prompts a second; measured mean TPOT.
# The first two are averages over the runs' time series, weighted by the sequences running, with prompt tokens taken as
# prompts of 1,024; the others are totals over the runs' request tables.
RUNS = [
    ("vLLM 0.19, RTX 4090", "llama-3.1-8b", "rtx-4090", 1, (34.4, 0.963 * 41408, 1024, 1.48), 0.0324),
    ("vLLM 0.19, RTX PRO 6000", "llama-3.1-8b", "rtx-pro-6000", 1, (116.3, 116.3 * 1183, 1024, 4.03), 0.0325),
    ("vLLM 0.8, 2 x A100, 0.5 a second", "llama-3.1-70b", "a100", 2, (6.6, 8300, 1152, 0.5), 0.0607),
    ("vLLM 0.8, 2 x A100, 0.84 a second", "llama-3.1-70b", "a100", 2, (13.5, 17000, 1152, 0.84), 0.0736),
]


@pytest.mark.parametrize(("label", "model", "card", "tp", "state", "measured_s"), RUNS)
def test_tpot_of_public_runs_is_within_a_tenth(
    label: str, model: str, card: str, tp: int, state: tuple[float, float, int, float], measured_s: float
) -> None:
    cost = roofline(model, card, tensor_parallel_size=tp)
    assert mean_tpot_s(cost, *state) == pytest.approx(measured_s, rel=0.1), label


def closed_loop_tpot_s(cost: Roofline, clients: int, prompt: int, output: int) -> float:
    """Mean TPOT of a closed loop: every client's request brings one prefill into the steps of all the others."""
    context = round(clients * (prompt + output / 2))
    alone = to_s(cost.step_fs(decode(clients, context)))
    mixed = BatchShape(
        prefill=((prompt, 0),), decode_seqs=clients, decode_context_tokens=context, sampled_seqs=clients + 1
    )
    return alone + clients * (to_s(cost.step_fs(mixed)) - alone) / output


def test_tpot_of_public_h100_runs_has_a_median_error_under_a_tenth(data_dir: Path) -> None:
    errors: dict[str, list[float]] = defaultdict(list)
    with (data_dir / "runs" / "silicon_h100_dense.csv").open() as file:
        for row in csv.DictReader(file):
            cost = roofline(
                row["model_path"],
                tensor_parallel_size=int(float(row["tp_size"])),
                quantization=row["gemm_quant_mode"] or None,
            )
            tpot = closed_loop_tpot_s(cost, int(float(row["batch_size"])), int(row["isl"]), int(row["osl"]))
            errors[row["backend"]].append(tpot * 1e3 / float(row["silicon_tpot_ms"]) - 1)
    assert statistics.median(map(abs, errors["vllm"])) < 0.10
    assert statistics.median(map(abs, errors["trtllm"])) < 0.15
