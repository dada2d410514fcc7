"""Feasible amounts of a resource, and the speedup with more of it."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from slackwater.model.errors import ConfigError
from slackwater.model.ids import ResourceName

# The resources of workers. Any other name is a declared limit (of an API or a website).
CORES: Final = ResourceName("cores")
MEMORY_MIB: Final = ResourceName("memory_mib")
GPUS: Final = ResourceName("gpus")


@dataclass(frozen=True, slots=True)
class Amounts:
    """The feasible amounts of one resource, in whole units, ascending."""

    choices: tuple[int, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.choices, self.choices[1:], strict=False))
        if not self.choices or self.choices[0] < 0 or not ascending:
            raise ConfigError.of(
                "amounts", self.choices, "must be ascending whole numbers, at least one"
            )

    @classmethod
    def exactly(cls, units: int) -> "Amounts":
        return cls((units,))

    @classmethod
    def from_range(cls, least: int, most: int) -> "Amounts":
        """Both included."""
        return cls(tuple(range(least, most + 1)))

    @classmethod
    def from_choices(cls, *choices: int) -> "Amounts":
        return cls(tuple(sorted(set(choices))))

    @property
    def least(self) -> int:
        return self.choices[0]

    @property
    def most(self) -> int:
        return self.choices[-1]


@dataclass(frozen=True, slots=True)
class Need:
    """One dimension of an action's cost: a resource and its feasible amounts."""

    resource: ResourceName
    amounts: Amounts


@dataclass(frozen=True, slots=True)
class Efficiency:
    """E(m) in (0, 1], linear between points: m units take T1 / (E(m) * m)."""

    points: tuple[tuple[int, float], ...] = ((1, 1.0),)

    def __post_init__(self) -> None:
        units = [point[0] for point in self.points]
        if not units or units[0] < 1 or units != sorted(set(units)):
            raise ConfigError.of(
                "efficiency", self.points, "must be (units, share) pairs with ascending units"
            )
        for _, share in self.points:
            if not 0 < share <= 1:
                raise ConfigError.of("efficiency", share, "must be above 0 and at most 1")

    @classmethod
    def amdahl(cls, parallel_share: float, most: int) -> "Efficiency":
        """Amdahl's law for work with this parallel share."""
        if not 0 <= parallel_share <= 1:
            raise ConfigError.of("parallel share", parallel_share, "must be from 0 to 1")
        serial = 1 - parallel_share
        points = ((m, 1 / (m * serial + parallel_share)) for m in range(1, most + 1))
        return cls(tuple(points))

    def value_at(self, units: int) -> float:
        index = bisect_left(self.points, (units, 0.0))
        if index == len(self.points):
            return self.points[-1][1]
        right_units, right = self.points[index]
        if right_units == units or index == 0:
            return right
        left_units, left = self.points[index - 1]
        return left + (right - left) * (units - left_units) / (right_units - left_units)

    def speedup(self, units: int) -> float:
        """How many times faster than on one unit."""
        return self.value_at(units) * units


@dataclass(frozen=True, slots=True)
class Elastic:
    """The resource whose amount decides how long an action runs, and by which efficiency."""

    resource: ResourceName
    efficiency: Efficiency
