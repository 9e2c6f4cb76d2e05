"""The parts of the real world that need no model: tokens, batches, recordings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.validation import SCENARIOS
from experiments.validation.worlds import preset
from gpu.batch import BatchBuffers, Sampling, Work
from gpu.copy_order import independent
from gpu.device import find_device
from gpu.rotary import RotaryConfig
from gpu.timing import step_timer
from gpu.tokens import TokenBook
from sim.core.chains import KeyTable
from sim.core.clock import to_fs
from sim.core.config import ConfigError
from sim.core.durations import Durations
from sim.core.plan import OomReport, StepPlan, StepResult
from sim.core.prefix import BlockKeys
from sim.core.request import RequestSpec, samples
from sim.costs import FixedCost
from sim.world.executors import RecordingExecutor, ReplayExecutor
from sim.world.run import run_world


def spec(name: str, input_tokens: int, ids: str = "", span: int = 4, output_tokens: int = 8) -> RequestSpec:
    return RequestSpec(
        request_id=name,
        arrival_s=0.0,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        content_ids=tuple(ids),
        content_block_tokens=span if ids else 0,
    )


def book(*specs: RequestSpec, seed: int = 0) -> TokenBook:
    return TokenBook(specs, seed=seed, vocab_size=1000)


# -- tokens ----------------------------------------------------------------------------------------------------------------


def test_equal_content_ids_are_equal_tokens_and_the_rest_is_private():
    tokens = book(spec("a", 14, "xyz"), spec("b", 20, "xyw"))
    a, b = tokens.tokens("a", 0, 14), tokens.tokens("b", 0, 20)
    assert a[:8] == b[:8]
    assert a[8:12] != b[8:12]
    assert a[12:] != b[12:14]
    assert a != book(spec("a", 14, "xyz"), seed=1).tokens("a", 0, 14)
    assert all(0 <= token < 1000 for token in a)


def test_an_answer_is_what_was_sampled_and_feeds_back():
    tokens = book(spec("a", 3))
    prompt = tokens.tokens("a", 0, 3)
    for position, token in enumerate((7, 8, 9), 3):
        tokens.record("a", position, token)
    assert tokens.tokens("a", 0, 6) == [*prompt, 7, 8, 9]
    assert tokens.answer("a") == [7, 8, 9]
    assert tokens.answer("a", 2) == [7, 8]
    tokens.record("a", 4, 80)  # the steps from there on did not count: their stretch was cut
    assert tokens.answer("a") == [7, 80]
    with pytest.raises(ValueError, match="a is to compute token 5, but only 5 are known"):
        tokens.tokens("a", 5, 6)


def test_where_a_trace_names_the_output_the_named_token_feeds_back():
    """The next turn repeats the answer as the trace has it; what the model says is kept as its answer."""
    tokens = book(spec("turn", 6, "abc", output_tokens=6), spec("next", 13, "abc"))
    following = tokens.tokens("next", 0, 12)
    assert tokens.tokens("turn", 0, 6) == following[:6]
    tokens.record("turn", 6, 1001)
    assert tokens.answer("turn") == [1001]
    assert tokens.tokens("turn", 6, 7) == following[6:7]


@given(
    input_tokens=st.integers(1, 40),
    count=st.integers(0, 12),
    span=st.integers(1, 8),
    block_size=st.sampled_from((1, 4, 16)),
)
def test_the_book_and_the_prefix_index_mean_the_same_tokens(input_tokens, count, span, block_size):
    """Two requests with equal ids share exactly the blocks whose tokens are equal by name."""
    one, two = (spec(name, input_tokens, "abcdefghijkl"[:count], span, output_tokens=60) for name in ("one", "two"))
    shared = BlockKeys(one, block_size, KeyTable()).num_shared * block_size
    assert shared <= one.named_tokens < shared + block_size
    tokens = book(one, two)
    stop = min(one.named_tokens, input_tokens)
    assert tokens.tokens("one", 0, stop) == tokens.tokens("two", 0, stop)


def test_samples_of_one_request_have_one_prompt():
    tokens = book(*samples(replace(spec("a", 30, "xy"), n=3)), spec("b", 30, "xy"))
    one, two = tokens.tokens("a#0", 0, 30), tokens.tokens("a#2", 0, 30)
    assert one == two
    assert one != tokens.tokens("b", 0, 30)


def test_a_request_that_nobody_announced_is_named():
    with pytest.raises(KeyError, match="request ghost is not among the 1"):
        book(spec("a", 3)).tokens("ghost", 0, 1)


# -- batches ---------------------------------------------------------------------------------------------------------------


def work(name: str, context: int, count: int, table: tuple[int, ...], samples: bool = True) -> Work:
    return Work(
        name=name, token_ids=range(100, 100 + count), context_tokens=context, block_table=table, samples=samples
    )


def buffers(**limits: int) -> BatchBuffers:
    return BatchBuffers(**{"max_tokens": 16, "max_seqs": 4, "max_blocks": 4, "device": "cpu", **limits})


def test_a_batch_puts_decodes_first_and_slots_where_the_tables_say():
    batch = buffers().fill(
        [work("prompt", 0, 5, (3, 1)), work("decode", 6, 1, (7, 2)), work("chunk", 4, 3, (5, 6), samples=False)],
        4,
        Sampling(temperature=0.5, top_k=3),
        [0.25, 0.75],
    )
    assert batch.names == ("decode", "prompt", "chunk")
    assert batch.sampled == ("decode", "prompt")
    assert batch.num_decodes == 1
    assert batch.positions.tolist() == [6, 0, 1, 2, 3, 4, 4, 5, 6]
    assert batch.groups[0].slots.tolist() == [2 * 4 + 2, 12, 13, 14, 15, 4, 24, 25, 26]
    assert batch.groups[0].seq_lens.tolist() == [7, 5, 7]
    assert batch.query_starts.tolist() == [0, 5, 8]
    assert batch.sample_rows.tolist() == [0, 5]
    assert batch.groups[0].block_table.tolist() == [[7, 2], [3, 1], [5, 6]]
    assert batch.uniform.tolist() == [0.75, 0.25]
    assert batch.top_k.tolist() == [3, 3]


def test_blocks_that_were_given_up_are_left_out_and_positions_stay():
    batch = buffers().fill([work("cut", 13, 1, (9, 0, 0, 4))], 4, Sampling())
    assert batch.groups[0].block_table.tolist()[0][:2] == [9, 4]
    assert batch.groups[0].seq_lens.tolist() == [6]
    assert batch.positions.tolist() == [13]
    assert batch.groups[0].slots.tolist() == [4 * 4 + 1]


def test_each_group_has_its_own_slots_tables_and_lengths():
    """A window and full attention: what slid out of the one is read by the other. Positions are the sequence's, whoever reads."""
    both = [
        replace(work("decode", 13, 1, (0, 0, 5, 4)), group_tables=((0, 0, 5, 4), (9, 8, 7, 6))),
        replace(work("chunk", 4, 3, (1, 2)), group_tables=((1, 2), (3, 10))),
    ]
    batch = buffers(num_groups=2).fill(both, 4, Sampling())
    window, full = batch.groups
    assert [window.slots.tolist(), full.slots.tolist()] == [[17, 8, 9, 10], [25, 40, 41, 42]]
    assert [window.seq_lens.tolist(), full.seq_lens.tolist()] == [[14 - 8, 7], [14, 7]]
    assert window.block_table[:, :2].tolist() == [[5, 4], [1, 2]]
    assert [full.block_table.tolist()[0], full.block_table.tolist()[1][:2]] == [[9, 8, 7, 6], [3, 10]]
    assert batch.positions.tolist() == [13, 4, 5, 6]
    with pytest.raises(ValueError, match="zip"):
        buffers(num_groups=3).fill(both, 4, Sampling())


