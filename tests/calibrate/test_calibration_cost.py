"""Prices from a fitted profile: exact over stretches, whatever the tables; monotone; honest about their range."""

import dataclasses
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim
from sim.assembly import cost_model
from sim.catalog.gpus import gpu
from sim.catalog.models import model_shape
from sim.core.batch_shape import BatchShape
from sim.core.config import ConfigError
from sim.costs.fitted import fitted_cost, profile_names
from sim.costs.overlap import overlapped
from sim.costs.piecewise import Field, Grid, IntegerLine, Line
from sim.costs.profile import FittedProfile
from sim.costs.terms import StepTerms
from sim.resolve import resolve
from tests.support.stretches import each_step_of

SECONDS = st.floats(0.0, 0.05, allow_nan=False)


def terms(**changes: object) -> StepTerms:
    flat = Grid((1.0, 64.0), (16.0, 1024.0, 8192.0), ((1e-5, 2e-5, 1e-4), (2e-4, 2e-3, 1.5e-2)))
    base = StepTerms(
        dense=Line((1.0, 2048.0), (0.01, 0.1)),
        rows=Line((1.0, 256.0), (0.001, 0.002)),
        prefill=Grid((16.0, 2048.0), (0.0, 8192.0), ((1e-5, 1e-3), (1e-2, 5e-2))),
        decode=flat,
        mixed=flat,
        max_tokens=2048,
        max_seqs=64,
        max_context_tokens=8192,
    )
    return dataclasses.replace(base, **changes)


@st.composite
def random_terms(draw: st.DrawFn) -> StepTerms:
    rows = draw(st.integers(2, 4))
    columns = draw(st.integers(2, 5))
    x = sorted(draw(st.lists(st.integers(1, 300), min_size=rows, max_size=rows, unique=True)))
    y = sorted(draw(st.lists(st.integers(1, 9000), min_size=columns, max_size=columns, unique=True)))
    z = tuple(tuple(draw(SECONDS) for _ in y) for _ in x)
    return terms(
        decode=Grid(tuple(map(float, x)), tuple(map(float, y)), z),
        decode_skew=Line((1.0, 64.0), (draw(st.floats(0, 1)), draw(st.floats(0, 1)))),
        step_s=draw(st.floats(0, 0.01)),
        seq_s=draw(st.floats(0, 1e-4)),
        padded_sizes=draw(st.sampled_from([(), (1, 8, 16, 512)])),
    )


@settings(max_examples=150)
@given(random_terms(), st.integers(1, 400), st.integers(1, 12_000), st.integers(1, 300), st.integers(0, 5000))
def test_a_stretch_is_exactly_its_steps(table: StepTerms, seqs: int, mean: int, steps: int, longer: int) -> None:
    cost = FittedProfile(table, name="t")
    context, longest = seqs * mean, mean + longer
    stretch = cost.decode_stretch(seqs, context, steps, longest)
    assert [stretch.before_fs(i + 1) - stretch.before_fs(i) for i in range(steps)] == each_step_of(
        cost, seqs, context, longest, steps
    )
    assert len(stretch.segments) <= len(table.decode.y) + 1, "a stretch is closed form: a segment a piece, not a step"


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 1000), min_size=2, max_size=6, unique=True),
    st.lists(SECONDS, min_size=6, max_size=6),
    st.integers(0, 1200),
    st.integers(1, 90),
    st.integers(1, 40),
)
def test_an_integer_line_sums_along_itself(knots: list[int], values: list[float], start: int, stride: int, steps: int):
    line = IntegerLine(sorted(knots), values[: len(knots)])
    pieces = line.along(start, stride, steps, 7)
    assert sum(piece.steps for piece in pieces) == steps
    flat = [piece.first_fs + i * piece.growth_fs for piece in pieces for i in range(piece.steps)]
    assert flat == [line(start + i * stride) + 7 for i in range(steps)]


def test_skew_costs_what_the_longest_exceeds_the_mean_by() -> None:
    cost = FittedProfile(terms(decode_skew=Line((1.0,), (0.5,))), name="t")
    even, skewed, unknown = (
        cost.step_fs(
            BatchShape(decode_seqs=8, decode_context_tokens=8000, decode_max_context_tokens=longest, sampled_seqs=8)
        )
        for longest in (1000, 3000, 0)
    )
    assert unknown == even < skewed


