"""Step times under asynchronous scheduling: the longer of host and device, exactly, in steps and in stretches."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.catalog.gpus import gpu
from sim.catalog.models import model_shape
from sim.core.batch_shape import BatchShape
from sim.core.durations import Durations
from sim.costs import CostModel, FixedCost, Roofline
from sim.costs.fitted import fitted_cost
from sim.costs.overlap import OverlappedHost, overlapped
from tests.support.stretches import each_step_of


@dataclass(frozen=True)
class HostAndDevice:
    """`host_fs` a step and `seq_fs` a sequence on the host; `base_fs` a step and `context_fs` a context token on the device."""

    host: int
    seq: int
    base: int
    context: int
    name: str = "two parts"

    def host_fs(self, sequences: int) -> int:
        return self.host + self.seq * sequences

    def step_fs(self, shape: BatchShape) -> int:
        device_fs = self.base + self.context * shape.decode_context_tokens
        return self.host_fs(shape.decode_seqs + len(shape.prefill)) + device_fs

    def decode_stretch(self, seqs: int, context_tokens: int, steps: int, longest: int = 0) -> Durations:
        shape = BatchShape(decode_seqs=seqs, decode_context_tokens=context_tokens)
        return Durations.affine(steps, self.step_fs(shape), self.context * seqs)

    def copy_fs(self, num_blocks: int) -> int:
        return num_blocks

    def warnings(self) -> list[str]:
        return []


def decodes(seqs: int, context: int, **fields: bool) -> BatchShape:
    return BatchShape(decode_seqs=seqs, decode_context_tokens=context, sampled_seqs=seqs, **fields)


def test_a_step_takes_the_longer_of_host_and_device():
    """Host 10 + 2 x 1 = 12. Device 3 + context: 8 is hidden by the host, 15 hides it; after a pause nothing hides anything."""
    cost = overlapped(HostAndDevice(host=10, seq=1, base=3, context=1))
    assert cost.step_fs(decodes(2, 5)) == 12
    assert cost.step_fs(decodes(2, 12)) == 15
    assert cost.step_fs(decodes(2, 5, after_pause=True)) == 12 + 8
    assert cost.step_fs(decodes(2, 12, after_pause=True)) == 12 + 15


def test_a_stretch_in_which_the_device_overtakes_the_host_has_two_pieces():
    """Two sequences, device 3 + context 5, 7, 9, 11, 13: 8, 10, 12, 14, 16 against the host's 12."""
    durations = overlapped(HostAndDevice(host=10, seq=1, base=3, context=1)).decode_stretch(2, 5, 5)
    assert [durations.before_fs(i + 1) - durations.before_fs(i) for i in range(5)] == [12, 12, 12, 14, 16]
    assert [(piece.steps, piece.first_fs, piece.growth_fs) for piece in durations.segments] == [(2, 12, 0), (3, 12, 2)]


LLAMA, H100 = model_shape("llama-3.1-8b"), gpu("h100-sxm-80gb")
REAL = [Roofline(LLAMA, H100), Roofline(model_shape("qwen3-0.6b"), H100), fitted_cost("auto", LLAMA, H100)]


@pytest.mark.parametrize("inner", REAL, ids=lambda cost: cost.name)
@given(seqs=st.integers(1, 400), mean=st.integers(1, 8000), steps=st.integers(1, 60))
def test_a_stretch_is_exactly_its_steps(inner: CostModel, seqs: int, mean: int, steps: int) -> None:
    cost = overlapped(inner)
    assert isinstance(cost, OverlappedHost)
    durations = cost.decode_stretch(seqs, seqs * mean, steps, mean)
    found = [durations.before_fs(i + 1) - durations.before_fs(i) for i in range(steps)]
    assert found == each_step_of(cost, seqs, seqs * mean, mean, steps)


@given(
    st.builds(HostAndDevice, *(st.integers(0, top) for top in (500, 20, 500, 9))),
    st.integers(1, 9),
    st.integers(0, 100),
    st.integers(1, 60),
)
def test_it_is_never_dearer_than_one_after_the_other_and_never_cheaper_than_either(
    inner: HostAndDevice, seqs: int, context: int, steps: int
) -> None:
    cost = overlapped(inner)
    durations = cost.decode_stretch(seqs, context, steps)
    found = [durations.before_fs(i + 1) - durations.before_fs(i) for i in range(steps)]
    assert found == each_step_of(cost, seqs, context, 0, steps)
    host = inner.host_fs(seqs)
    for each, whole in zip(found, each_step_of(inner, seqs, context, 0, steps), strict=True):
        assert max(host, whole - host) == each <= whole


def test_prices_that_know_no_host_stay_as_they_are():
    cost = FixedCost(0.01)
    assert overlapped(cost) is cost
