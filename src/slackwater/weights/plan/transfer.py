"""Who publishes which slice, and who fetches which: nothing twice (ROSE 4.2).

Every element of the model is published by exactly one rank that holds it, replicas sharing the
work; a receiver fetches of each published slice exactly what it holds.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slackwater.weights.plan.shard_map import Box, RankShards, ShardMap

_SMALL = 1 << 16  # elements below which a slice is not divided among its holders


@dataclass(frozen=True, slots=True)
class PublishedSlice:
    """A slice that `rank` publishes."""

    rank: int
    tensor: str
    box: Box

    @property
    def name(self) -> str:
        """`model.norm.weight[0:64]`: how it is called where slices are stored."""
        ranges = zip(self.box.start, self.box.stop, strict=True)
        return f"{self.tensor}[{','.join(f'{a}:{b}' for a, b in ranges)}]"

    @classmethod
    def named(cls, name: str, shape: Sequence[int]) -> "PublishedSlice":
        """What is stored under a name: a slice, or a whole tensor of this shape."""
        if not name.endswith("]"):
            return cls(0, name, Box.whole(shape))
        tensor, _, ranges = name.removesuffix("]").rpartition("[")
        pairs = [part.partition(":") for part in ranges.split(",")]
        start, stop = (tuple(int(pair[i]) for pair in pairs) for i in (0, 2))
        return cls(0, tensor, Box(start, stop))


@dataclass(frozen=True, slots=True)
class SliceFetch:
    """Take `box`, part of what was published, and put it at `place` of the rank's tensor."""

    published: PublishedSlice
    box: Box
    place: tuple[slice, ...]


def whole_shapes(slices: Iterable[PublishedSlice]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of which the slices hold every element."""
    shapes: dict[str, tuple[int, ...]] = {}
    for each in slices:
        least = shapes.get(each.tensor, (0,) * len(each.box.stop))
        shapes[each.tensor] = tuple(map(max, least, each.box.stop))
    return shapes


def publishing(shard_map: ShardMap, small: int = _SMALL) -> tuple[PublishedSlice, ...]:
    """A division of the whole model among the ranks that hold it, evenly loaded."""
    holders: defaultdict[tuple[str, Box], list[int]] = defaultdict(list)
    for rank in range(shard_map.layout.ranks):
        for piece in shard_map.rank(rank).pieces:
            holders[piece.tensor, piece.box].append(rank)
    load: defaultdict[int, int] = defaultdict(int)
    found: list[PublishedSlice] = []
    for (tensor, box), ranks in sorted(
        holders.items(), key=lambda item: (-item[0][1].elements, item[0])
    ):
        shares = _divided(box, len(ranks)) if box.elements >= small else [box]
        idle_first = sorted(ranks, key=lambda rank: (load[rank], rank))
        for rank, share in zip(idle_first, shares, strict=False):
            load[rank] += share.elements
            found.append(PublishedSlice(rank, tensor, share))
    return tuple(sorted(found, key=lambda each: (each.rank, each.tensor, each.box)))


def _divided(box: Box, ways: int) -> list[Box]:
    """The box in up to `ways` parts along its first dimension."""
    rows = box.shape[0]
    ways = min(ways, rows)
    edges = [box.start[0] + rows * part // ways for part in range(ways + 1)]
    return [box.along(0, edges[part], edges[part + 1]) for part in range(ways)]


def fetches(published: Sequence[PublishedSlice], receiver: RankShards) -> tuple[SliceFetch, ...]:
    """What a receiver takes: each of its slices once, out of the published slices that cover it."""
    by_tensor: defaultdict[str, list[PublishedSlice]] = defaultdict(list)
    for each in published:
        by_tensor[each.tensor].append(each)
    found: list[SliceFetch] = []
    for piece in receiver.pieces:
        for source in by_tensor[piece.tensor]:
            common = piece.box.common(source.box)
            if common is not None:
                found.append(SliceFetch(source, common, common.within(piece.box)))
    return tuple(found)
