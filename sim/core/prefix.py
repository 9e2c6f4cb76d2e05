"""The prefix index: which block holds the KV of which tokens.

A block's key is an integer that stands for the whole chain of content from the first token to the block's last, and for
the namespace it was computed in. Chains are interned, not hashed: two keys are equal only if every typed part of
both chains is equal (invariant I7), so there is nothing to collide.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

from .request import Namespace, RequestSpec

_INDEX_BITS = 32


class KeyTable:
    """Gives every distinct chain of content a number, and every private continuation a number of its own."""

    def __init__(self) -> None:
        self._chains: dict[Namespace | tuple[int, Hashable], int] = {}
        self._next = 1

    def root(self, namespace: Namespace) -> int:
        """The empty chain of a namespace."""
        return self._intern(namespace)

    def extend(self, chain: int, content: Hashable) -> int:
        """The chain that continues `chain` with `content`."""
        return self._intern((chain, content))

    def private(self) -> int:
        """A chain that nothing else will ever equal."""
        self._next += 1
        return self._next - 1

    def _intern(self, link: Namespace | tuple[int, Hashable]) -> int:
        chain = self._chains.get(link)
        if chain is None:
            chain = self._chains[link] = self.private()
        return chain


class BlockKeys:
    """The keys of one request's blocks, made when first asked for.

    Blocks that lie wholly inside the content named by `spec.content_ids` have shared keys; later blocks, which hold
    content that nothing names, have keys private to the request: it can find them again after a preemption, nobody else can.
    """

    __slots__ = ("_block_size", "_chains", "_private", "_spec", "_table", "num_shared")

    def __init__(self, spec: RequestSpec, block_size: int, table: KeyTable) -> None:
        self._spec = spec
        self._block_size = block_size
        self._table = table
        self._chains: list[int] | None = None
        self._private = 0
        named = len(spec.content_ids) * spec.content_block_tokens
        if named and len(spec.content_ids) <= -(-spec.input_tokens // spec.content_block_tokens):
            named = min(named, spec.input_tokens)  # the last id names a part of its span: what follows it is output
        self.num_shared = named // block_size
        """Leading blocks whose content other requests may share."""

    def key(self, index: int) -> int:
        """Key of block `index`."""
        if index < self.num_shared:
            last_token = (index + 1) * self._block_size - 1
            chain = self._shared_chains()[last_token // self._spec.content_block_tokens]
        else:
            if not self._private:
                self._private = self._table.private()
            chain = self._private
        return chain << _INDEX_BITS | index

    def keys(self, stop: int) -> Iterator[int]:
        """Keys of blocks [0, stop)."""
        return map(self.key, range(stop))

    def _shared_chains(self) -> list[int]:
        if self._chains is None:
            chain = self._table.root(self._spec.namespace)
            self._chains = [chain := self._table.extend(chain, content) for content in self._spec.content_ids]
        return self._chains


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

    def key_of(self, block_id: int) -> int | None:
        """The key under which a block is registered."""
        return self._key_of.get(block_id)

    def add(self, block_id: int, key: int) -> None:
        """Register that `block_id` holds the content `key`. A block already registered keeps its key."""
        if block_id in self._key_of:
            return
        self._key_of[block_id] = key
        if self._first.setdefault(key, block_id) != block_id:
            self._others.setdefault(key, {})[block_id] = None

    def drop(self, block_id: int) -> None:
        """Forget a block whose content is about to be overwritten, or was never computed. Unregistered blocks are ignored."""
        key = self._key_of.pop(block_id, None)
        if key is None:
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

    def find(self, keys: Iterable[int], barred: Sequence[int] | frozenset[int] = ()) -> list[int]:
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