@pytest.mark.parametrize("table", [(1,), (1, 0), ()])
def test_a_token_without_a_block_is_refused(table):
    with pytest.raises(ValueError, match=r"lost has no block for one of its tokens \[5, 6\)"):
        buffers().fill([work("lost", 5, 1, table)], 4, Sampling())


def test_a_step_beyond_the_buffers_is_refused():
    with pytest.raises(
        ValueError, match="17 tokens, 1 sequences and 5 blocks a table does not fit buffers for 16, 4 and 4"
    ):
        buffers().fill([work("long", 0, 17, (1, 2, 3, 4, 5))], 4, Sampling())


def test_copies_that_depend_on_each_other_keep_their_order():
    assert list(independent([(1, 2), (3, 4), (2, 5), (6, 1)])) == [[(1, 2), (3, 4)], [(2, 5), (6, 1)]]
    assert list(independent([])) == []


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    plain, stretched = (
        RotaryConfig(theta=500000.0, kind=kind, factor=8.0).inverse_frequencies(128) for kind in ("default", "llama3")
    )
    assert stretched[0] == plain[0]
    assert stretched[-1] == plain[-1] / 8
    assert all(before / 8 <= after <= before for before, after in zip(plain, stretched, strict=True))
    linear = RotaryConfig(kind="linear", factor=4.0).inverse_frequencies(64)
    assert linear[0] == 0.25
    assert math.isclose(linear[1], 10000 ** (-2 / 64) / 4)


