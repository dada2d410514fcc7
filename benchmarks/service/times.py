"""Many times in little memory, for percentiles."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

_LEAST_S = 1e-6
_STEP = math.log(1.02)


class Times:
    """Counts times by size, 2 % apart, in little memory."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self.counts = Counter({int(place): count for place, count in (counts or {}).items()})

    def add(self, seconds: float) -> None:
        self.counts[int(math.log(max(seconds, _LEAST_S) / _LEAST_S) / _STEP)] += 1

    def since(self, earlier: "Times") -> "Times":
        """Those that came after."""
        found = Times()
        found.counts = self.counts - earlier.counts
        return found

    def percentile_s(self, share: float) -> float:
        """The time that so large a share did not exceed; infinite if there is none."""
        left = share * self.counts.total()
        for place in sorted(self.counts):
            left -= self.counts[place]
            if left <= 0:
                return _LEAST_S * math.exp((place + 1) * _STEP)
        return math.inf


def read_times(file: Path) -> dict[str, Times]:
    """What a watched service has measured so far."""
    return {name: Times(counts) for name, counts in json.loads(file.read_text()).items()}
