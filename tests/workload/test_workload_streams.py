"""Named streams: the same numbers for the same name, other numbers for another."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from sim.workload import WorkloadError, stream


def test_a_stream_is_its_seed_its_name_and_its_replication():
    draws = stream(7, "arrival", 2).random(4)
    assert draws.tolist() == stream(7, "arrival", 2).random(4).tolist()
    for other in (stream(8, "arrival", 2), stream(7, "cancel", 2), stream(7, "arrival", 1), stream(7, "arriva", 2)):
        assert not np.array_equal(draws, other.random(4))


def test_streams_do_not_depend_on_the_hash_seed_of_the_process():
    program = "from sim.workload import stream; print(stream(1, 'prefix').random())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True
        ).stdout
        for salt in ("1", "2")
    }
    assert outputs == {f"{stream(1, 'prefix').random()}\n"}


def test_streams_of_different_names_are_not_correlated():
    a, b = stream(0, "input_tokens").random(20_000), stream(0, "output_tokens").random(20_000)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.03


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, "a"), "seed is -1"),
        ((1.5, "a"), "seed is 1.5"),
        ((0, "a", -2), "replication is -2"),
        ((0, ""), "needs a name"),
    ],
)
def test_bad_seeds_are_refused(arguments, message):
    with pytest.raises(WorkloadError, match=message):
        stream(*arguments)
