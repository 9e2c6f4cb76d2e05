"""CpuLane: requests that were taken off the device and go on on the CPU, with a model and pools of their own there.

A request keeps its KV and its place: what the device has computed is handed over, and the answer goes on token for token. How long
a token takes there, and when a request comes back, is the core's affair; here its tokens are computed when the step that it came in
has been timed, so that they are known whenever somebody asks and are no part of that step's time. Output that the core does not
wait for is forgotten by the token book when the device samples the same place again.

What has left a window stays away; what leaves it later is kept here, because a request may go back at any of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

import torch

from sim.core.blocks import NO_BLOCK
from sim.core.config import EngineConfig
from sim.core.need import blocks_for
from sim.core.plan import CpuMove, ScheduledRequest

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
    tables: tuple[tuple[int, ...], ...]


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

    def receive(self, move: CpuMove, pool: PagedKVPool) -> None:
        """A request leaves the device's `pool` with all its known tokens but the last computed; `catch_up` goes on. Its blocks there
        are the caller's to give back.

        Raises:
            ValueError: it is here already. What `hand_over` raises.
        """
        name = move.request_id
        if name in self._guests:
            raise ValueError(f"{name} is on the CPU already")
        size = blocks_for(move.most_tokens, self._layout.block_size)
        passed = [table.count(NO_BLOCK) for table in move.group_tables]
        own = PagedKVPool(self._layout, sum(size - gone for gone in passed), "cpu", checked=pool.checked)
        free = iter(range(1, own.num_blocks + 1))
        tables = tuple((NO_BLOCK,) * gone + tuple(islice(free, size - gone)) for gone in passed)
        for table, places in zip(move.group_tables, tables, strict=True):
            hand_over(name, pool, table, own, places, move.computed_tokens, release=False)
        self._guests[name] = _Guest(own, tables)
        spec = self._tokens.spec(name)
        last = min(spec.input_tokens + spec.target_tokens, self._max_model_len)
        self._due[name] = range(move.computed_tokens, last - 1)

    def catch_up(self) -> None:
        """Compute what is left of the answers of those who came."""
        while self._due:
            name, places = self._due.popitem()
            self._decode(name, self._guests[name], places)

    def give_back(self, move: CpuMove, pool: PagedKVPool) -> None:
        """A request goes back to a device's `pool`, with as many tokens of those that were computed for it as `move` says.

        Raises:
            KeyError: it is not here. What `hand_over` raises.
        """
        self.catch_up()
        guest = self._guests[move.request_id]
        for table, places in zip(guest.tables, move.group_tables, strict=True):
            seen = [block if place != NO_BLOCK else NO_BLOCK for block, place in zip(table, places, strict=False)]
            hand_over(move.request_id, guest.pool, seen, pool, places, move.computed_tokens, release=False)
        del self._guests[move.request_id]

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
            (token,) = forward.run([_share(name, place, guest.tables)]).values()
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
            num_groups=self._device_model.groups.num_groups,
        )
        model = Decoder(config, weights, ops, max_positions=self._max_model_len, groups=self._device_model.groups)
        return model, workspace, buffers


def _share(name: str, place: int, tables: tuple[tuple[int, ...], ...]) -> ScheduledRequest:
    """A step of one request: its token at `place`."""
    return ScheduledRequest(name, 1, place, tables[0], samples=True, group_tables=tables if len(tables) > 1 else ())