@pytest.mark.parametrize(("name", "why"), [("tpu", "cpu, cuda or cuda:N"), ("cuda:x", "cpu, cuda or cuda:N")])
def test_a_device_that_does_not_exist_is_refused(name, why):
    with pytest.raises(ConfigError, match=why):
        find_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_on_a_machine_without_it_is_refused():
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        find_device("cuda")


def test_the_host_s_timer_measures():
    timer = step_timer("cpu")
    timer.start()
    assert 0 < timer.stop_fs() < 10**15


# -- recordings ------------------------------------------------------------------------------------------------------------


class Scripted:
    """Takes a millisecond a step; some steps run out of memory."""

    def __init__(self, ooms: set[int]) -> None:
        self.ooms = ooms

    def execute(self, plan: StepPlan) -> StepResult:
        steps = range(plan.step, plan.step + plan.repeat)
        failed = next((step for step in steps if step in self.ooms), None)
        count = plan.repeat if failed is None else failed - plan.step + 1
        oom = None if failed is None else OomReport(op="test", requested_bytes=2, free_bytes=1)
        return StepResult(durations=Durations.measured([to_fs(0.001)] * count), oom=oom)


def served(scenario, executor, **settings):
    decisions: list[dict[str, object]] = []
    config, policy = preset("vllm-v1")(scenario.engine)
    record = run_world(
        config,
        FixedCost(1.0),
        scenario.requests,
        executor=executor,
        policy=policy,
        check=True,
        decision_log=decisions.append,
        **settings,
    )
    ends = [(r.outcome, r.num_output_tokens, r.ended_fs, r.kv_block_fs, r.reason) for r in record.requests]
    return decisions, ends


@pytest.mark.parametrize("name", ["pressure-0", "prefixes-0", "swaps-0", "leavers-1", "window-0"])
@pytest.mark.parametrize("ooms", [{3, 9, 10, 21}, {5, 6, 7}, set(range(11, 40, 4))], ids=["some", "in a row", "many"])
def test_a_failure_inside_a_stretch_is_the_same_run_as_that_of_a_single_step(name, ooms):
    scenario = SCENARIOS[name]
    leapt = served(scenario, lambda core: Scripted(ooms))
    assert leapt == served(scenario, lambda core: Scripted(ooms), stepping=True)


@pytest.mark.parametrize("name", ["pressure-0", "leavers-0", "leavers-2"])
def test_a_recording_played_back_is_the_same_run(name):
    """Also where stretches were cut, so that steps were run twice."""
    scenario, made = SCENARIOS[name], []

    def recorded(core):
        made.append(RecordingExecutor(Scripted({4, 13})))
        return made[-1]

    first = served(scenario, recorded)
    assert served(scenario, lambda core: ReplayExecutor(made[0].recording)) == first
    assert served(scenario, lambda core: ReplayExecutor(made[0].recording), stepping=True) == first


def test_a_replay_that_has_parted_from_its_run_says_so():
    with pytest.raises(ValueError, match="step 0 was never recorded"):
        served(SCENARIOS["pressure-0"], lambda core: ReplayExecutor({}))
