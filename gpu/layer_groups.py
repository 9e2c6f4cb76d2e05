"""LayerGroups: which block table a layer reads, and where in a block its KV lies. Pure Python.

The core hands out blocks by attention group and knows of no layers. Layers that keep the same tokens are dealt out over the groups that
keep them, the i-th of n groups getting layers i, i + n, i + 2n, … of them; the j-th layer of any group has place j in its blocks. So
every block is as large as the largest group is long, whichever group it serves, and one arena serves them all.

**Source:** vLLM V1 hybrid KV cache manager (engine-policies §1.1.7): one tensor is shared by the i-th layer of every group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.catalog.shape import ModelShape
from sim.core.config import AttentionGroup, ConfigError


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layers of each attention group of a model, in the order of the core's groups."""

    layers: tuple[tuple[int, ...], ...]
    """By group: its layers; the j-th of them has place j in the group's blocks."""
    windows: tuple[int | None, ...]
    """By group: how far back its layers look, in tokens; None for all the way."""

    @classmethod
    def of(cls, shape: ModelShape, groups: Sequence[AttentionGroup]) -> LayerGroups:
        """Deal the layers of `shape` out over `groups`, `EngineConfig.groups` of its engine.

        Raises:
            ConfigError: a layer looks further back than any group keeps tokens, a group has no layer, or blocks differ in tokens.
        """
        if len(groups) == 1:
            return cls.one(shape, groups[0].window)
        sizes = sorted({group.block_size for group in groups})
        if len(sizes) > 1:
            raise ConfigError(
                f"the attention groups of {shape.name} have blocks of {' and '.join(map(str, sizes))} tokens; executor torch has one pool "
                "of equal layers, whose blocks hold equally many tokens in every group"
            )
        windows = _windows(shape)
        layers: list[tuple[int, ...]] = [()] * len(groups)
        for window in dict.fromkeys([*windows, *(group.window for group in groups)]):
            own = [layer for layer, seen in enumerate(windows) if seen == window]
            into = [index for index, group in enumerate(groups) if group.window == window]
            if len(into) > len(own) or (own and not into):
                raise ConfigError(
                    f"{shape.name} has {len(own)} layers that see {_seen(window)} and {len(into)} attention groups for them; "
                    "each group needs a layer, and each layer a group"
                )
            for turn, index in enumerate(into):
                layers[index] = tuple(own[turn :: len(into)])
        return cls(tuple(layers), tuple(group.window for group in groups))

    @classmethod
    def one(cls, shape: ModelShape, kept: int | None = None) -> LayerGroups:
        """One table for all layers of `shape`, of whose tokens the last `kept` are kept (None: all).

        Raises:
            ConfigError: a layer looks further back than that.
        """
        windows = _windows(shape)
        furthest = None if None in windows else max(window for window in windows if window is not None)
        if kept is not None and (furthest is None or furthest > kept):
            raise ConfigError(
                f"the engine keeps a window of {kept} tokens, but {shape.name} has layers that see {_seen(furthest)}; "
                "its window must be that of the model"
            )
        return cls((tuple(range(shape.num_layers)),), (furthest,))

    @property
    def num_groups(self) -> int:
        """Block tables of a request."""
        return len(self.layers)

    @property
    def num_places(self) -> int:
        """Layers whose KV one block has room for."""
        return max(map(len, self.layers))

    def places(self) -> list[tuple[int, int]]:
        """By layer: its group, and its place in that group's blocks."""
        found = {
            layer: (group, place) for group, layers in enumerate(self.layers) for place, layer in enumerate(layers)
        }
        return [found[layer] for layer in range(len(found))]


def _windows(shape: ModelShape) -> list[int | None]:
    """How far back each layer looks."""
    return [shape.attention_at(layer).window for layer in range(shape.num_layers)]


def _seen(window: int | None) -> str:
    return "all tokens" if window is None else f"{window} tokens"
