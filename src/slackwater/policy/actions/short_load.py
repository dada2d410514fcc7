"""How many units the short, inelastic actions keep busy on average: what the next turns of many
trajectories will ask for.

An elastic action that takes every last core makes the tool calls of a hundred trajectories wait for
it. A few cores kept for them cost it little.
"""

import math


class LoadAverage:
    """The number of busy units over time, averaged with a memory of `memory_s` seconds."""

    def __init__(self, memory_s: float = 30.0) -> None:
        self._memory_s = memory_s
        self._since_s: float | None = None
        self._mean = 0.0
        self.busy = 0

    def change(self, units: int, now_s: float) -> None:
        """So many more (or fewer) are busy from now on."""
        if self._since_s is not None:
            keep = math.exp(-(now_s - self._since_s) / self._memory_s)
            self._mean = keep * self._mean + (1 - keep) * self.busy
        self._since_s = now_s
        self.busy += units

    def reserve(self) -> int:
        """Units to keep free beyond those busy now."""
        return max(math.ceil(self._mean) - self.busy, 0) if self._mean >= 0.05 else 0
