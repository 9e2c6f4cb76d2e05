"""What happens in the very last step reaches the device too: forks that no plan tells of, and what each step of a stretch holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.validation import SCENARIOS, reference_answers, run_for_real
from experiments.validation.worlds import changed_answers, preset
from gpu.readings import StepReading
from gpu.real_engine import RealEngine
from gpu.real_settings import RealSettings
from sim.catalog.models import model_shape
from sim.core.clock import to_fs
from sim.core.config import EngineConfig
from sim.core.engine import EngineCore
from sim.core.forking import Forking
from sim.core.policies import preset_of
from sim.core.request import Outcome, samples
from tests.support.real_driver import RealDriver, spec

# -- forks ---------------------------------------------------------------------------------------------------------------


def test_a_fork_in_the_last_step_has_its_source_s_answer_and_leaves_no_block():
    """Two samples of a prompt of 6 tokens, one output token each, blocks of 4. The first computes the prompt into blocks 1 and 2 and gets
    the token; the second starts as its copy with that token, and both have all they asked for: no other plan follows.
    """
    pair = samples(replace(spec("a", 6, 1), n=2, forking=Forking(width=2)))
    driver = RealDriver(list(pair), num_gpu_blocks=8, block_size=4)
    driver.add()
    done = driver.step()
    assert done.tokens == {"a#0": 6}
    assert driver.core.num_unfinished == 0
    untold = driver.core.untold
    assert untold.forks == (("a#1", "a#0", (1, 2)),)
    assert sorted(untold.releases) == [("a#0", (1, 2)), ("a#1", (1, 2))]
    driver.executor.close(untold)
    assert driver.executor.leaked_blocks == 0
    alone = driver.undisturbed("a#0")
    assert len(alone) == 1
    assert driver.answer("a#0") == driver.answer("a#1") == alone
    assert {request.outcome for request in driver.requests.values()} == {Outcome.FINISHED}


def test_the_world_tells_its_executor_of_forks_in_the_last_step():
    pair = samples(replace(spec("a", 6, 1), n=2, forking=Forking(width=2)))
    scenario = replace(SCENARIOS["samples-0"], requests=pair)
    run = run_for_real(scenario, preset("vllm-v1"))
    assert run.answers["a#0"] == run.answers["a#1"] == reference_answers(scenario)["a#1"]
    assert len(run.answers["a#0"]) == 1
    assert changed_answers(run, reference_answers(scenario)) == []
    assert run.leaked_blocks == 0


# -- readings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "window"), [(4, 6), (4, 7), (4, 5), (8, 3)])
def test_each_step_of_a_stretch_counts_the_blocks_that_the_core_owns_in_it(size, window):
    """A request alone, prompt of 5 tokens. In the step that computes token t it holds the blocks of tokens [0, t], less those of which no
    token is within the window of token t or of any after it: tokens below t - window + 1. With (4, 6) and t = 9, the second step of a
    stretch that began with token 8 counts blocks 1 and 2 of three, though the device still has the first in its tables.
    """
    readings: list[StepReading] = []
    shape = model_shape("tiny-llama-test")
    kinds = tuple(replace(kind, window=window) for kind in shape.attention)
    shape = replace(shape, architecture="mistral", attention=kinds)
    config = EngineConfig(
        num_gpu_blocks=20,
        block_size=size,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        sliding_window=window,
    )
    made = preset_of("vllm-v1", config)
    core = EngineCore(made.config, policy=made.policy)
    asked = spec("r", 5, 40)
    settings = RealSettings(shape=shape, checked=True, num_threads=1)
    executor = RealEngine(settings, [asked], on_step=readings.append).executor(core)
    core.add(asked, 0)
    now_s, lengths, by_core = 0.0, [], []
    while core.num_unfinished:
        plan = core.plan(to_fs(now_s))
        result = executor.execute(plan)
        by_core += [core.owned_blocks_in(ahead) for ahead in range(result.steps)]
        lengths.append(result.steps)
        now_s += 1.0
        core.commit(plan, result, to_fs(now_s))
    held = [reading.allocated_blocks for reading in readings]
    tokens = [4, *range(5, 44)]  # the last token that each step computes
    starts = [0, *range(5, 44)]  # the first: what is below its window has been given back
    assert held == [
        -(-(last + 1) // size) - max(first - window + 1, 0) // size for first, last in zip(starts, tokens, strict=True)
    ]
    assert held == by_core
    assert max(lengths) > 2  # else there was no stretch to look into