def test_padding_makes_a_small_step_as_dear_as_its_graph() -> None:
    padded = FittedProfile(terms(padded_sizes=(8, 16)), name="t")
    plain = FittedProfile(terms(), name="t")
    alone = BatchShape(prefill=((9, 0),))
    assert padded.step_fs(alone) - plain.step_fs(alone) == pytest.approx(7 * 0.09 / 2047 * 1e15, rel=1e-6)
    large = BatchShape(prefill=((17, 0),))
    assert padded.step_fs(large) == plain.step_fs(large)


def test_several_chunks_pay_their_launch_once() -> None:
    table = terms(chunk_launch_s=1e-5)
    cost = FittedProfile(table, name="t")
    one, two = cost.step_fs(BatchShape(prefill=((64, 0),))), cost.step_fs(BatchShape(prefill=((32, 0), (32, 0))))
    expected = 2 * table.prefill(32, 0) - table.prefill(64, 0) - 1e-5
    assert (two - one) / 1e15 == pytest.approx(expected, abs=1e-12)


def test_use_beyond_the_measured_range_is_said() -> None:
    cost = FittedProfile(terms(), name="t", notes=("from nowhere",))
    cost.step_fs(BatchShape(decode_seqs=2, decode_context_tokens=200, sampled_seqs=2))
    assert cost.warnings() == ["from nowhere"]
    cost.decode_stretch(100, 100 * 9000, 5)
    assert "beyond its range: 100 decodes" in cost.warnings()[1]
    assert "9,004 mean context tokens" in cost.warnings()[1]


def test_it_survives_pickling() -> None:
    cost = FittedProfile(terms(), name="t")
    shape = BatchShape(prefill=((100, 50),), decode_seqs=3, decode_context_tokens=900, sampled_seqs=4)
    assert pickle.loads(pickle.dumps(cost)).step_fs(shape) == cost.step_fs(shape)


@pytest.mark.parametrize("bad", [((1.0, 1.0), (0.1, 0.2)), ((1.0,), (0.1, 0.2)), ((1.0, 2.0), (0.1, -0.2))])
def test_a_malformed_table_is_refused(bad: tuple[tuple[float, ...], tuple[float, ...]]) -> None:
    with pytest.raises(ConfigError):
        Line(*bad)


# ── the library ──────────────────────────────────────────────────────────────────────────────────────────────────────
LOADED = {"workload": {"workload": "azure-conv", "num_requests": 60}}


@pytest.mark.parametrize("card", ["h100", "a100", "h200", "l40s"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "qwen3-32b"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_kernel_terms_price_every_common_model(card: str, model: str, ranks: int) -> None:
    cost = fitted_cost("auto", model_shape(model), gpu(card), tensor_parallel_size=ranks)
    steps = [BatchShape(decode_seqs=n, decode_context_tokens=1000 * n, sampled_seqs=n) for n in (1, 8, 64)] + [
        BatchShape(prefill=((2048, 0),), sampled_seqs=1)
    ]
    times = [cost.step_fs(shape) for shape in steps]
    assert times == sorted(times)
    weights_s = model_shape(model).weight_bytes(tensor_parallel_size=ranks) / gpu(card).memory_bandwidth_bytes_per_s
    assert 0.9 * weights_s < times[0] / 1e15 < 3.5 * weights_s + 0.02


@pytest.mark.parametrize("card", ["h100", "a100", "h200", "l40s"])
def test_experts_are_priced_by_the_weights_that_a_step_reads(card: str) -> None:
    """One token visits two of Mixtral's eight experts, a batch of 64 all: times lie between what memory takes and twice that."""
    model, device = model_shape("mixtral-8x7b"), gpu(card)
    cost = fitted_cost("auto", model, device)
    for seqs, parameters in ((1, model.active_parameters), (64, model.num_parameters)):
        step = BatchShape(decode_seqs=seqs, decode_context_tokens=16 * seqs, sampled_seqs=seqs)
        read_s = 2 * parameters / device.memory_bandwidth_bytes_per_s
        assert read_s < cost.step_fs(step) / 1e15 < 2 * read_s
    assert any("expert kernels were not timed" in text for text in cost.warnings())


@pytest.mark.parametrize("card", ["h100", "h200", "l40s"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "qwen3-32b", "mixtral-8x7b"])
def test_fp8_weights_decode_faster_where_fp8_kernels_were_timed(card: str, model: str) -> None:
    step = BatchShape(decode_seqs=8, decode_context_tokens=8000, sampled_seqs=8)
    half, whole = (
        fitted_cost("auto", model_shape(model), gpu(card), tensor_parallel_size=4, quantization=kind).step_fs(step)
        for kind in ("fp8", "none")
    )
    assert 0.45 * whole < half < whole


@pytest.mark.parametrize(("card", "ranks"), [("rtx-4090", 1), ("rtx-pro-6000", 1), ("rtx-pro-6000", 2)])
def test_auto_takes_the_profile_of_the_very_model_where_there_is_one(card: str, ranks: int) -> None:
    cost = fitted_cost("auto", model_shape("llama-3.1-8b"), gpu(card), tensor_parallel_size=ranks)
    assert cost.name == f"model:{gpu(card).name}.llama-3.1-8b.tp{ranks}"


def test_auto_says_how_far_away_the_nearest_gpu_is() -> None:
    cost = fitted_cost("auto", model_shape("llama-3.1-8b"), gpu("b200"))
    assert any("1.67 times its memory bandwidth" in warning for warning in cost.warnings())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "deepseek-v2-lite"}, "latent attention"),
        ({"model": "llama-3.1-8b", "quantization": "awq"}, "awq"),
        ({"model": "llama-3.1-8b", "pipeline_parallel_size": 2}, "pipeline"),
    ],
)
def test_what_the_tables_cannot_price_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sim.simulate(sim.Scenario.from_flags({"gpu": "h100", "workload": "azure-conv", "profile": "auto", **settings}))


