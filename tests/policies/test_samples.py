"""Several samples of one prompt: n requests that share its full blocks, and leave together (vLLM V1 semantics)."""

import pytest

from sim.core import EngineConfig, Outcome, RequestSpec, samples
from sim.costs.constant import FixedCost
from sim.results.summary import request_columns
from sim.world import run_world

CONFIG = EngineConfig(num_gpu_blocks=40, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200)


def spec(**fields):
    return RequestSpec(request_id="r", arrival_s=0.0, input_tokens=10, output_tokens=5, **fields)


def run(*specs):
    return run_world(CONFIG, FixedCost(0.1), specs, check=True)


def test_a_request_with_n_samples_is_n_requests_with_names_of_their_own():
    made = samples(spec(n=3))
    assert [sample.request_id for sample in made] == ["r#0", "r#1", "r#2"]
    assert all(sample.n == 1 and sample.sample_of == "r" for sample in made)
    assert samples(spec()) == (spec(),)


def test_the_samples_share_the_full_blocks_of_a_prompt_that_nothing_names():
    """10 tokens are 2 full blocks of 4: the first sample computes them, the other three hit 8 tokens each, in the same step."""
    record = run(spec(n=4))
    columns = request_columns(record)
    assert columns["prefix_hit_tokens"] == [0, 8, 8, 8]
    assert columns["ttft_s"] == [pytest.approx(0.1)] * 4
    # tables of 4 blocks at the end (10 + 4 tokens), 2 of them shared: 2 + 4 x 2 distinct blocks
    assert max(recorder.integrals.time_by_used_blocks for recorder in record.recorders[:1]).keys() >= {10}


def test_prompts_of_different_requests_are_not_shared():
    record = run(spec(n=2), RequestSpec(request_id="q", arrival_s=0.0, input_tokens=10, output_tokens=5, n=2))
    assert request_columns(record)["prefix_hit_tokens"] == [0, 8, 0, 8]


def test_samples_of_a_named_prompt_share_the_named_part_with_others_too():
    """Two named spans of 4 tokens, then 2 tokens that nothing names: "q" hits the named 8, the samples of "r" no more than that."""
    named = {"content_ids": ("a", "b"), "content_block_tokens": 4}
    other = RequestSpec(request_id="q", arrival_s=0.05, input_tokens=12, output_tokens=2, **named)
    record = run(spec(n=2, **named), other)
    assert request_columns(record)["prefix_hit_tokens"] == [0, 8, 8]


def test_when_the_client_leaves_all_samples_leave_and_every_block_is_back():
    """vLLM PR #14326 (B28): n = 4, shared prompt blocks with four holders, the client leaves in step 3."""
    record = run(spec(n=4, cancel_after_s=0.35))
    assert [request.outcome for request in record.requests] == [Outcome.ABORTED] * 4
    assert record.recorders[0].core.pool.num_owned == 0
    assert record.recorders[0].core.pool.num_free == 40


def test_no_samples_is_refused():
    with pytest.raises(ValueError, match="n is 0; it must be at least 1"):
        spec(n=0)
