"""A CUDA device that is not there: torch's fake tensors on it, and streams, events and graphs that write down what they are told.

`fake_cuda()` lets the code that is meant for a GPU run on a machine without one. Tensors have shapes, formats and devices, but no
numbers: an operation between tensors of different devices fails as it would on a GPU. Kernels are not launched; a launch is
checked (every pointer on the device, the device current, nothing that a capture forbids) and written down. What is sampled is token 0.

What it cannot show: numbers, time, what the allocator and the driver do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

GIB = 1 << 30
ROOM = 80 * GIB


@dataclass(slots=True)
class Log:
    """What the device was told, in order: `(what, stream, detail)`. Work is done when the host has waited for it, and not before."""

    entries: list[tuple[str, str, Any]] = field(default_factory=list)
    stream: str = "main"
    """The current stream."""
    capturing: str = ""
    """The stream that is being captured; empty outside a capture."""
    device: int = 0
    """The current device."""
    given: dict[str, dict[str, int]] = field(default_factory=lambda: {"main": {"main": 0}})
    """By stream: how far every stream is when this one has done all that it was given."""
    done: dict[str, int] = field(default_factory=dict)
    """How far each stream is for certain."""

    def add(self, what: str, detail: Any = None, stream: str | None = None) -> None:
        """One thing more."""
        stream = self.stream if stream is None else stream
        reach = self.given.setdefault(stream, {stream: 0})
        reach[stream] += 1
        self.entries.append((what, stream, detail))

    def order(self, stream: str, after: dict[str, int]) -> None:
        """What a stream is given from now on comes after a point."""
        reach = self.given.setdefault(stream, {stream: 0})
        for other, place in after.items():
            reach[other] = max(reach.get(other, 0), place)

    def host_waits(self, what: str, until: dict[str, int] | None = None) -> None:
        """The host waits, for the current stream or for a point, which nobody may do while a graph is captured."""
        assert not self.capturing, f"{what} inside a capture"
        self.add(what)
        for stream, place in (self.given[self.stream] if until is None else until).items():
            self.done[stream] = max(self.done.get(stream, 0), place)

    def of(self, *kinds: str) -> list[tuple[str, str, Any]]:
        """The entries of these kinds."""
        return [entry for entry in self.entries if entry[0] in kinds]


class FakeStream:
    """A stream. Everything that is ordered is written down."""

    made = 0

    def __init__(self, log: Log, name: str | None = None) -> None:
        self._log = log
        if name is None:
            FakeStream.made += 1
            name = f"stream {FakeStream.made}"
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self._log.add("wait stream", other.name, self.name)
        self._log.order(self.name, self._log.given.get(other.name, {}))

    def wait_event(self, event: FakeEvent) -> None:
        assert event.place is not None, "a stream is to wait for an event that was never recorded"
        self._log.add("wait event", event.number, self.name)
        self._log.order(self.name, event.after)

    def synchronize(self) -> None:
        self._log.host_waits("synchronize stream", self._log.given.get(self.name, {}))


class FakeEvent:
    """An event: a place in a stream, and all that comes before it."""

    made = 0

    def __init__(self, log: Log, enable_timing: bool = False) -> None:
        FakeEvent.made += 1
        self._log, self.timing, self.number = log, enable_timing, FakeEvent.made
        self.place: tuple[str, int] | None = None
        self.after: dict[str, int] = {}

    def record(self, stream: FakeStream | None = None) -> None:
        name = self._log.stream if stream is None else stream.name
        self._log.add("record", self.number, name)
        self.after = dict(self._log.given[name])
        self.place = (name, self.after[name])

    def synchronize(self) -> None:
        self._log.host_waits("synchronize event", self.after)

    def query(self) -> bool:
        assert not self._log.capturing, "an event is asked inside a capture"
        return self.place is None or self._log.done.get(self.place[0], 0) >= self.place[1]

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.timing and end.timing, "an event without timing has no time"
        assert self.place and end.place, "an event that was not recorded has no time"
        assert self.query() and end.query(), "a span has no time before the host has waited for its end"
        return 1.5


class _Functions(TorchFunctionMode):
    """What Python asks of a tensor that needs a CUDA build: indexing; and pinned memory, which is real memory here, for the host
    writes it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.zeros, torch.empty) and kwargs.pop("pin_memory", False):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func is torch.Tensor.__getitem__ and isinstance(args[0], FakeTensor):
            return _indexed(args[0], args[1])
        if func is torch.Tensor.to:
            return _moved(*args, **kwargs)
        if func is torch.Tensor.is_pinned:
            return args[0].device.type == "cpu"
        if func is torch.Tensor.nonzero and isinstance(args[0], FakeTensor):
            return torch.empty((0, args[0].dim()), dtype=torch.int64, device=args[0].device)
        if func is torch.addmm:  # torch has a decomposition for it, which copies
            assert args[0].device == kwargs["out"].device, "Expected all tensors to be on the same device"
            return torch.mm(*args[1:], **kwargs)
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args, **kwargs)
        return func(*args, **kwargs)


def _moved(tensor: Any, *given: Any, device: Any = None, dtype: Any = None) -> Any:
    """`to` by the operation that it stands for."""
    for each in given:
        if isinstance(each, torch.dtype):
            dtype = each
        else:
            device = each
    device = tensor.device if device is None else torch.device(device)
    dtype = tensor.dtype if dtype is None else dtype
    if device.type == tensor.device.type and dtype is tensor.dtype:
        return tensor
    return torch.ops.aten._to_copy.default(tensor, dtype=dtype, device=device)