def test_a_model_profile_refuses_another_model() -> None:
    with pytest.raises(ConfigError, match="was fitted to"):
        fitted_cost("rtx-4090-24gb.llama-3.1-8b.tp1", model_shape("qwen3-8b"), gpu("rtx-4090"))


@pytest.mark.parametrize("name", profile_names())
def test_leaping_and_stepping_agree_under_every_profile(name: str) -> None:
    """I13, end to end: the stretches cross knots, skew changes as members come and go, and chunks mix with decodes."""
    card, _, rest = name.partition(".")
    model, _, ranks = rest.partition(".tp")
    flags = {"model": "llama-3.1-8b", "gpu": card, "profile": name, "workload": "azure-conv", "num_requests": 60}
    if rest:
        flags |= {"model": {"llama-3": "llama-3.1-8b"}.get(model, model), "tensor_parallel_size": int(ranks)}
    longest = 4096 if card == "cpu" else 8192
    scenario = sim.Scenario.from_flags({**flags, "num_gpu_blocks_override": 1500, "max_model_len": longest})
    leaping, stepping = (sim.simulate(scenario, stepping=on).summary for on in (False, True))
    ours = ("wall_time_s", "core_time_s", "scenario")
    assert {key: value for key, value in leaping.items() if key not in ours} == {
        key: value for key, value in stepping.items() if key not in ours
    }


def test_the_longest_context_of_a_plan_is_that_of_its_members() -> None:
    from sim.core.config import EngineConfig
    from sim.core.request import RequestSpec
    from sim.world.executors import ModelExecutor
    from sim.world.run import run_world

    class Watching(ModelExecutor):
        def execute(self, plan):
            decodes = [
                share.context_tokens + 1
                for share in plan.scheduled(0)
                if share.num_tokens == 1 and share.context_tokens and share.samples
            ]
            assert plan.shape.decode_seqs == len(decodes)
            assert plan.shape.decode_context_tokens == sum(decodes)
            assert plan.shape.decode_max_context_tokens == max(decodes, default=0)
            return super().execute(plan)

    requests = [
        RequestSpec(
            request_id=str(i), arrival_s=0.05 * i, input_tokens=10 + 37 * i % 400, output_tokens=5 + 53 * i % 90
        )
        for i in range(60)
    ]
    config = EngineConfig(num_gpu_blocks=120, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=1024)
    cost = FittedProfile(terms(), name="t")
    run_world(config, cost, requests, executor=lambda core: Watching(cost))


