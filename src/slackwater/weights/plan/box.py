"""A slice of a tensor: a range in each dimension."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements from `start` up to, not including, `stop`, in every dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def along(self, dim: int, start: int, stop: int) -> "Box":
        """The part of this box between two places of one dimension, which may be empty."""
        starts, stops = list(self.start), list(self.stop)
        starts[dim] = max(starts[dim], start)
        stops[dim] = max(min(stops[dim], stop), starts[dim])
        return Box(tuple(starts), tuple(stops))

    def common(self, other: "Box") -> "Box | None":
        """What both hold, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def within(self, other: "Box") -> tuple[slice, ...]:
        """This box as an index into the array that holds `other`."""
        return tuple(
            slice(a - base, b - base)
            for a, b, base in zip(self.start, self.stop, other.start, strict=True)
        )
