"""The prefix index: which block holds the KV of which tokens.

A block's key is an integer that stands for the whole chain of content from the first token to the block's last, and for
the namespace it was computed in (see `chains`); what nothing names has a number of its own, and the block's place in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, KeysView, Mapping, Sequence

from .chains import KeyTable
from .request import RequestSpec

_INDEX_BITS = 32


class BlockKeys:
    """The keys of one request's blocks, made when first asked for.

    Blocks that lie wholly inside the content named by `spec.content_ids` have shared keys; later blocks, which hold
    content that nothing names, have keys private to the request: it can find them again after a preemption, nobody else can.
    """

    __slots__ = ("_block_size", "_history", "_num_named", "_private", "_shared", "_spec", "_table", "num_shared")

    def __init__(self, spec: RequestSpec, block_size: int, table: KeyTable) -> None:
        self._spec = spec
        self._block_size = block_size
        self._table = table
        self._shared: list[range] | None = None
        """Keys of the blocks in named content, in pieces."""
        self._private = 0
        self._history: list[tuple[int, int]] = []
        """`(block, number)`: private numbers that were in use up to that block, before the request went on as a copy of another one."""
        self._num_named = spec.named_tokens // block_size
        whole_prompt = spec.input_tokens // block_size if spec.sample_of else 0
        self.num_shared = max(self._num_named, whole_prompt)
        """Leading blocks whose content other requests may share."""

    def key(self, index: int) -> int:
        """Key of block `index`."""
        return self.keys(index, index + 1)[0]

    def keys(self, start: int, stop: int) -> list[int]:
        """Keys of blocks [start, stop)."""
        shared_stop = min(stop, self._num_named)
        keys = self._named_keys(start, shared_stop) if start < shared_stop else []
        sampled_stop = min(stop, self.num_shared)
        if max(start, shared_stop) < sampled_stop:
            base = self._prompt_number() << _INDEX_BITS
            keys += range(base + max(start, shared_stop), base + sampled_stop)
        first_private = max(start, sampled_stop)
        if first_private < stop:
            if not self._private:
                self._private = self._table.private()
            for until, chain in self._history:
                if first_private < until:
                    base = chain << _INDEX_BITS
                    keys += range(base + first_private, base + min(until, stop))
                    first_private = min(until, stop)
            base = self._private << _INDEX_BITS
            keys += range(base + first_private, base + stop)
        return keys

    def _named_keys(self, start: int, stop: int) -> list[int]:
        """Of blocks [start, stop) that lie in named content."""
        if self._shared is None:
            spec = self._spec
            self._shared = self._table.shared(
                spec.namespace, spec.content_block_tokens, self._block_size, spec.content_ids
            )
        keys: list[int] = []
        first = 0
        for piece in self._shared:
            if first >= stop:
                break
            keys += piece[max(start - first, 0) : stop - first]
            first += len(piece)
        return keys

    def follow(self, source: BlockKeys, block: int) -> None:
        """Take over the keys of a sample of the same prompt for the blocks before `block`; those from there on are the request's own."""
        if not source._private:
            source._private = self._table.private()
        kept = [(min(until, block), chain) for until, chain in source._history]
        self._history = [*kept, (block, source._private)]
        self._private = self._table.private()

    def _prompt_number(self) -> int:
        """That of a prompt that nothing names, shared by the samples of one request."""
        spec = self._spec
        return self._table.prompt(spec.namespace, spec.content_ids, spec.sample_of)


class PrefixIndex:
    """Maps keys to the blocks that hold them. Several blocks may hold equal content; the first registered is found first."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self._others: dict[int, dict[int, None]] = {}
        self._key_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._key_of

    @property
    def block_ids(self) -> KeysView[int]:
        """Every registered block."""
        return self._key_of.keys()

    @property
    def keys_by_block(self) -> Mapping[int, int]:
        """The key of every registered block."""
        return self._key_of

    def key_of(self, block_id: int) -> int | None:
        """The key under which a block is registered."""
        return self._key_of.get(block_id)

    def add(self, block_ids: Sequence[int], keys: Sequence[int]) -> None:
        """Register that each of `block_ids` holds the content of its key.

        A block already registered keeps its key; 0 (no block) is passed over.
        """
        key_of, first = self._key_of, self._first
        if first.keys().isdisjoint(keys) and key_of.keys().isdisjoint(block_ids) and 0 not in block_ids:
            known = len(first)
            first.update(zip(keys, block_ids, strict=True))
            if len(first) == known + len(keys):
                key_of.update(zip(block_ids, keys, strict=True))
                return
            # Some of the blocks hold equal content: one by one, so that the first is found first.
            for key in set(keys):
                del first[key]
        for block_id, key in zip(block_ids, keys, strict=True):
            if block_id in key_of or not block_id:
                continue
            key_of[block_id] = key
            if first.setdefault(key, block_id) != block_id:
                self._others.setdefault(key, {})[block_id] = None

    def drop(self, block_id: int) -> None:
        """Forget a block whose content is about to be overwritten, or was never computed. Unregistered blocks are ignored."""
        key = self._key_of.pop(block_id, None)
        if key is None:
            return
        if not self._others:
            del self._first[key]
            return
        others = self._others.get(key)
        if self._first[key] != block_id:
            assert others is not None
            del others[block_id]
        elif others:
            self._first[key] = next(iter(others))
            del others[self._first[key]]
        else:
            del self._first[key]
        if others is not None and not others:
            del self._others[key]

    def drop_all(self, block_ids: Iterable[int]) -> int:
        """`drop` each; returns how many were registered."""
        before, key_of, first = len(self._key_of), self._key_of, self._first
        if self._others:
            for block_id in block_ids:
                self.drop(block_id)
        else:
            for block_id in block_ids:
                key = key_of.pop(block_id, None)
                if key is not None:
                    del first[key]
        return before - len(key_of)

    def find(self, keys: Iterable[int], barred: Collection[int] = ()) -> list[int]:
        """Blocks that hold the longest run of `keys` from the first; `barred` blocks count as absent."""
        first = self._first
        found: list[int] = []
        for key in keys:
            block_id = first.get(key)
            if block_id is not None and barred and block_id in barred:
                block_id = next((other for other in self._others.get(key, ()) if other not in barred), None)
            if block_id is None:
                break
            found.append(block_id)
        return found
