"""Which rank publishes and which fetches which slice: nothing twice (ROSE 4.2).

Every element of the model is published by exactly one rank that holds it; replicas share the work.
A receiver fetches exactly the part of each published slice that it holds.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slackwater.weights.plan.shard_map import Box, RankShards, ShardMap

_SMALL = 1 << 16  # slices of fewer elements are not divided among their holders


@dataclass(frozen=True, slots=True)
class PublishedSlice:
    """A slice that `rank` publishes."""

    rank: int
    tensor: str
    box: Box

    @property
    def name(self) -> str:
        """`model.norm.weight[0:64]`: the slice's name in files."""
        ranges = zip(self.box.start, self.box.stop, strict=True)
        return f"{self.tensor}[{','.join(f'{a}:{b}' for a, b in ranges)}]"

    @classmethod
    def from_name(cls, name: str, shape: Sequence[int]) -> "PublishedSlice":
        """The slice of that name, or a whole tensor of this shape."""
        if not name.endswith("]"):
            return cls(0, name, Box.whole(shape))
        tensor, _, ranges = name.removesuffix("]").rpartition("[")
        pairs = [part.partition(":") for part in ranges.split(",")]
        start, stop = (tuple(int(pair[i]) for pair in pairs) for i in (0, 2))
        return cls(0, tensor, Box(start, stop))


@dataclass(frozen=True, slots=True)
class SliceFetch:
    """Copy `box`, part of a published slice, to `place` in the rank's tensor."""

    published: PublishedSlice
    box: Box
    place: tuple[slice, ...]


def whole_shapes(slices: Iterable[PublishedSlice]) -> dict[str, tuple[int, ...]]:
    """The shapes of the whole tensors that the slices cover."""
    shapes: dict[str, tuple[int, ...]] = {}
    for each in slices:
        least = shapes.get(each.tensor, (0,) * len(each.box.stop))
        shapes[each.tensor] = tuple(map(max, least, each.box.stop))
    return shapes


def plan_publishing(shard_map: ShardMap, small: int = _SMALL) -> tuple[PublishedSlice, ...]:
    """Divide the whole model evenly among the ranks that hold it."""
    holders: defaultdict[tuple[str, Box], list[int]] = defaultdict(list)
    for rank in range(shard_map.layout.ranks):
        for piece in shard_map.rank(rank).pieces:
            holders[piece.tensor, piece.box].append(rank)
    load: defaultdict[int, int] = defaultdict(int)
    found: list[PublishedSlice] = []
    for (tensor, box), ranks in sorted(
        holders.items(), key=lambda item: (-item[0][1].elements, item[0])
    ):
        shares = _divide_rows(box, len(ranks)) if box.elements >= small else [box]
        idle_first = sorted(ranks, key=lambda rank: (load[rank], rank))
        for rank, share in zip(idle_first, shares, strict=False):
            load[rank] += share.elements
            found.append(PublishedSlice(rank, tensor, share))
    return tuple(sorted(found, key=lambda each: (each.rank, each.tensor, each.box)))


def _divide_rows(box: Box, ways: int) -> list[Box]:
    """Divide the box into up to `ways` parts along its first dimension."""
    rows = box.shape[0]
    ways = min(ways, rows)
    edges = [box.start[0] + rows * part // ways for part in range(ways + 1)]
    return [box.clip(0, edges[part], edges[part + 1]) for part in range(ways)]


def plan_fetches(
    published: Sequence[PublishedSlice], receiver: RankShards
) -> tuple[SliceFetch, ...]:
    """A receiver's copies: each of its slices once, from the published slices that cover it."""
    by_tensor: defaultdict[str, list[PublishedSlice]] = defaultdict(list)
    for each in published:
        by_tensor[each.tensor].append(each)
    found: list[SliceFetch] = []
    for piece in receiver.pieces:
        for source in by_tensor[piece.tensor]:
            box = piece.box.intersection(source.box)
            if box is not None:
                found.append(SliceFetch(source, box, box.index_in(piece.box)))
    return tuple(found)