# ── calls that hold both, and gaps ───────────────────────────────────────────────────────────────────────────────────
def test_chunks_that_fit_on_the_gpu_together_take_the_time_of_the_longest() -> None:
    """Four tiles at a time: two chunks of 64 tokens run side by side, eight of them take two turns."""
    launch = 1e-5
    flat = Grid((64.0, 2048.0), (0.0, 8192.0), ((launch + 1e-3, launch + 1e-3), (launch + 8e-3, launch + 8e-3)))
    cost = FittedProfile(terms(prefill=flat, chunk_launch_s=launch, wave_tiles=4.0), name="t")
    one, two, eight = (
        cost.step_fs(BatchShape(prefill=((64, 0),) * count)) - cost._tokens(64 * count) for count in (1, 2, 8)
    )
    assert one == two == pytest.approx((launch + 1e-3) * 1e15)
    assert eight == pytest.approx((launch + 2e-3) * 1e15)


def test_a_ratio_scales_a_step_that_holds_both_and_no_other() -> None:
    axes = ((16.0, 2048.0), (0.0, 8192.0), (1.0, 64.0), (16.0, 8192.0))
    plain, twice = terms(), terms(mixed_ratio=Field(axes, (2.0,) * 16))
    both = BatchShape(prefill=((512, 0),), decode_seqs=8, decode_context_tokens=8000, sampled_seqs=9)
    alone = BatchShape(prefill=((512, 0),), sampled_seqs=1)
    costs = FittedProfile(plain, name="t"), FittedProfile(twice, name="t")
    assert costs[0].step_fs(alone) == costs[1].step_fs(alone)
    attention = costs[0].step_fs(both) - costs[0]._tokens(520) - costs[0]._rows(9)
    assert costs[1].step_fs(both) - costs[0].step_fs(both) == pytest.approx(attention, rel=1e-9)


def test_a_field_is_linear_between_its_knots_and_constant_beyond_them() -> None:
    field = Field(((0.0, 1.0), (0.0, 10.0)), (1.0, 2.0, 3.0, 6.0))
    assert (field(0, 0), field(1, 10), field(0.5, 5)) == (1.0, 6.0, 3.0)
    assert (field(-5, -5), field(9, 99)) == (1.0, 6.0)
    with pytest.raises(ConfigError, match="4 knots has 3 values"):
        Field(((0.0, 1.0), (0.0, 10.0)), (1.0, 2.0, 3.0))
    with pytest.raises(ConfigError, match="two knots or more"):
        Field(((0.0,),), (1.0,))


def test_planning_ahead_hides_the_host_and_not_the_gaps_between_kernels() -> None:
    step = BatchShape(decode_seqs=4, decode_context_tokens=4000, sampled_seqs=4)
    host, gaps = (FittedProfile(terms(**{name: 1e-3}), name="t") for name in ("step_s", "gap_s"))
    assert host.step_fs(step) == gaps.step_fs(step)
    assert overlapped(gaps).step_fs(step) == gaps.step_fs(step)
    assert overlapped(host).step_fs(step) == host.step_fs(step) - 10**12


def test_a_stated_gap_counts_the_kernels_of_the_model_and_its_collectives() -> None:
    one, two = (
        fitted_cost("auto", model_shape("llama-3.1-70b"), gpu("h100"), tensor_parallel_size=ranks).terms.gap_s
        for ranks in (1, 2)
    )
    assert one == pytest.approx((80 * 10 + 10) * 0.85e-6)
    assert two == pytest.approx((80 * 12 + 10) * 0.85e-6)


def test_no_step_of_a_composed_model_costs_more_than_a_larger_one() -> None:
    """fp8 kernels are slower for 257 tokens than for 512: an engine may pad."""
    dense = fitted_cost("auto", model_shape("qwen3-32b"), gpu("h200"), quantization="fp8").terms.dense
    assert list(dense.y) == sorted(dense.y)


def test_without_graphs_a_short_step_takes_as_long_as_the_host_launches_it() -> None:
    """330 kernels of 21 us on the H100's host outlast a decode of one sequence, and not a prompt of 8,192 tokens."""
    flags = {"model": "llama-3.1-8b", "gpu": "h100", "profile": "auto"}
    graphs, eager = (
        cost_model(resolve(sim.Scenario.from_flags({**flags, "enforce_eager": on}))) for on in (False, True)
    )
    short = BatchShape(decode_seqs=1, decode_context_tokens=100, sampled_seqs=1)
    long = BatchShape(prefill=((8192, 0),), sampled_seqs=1)
    assert eager.step_fs(short) / 1e12 == pytest.approx(330 * 0.0213, rel=0.02)
    assert graphs.step_fs(short) < eager.step_fs(short)
    assert eager.step_fs(long) == graphs.step_fs(long)
    assert any("7.0 ms to launch a step" in text for text in eager.warnings())