def _indexed(tensor: Any, index: Any) -> Any:
    """Basic indexing by the operations that it stands for."""
    places = index if isinstance(index, tuple) else (index,)
    dim = 0
    for place in places:
        if place is Ellipsis:
            dim = tensor.dim() - (len(places) - places.index(Ellipsis) - 1)
        elif place is None:
            tensor, dim = torch.ops.aten.unsqueeze.default(tensor, dim), dim + 1
        elif isinstance(place, int):
            tensor = torch.ops.aten.select.int(tensor, dim, place)
        elif isinstance(place, slice):
            stop = tensor.shape[dim] if place.stop is None else place.stop
            tensor, dim = torch.ops.aten.slice.Tensor(tensor, dim, place.start or 0, stop, place.step or 1), dim + 1
        else:
            tensor, dim = torch.ops.aten.index.Tensor(tensor, [None] * dim + [place]), dim + place.dim()
    return tensor


class _Watch(TorchDispatchMode):
    """Writes down copies between the devices, and refuses what a capture may not do."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        if name.startswith("copy_"):
            target, source = args[0].device.type, args[1].device.type
            if target != source:
                self._log.add(f"copy {source} to {target}", (int(args[0].numel()), tuple(args)))
                assert not self._log.capturing, "a copy between host and device inside a capture"
        elif self._log.capturing and isinstance(result, torch.Tensor) and not func.is_view:
            allocates = not any(result is argument for argument in (*args, *(kwargs or {}).values()))
            assert not allocates, f"{name} allocates inside a capture"
            assert result.device.type == "cuda", f"{name} works on the {result.device.type} inside a capture"
        return result


@dataclass(frozen=True)
class _Properties:
    name: str = "NVIDIA H100 80GB HBM3"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    total_memory: int = ROOM
    uuid: str = "0"


@contextmanager
def fake_cuda() -> Iterator[Log]:
    """A CUDA device while inside. Yields what it is told."""
    log = Log()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with pytest.MonkeyPatch.context() as patch:
        _patch_streams(patch, log)
        _patch_queries(patch)
        _patch_graphs(patch, log)
        _patch_gpu(patch, log)
        with mode, _Watch(log), _Functions():
            yield log


def _patch_streams(patch: pytest.MonkeyPatch, log: Log) -> None:
    streams = {"main": FakeStream(log, "main")}

    def make(device: Any = None) -> FakeStream:
        stream = FakeStream(log)
        streams[stream.name] = stream
        return stream

    @contextmanager
    def use(stream: FakeStream) -> Iterator[None]:
        before, log.stream = log.stream, stream.name
        try:
            yield
        finally:
            log.stream = before

    patch.setattr(torch.cuda, "Stream", make)
    patch.setattr(torch.cuda, "Event", lambda enable_timing=False: FakeEvent(log, enable_timing))
    patch.setattr(torch.cuda, "current_stream", lambda device=None: streams[log.stream])
    patch.setattr(torch.cuda, "stream", use)
    patch.setattr(torch.cuda, "set_device", lambda device: setattr(log, "device", torch.device(device).index))
    patch.setattr(torch.cuda, "current_device", lambda: log.device)
    patch.setattr(torch.cuda, "synchronize", lambda device=None: log.host_waits("synchronize"))


def _patch_queries(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "get_device_properties", lambda device=None: _Properties())
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    patch.setattr(torch.cuda, "get_device_name", lambda device=None: _Properties.name)
    patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (ROOM - GIB, ROOM))
    patch.setattr(torch.cuda, "memory_allocated", lambda device=None: GIB)
    patch.setattr(torch.cuda, "memory_reserved", lambda device=None: 2 * GIB)
    patch.setattr(torch.cuda, "memory_stats", lambda device=None: {})
    patch.setattr(torch.cuda, "empty_cache", lambda: None)


def _patch_graphs(patch: pytest.MonkeyPatch, log: Log) -> None:
    class Graph:
        def __init__(self) -> None:
            self.launches = 0

        def replay(self) -> None:
            log.add("replay", self)

    @contextmanager
    def capture(graph: Graph, pool: Any = None, stream: FakeStream | None = None) -> Iterator[None]:
        log.host_waits("synchronize")
        before = log.stream
        log.stream = log.capturing = "capture" if stream is None else stream.name
        log.add("capture", pool)
        try:
            yield
        finally:
            log.stream, log.capturing = before, ""
            log.add("captured", graph)

    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(torch.cuda, "graph", capture)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")


def _patch_gpu(patch: pytest.MonkeyPatch, log: Log) -> None:
    """What the project's own code asks of a device and gets numbers from."""
    from gpu import cpu_pool, real_engine
    from gpu.kernels.launch import Launch

    def run(launch: Launch) -> None:
        tensors = [argument for argument in launch.arguments if isinstance(argument, torch.Tensor)]
        for place, tensor in enumerate(tensors):
            assert tensor.device.type == "cuda", f"pointer {place} of {_name(launch)} is on the {tensor.device}"
            assert tensor.device.index == log.device, f"{_name(launch)} is launched on another device than its tensors'"
        assert all(1 <= size <= limit for size, limit in zip(launch.grid, (2**31 - 1, 65_535, 65_535), strict=False))
        log.add("launch", launch)

    def read(tensor: Any) -> Any:
        """Numbers that are read back are 0."""
        if tensor.device.type == "cuda":
            log.host_waits("read")
        numbers: Any = 0
        for size in reversed(tensor.shape):
            numbers = [numbers] * size
        return numbers

    patch.setattr(FakeTensor, "tolist", read)
    patch.setattr(Launch, "run", run)
    patch.setattr(cpu_pool, "pinned_zeros", lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
    patch.setattr(real_engine, "find_device", lambda name: torch.device("cuda", int(name.partition(":")[2] or 0)))


def _name(launch: Any) -> str:
    return str(launch.kernel.fn.__name__)
