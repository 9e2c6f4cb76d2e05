"""CpuLane: requests that were taken off the device and go on on the CPU, with a model and pools of their own there.

A request keeps its KV and its place: what the device has computed is handed over, and the answer goes on token for token. How long
a token takes there, and when a request comes back, is the core's affair; here its tokens are computed when the step that it came in
has been timed, so that they are known whenever somebody asks and are no part of that step's time. Output that the core does not
wait for is forgotten by the token book when the device samples the same place again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sim.core.config import EngineConfig
from sim.core.need import blocks_for
from sim.core.plan import ScheduledRequest

from .batch import BatchBuffers, Sampling
from .decoder_room import workspace_bytes
from .forward_pass import ForwardPass
from .handover import hand_over
from .layout import KVLayout
from .model import Decoder
from .ops import Ops
from .pool import PagedKVPool
from .tokens import TokenBook
from .weights import DecoderWeights
from .workspace import Workspace


@dataclass(frozen=True, slots=True)
class _Guest:
    pool: PagedKVPool
    table: tuple[int, ...]


class CpuLane:
    """The CPU beside one device. Weights are copied to it once, when the first request comes."""

    def __init__(
        self, device_model: Decoder, layout: KVLayout, tokens: TokenBook, *, sampling: Sampling, max_model_len: int
    ) -> None:
        self._device_model, self._tokens, self._sampling = device_model, tokens, sampling
        self._layout = replace(layout, order="block")
        self._max_model_len = max_model_len
        self._model: Decoder | None = None
        self._workspace: Workspace | None = None
        self._buffers: BatchBuffers | None = None
        self._guests: dict[str, _Guest] = {}
        self._due: dict[str, range] = {}  # by guest: the places whose tokens have not been computed yet
        self.computed_tokens = 0
        """Tokens computed here so far."""

    @property
    def guests(self) -> tuple[str, ...]:
        """Who is here, in the order in which they came."""
        return tuple(self._guests)

    def receive(self, name: str, pool: PagedKVPool, table: Sequence[int]) -> None:
        """A request leaves the device's `pool` with all its known tokens but the last computed; `catch_up` goes on. Its blocks there
        are the caller's to give back.

        Raises:
            ValueError: it is here already. What `hand_over` raises.
        """
        if name in self._guests:
            raise ValueError(f"{name} is on the CPU already")
        context_tokens = self._tokens.num_known(name) - 1
        spec = self._tokens.spec(name)
        wanted = spec.output_tokens if spec.max_tokens is None else min(spec.output_tokens, spec.max_tokens)
        last = min(spec.input_tokens + wanted, self._max_model_len)
        size = blocks_for(max(last, context_tokens), self._layout.block_size)
        own = PagedKVPool(self._layout, size, "cpu", checked=pool.checked)
        places = tuple(range(1, size + 1))
        hand_over(name, pool, table, own, places, context_tokens, release=False)
        self._guests[name] = _Guest(own, places)
        self._due[name] = range(context_tokens, last - 1)

    def catch_up(self) -> None:
        """Compute what is left of the answers of those who came."""
        while self._due:
            name, places = self._due.popitem()
            self._decode(name, self._guests[name], places)

    def give_back(self, name: str, pool: PagedKVPool, table: Sequence[int]) -> None:
        """A request goes back to a device's `pool`, with as many blocks of what was computed for it as `table` has.

        Raises:
            KeyError: it is not here. What `hand_over` raises.
        """
        self.catch_up()
        guest = self._guests.pop(name)
        hand_over(name, guest.pool, guest.table, pool, table, len(table) * self._layout.block_size)

    def drop(self, name: str) -> None:
        """A request has ended; its memory is free. Raises KeyError when it is not here."""
        del self._guests[name]
        self._due.pop(name, None)

    def _decode(self, name: str, guest: _Guest, places: range) -> None:
        """Compute the tokens of these places; each gives the next."""
        forward = self._forward(guest.pool)
        for place in places:
            guest.pool.begin_step(place)
            forward.workspace.reset()
            (token,) = forward.run([ScheduledRequest(name, 1, place, guest.table, samples=True)]).values()
            self._tokens.record(name, place + 1, token)
            guest.pool.end_step()
            self.computed_tokens += 1

    def _forward(self, pool: PagedKVPool) -> ForwardPass:
        if self._model is None or self._workspace is None or self._buffers is None:
            self._model, self._workspace, self._buffers = self._moved_in()
        return ForwardPass(self._model, pool, self._workspace, self._buffers, self._tokens, sampling=self._sampling)

    def _moved_in(self) -> tuple[Decoder, Workspace, BatchBuffers]:
        """The model on the CPU, and room for steps of one token."""
        config, size = self._device_model.config, self._layout.block_size
        one = EngineConfig(
            num_gpu_blocks=1,
            block_size=size,
            max_model_len=self._max_model_len,
            max_num_seqs=1,
            max_num_batched_tokens=1,
        )
        weights: DecoderWeights = self._device_model.weights.to("cpu")
        element = torch.empty(0, dtype=self._device_model.dtype).element_size()
        workspace = Workspace(workspace_bytes(config, one, element_bytes=element, twins=True))
        ops = Ops("cpu", scratch=workspace)
        buffers = BatchBuffers(
            max_tokens=1,
            max_seqs=1,
            max_blocks=blocks_for(self._max_model_len, size) + 1,
            device="cpu",
            staging=ops.staging,
        )
        return Decoder(config, weights, ops, max_positions=self._max_model_len), workspace, buffers
