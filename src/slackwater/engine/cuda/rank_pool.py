"""Room for adapters, in units of rank: which adapter lies where. Pure bookkeeping.

An adapter of rank 24 takes two units of 16 side by side. The lowest place that fits is taken, so
that a batch reads no further than it must.
"""

UNIT = 16  # ranks


def units_of(rank: int) -> int:
    """How many units an adapter of this rank takes."""
    return -(-rank // UNIT)


class RankPool:
    """Units in a row, free or taken."""

    def __init__(self) -> None:
        self._taken: list[bool] = []

    @property
    def units(self) -> int:
        return len(self._taken)

    def take(self, count: int) -> int | None:
        """The first of `count` free neighbours, or None if there are none."""
        run = 0
        for place, taken in enumerate(self._taken):
            run = 0 if taken else run + 1
            if run == count:
                first = place + 1 - count
                self._taken[first : place + 1] = [True] * count
                return first
        return None

    def give_back(self, first: int, count: int) -> None:
        assert all(self._taken[first : first + count]), "units are given back once"
        self._taken[first : first + count] = [False] * count

    def grow(self, units: int) -> None:
        """Have at least `units` of them."""
        self._taken += [False] * (units - len(self._taken))

    def wanted(self, count: int) -> int:
        """To how many units to grow so that `count` neighbours are free: twice as many, or four
        times the first wish.

        Always a multiple of 4, in which batch-invariant products go.
        """
        free_at_end = 0
        while free_at_end < self.units and not self._taken[-1 - free_at_end]:
            free_at_end += 1
        wish = max(2 * self.units, self.units - free_at_end + count) if self.units else 4 * count
        return -(-wish // 4) * 4
