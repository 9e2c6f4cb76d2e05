"""Page-locked memory: exactly as much as asked for, on pages of its own, and given back."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from gpu.pinned import pinned_zeros


class Runtime:
    """The driver's side: what is registered, by address."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.registered = error, {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.registered[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()

    def check(error: int) -> None:
        if error:
            raise RuntimeError(f"cudaError {error}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    return made


def test_as_many_bytes_are_locked_as_were_asked_for_on_pages_of_their_own(runtime):
    """Five pages, not the eight that a power of two would be; and two buffers never share a page."""
    buffers = [pinned_zeros(size) for size in (5 * mmap.PAGESIZE, 100, 3)]
    assert list(runtime.registered.values()) == [5 * mmap.PAGESIZE, 100, 3]
    assert all(address % mmap.PAGESIZE == 0 for address in runtime.registered)
    assert [(int(buffer.sum()), buffer.dtype, buffer.numel()) for buffer in buffers] == [
        (0, torch.uint8, 5 * mmap.PAGESIZE), (0, torch.uint8, 100), (0, torch.uint8, 3),
    ]  # fmt: skip
    buffers[1].fill_(7)
    assert buffers[1].view(torch.int32)[0] == 0x07070707


def test_what_is_not_used_any_more_is_given_back(runtime):
    buffer = pinned_zeros(4096)
    view = buffer.view(torch.int32)
    assert len(runtime.registered) == 1
    del buffer
    gc.collect()
    assert runtime.registered == {}
    assert int(view.sum()) == 0  # the memory itself is there as long as somebody looks at it
    assert pinned_zeros(0).numel() == 0
    assert runtime.registered == {}


def test_pages_that_cannot_be_locked_are_an_error(runtime):
    runtime.error = 2
    with pytest.raises(RuntimeError, match="cudaError 2"):
        pinned_zeros(4096)
