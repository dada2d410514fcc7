"""What has been learned of a job's phase lengths: a bound on their mean that holds but for a small probability.

The empirical Bernstein bound of Maurer and Pontil, with the declared worst case as the range: it asks for no law of the lengths,
only that a phase never takes longer than declared.
"""

import math
from dataclasses import dataclass


@dataclass(slots=True)
class LengthEstimate:
    """Running mean and variance of one phase's lengths (Welford's recurrence)."""

    count: int = 0
    mean_s: float = 0.0
    squares: float = 0.0
    longest_s: float = 0.0

    def add(self, length_s: float) -> None:
        """One more observed phase."""
        self.count += 1
        delta = length_s - self.mean_s
        self.mean_s += delta / self.count
        self.squares += delta * (length_s - self.mean_s)
        self.longest_s = max(self.longest_s, length_s)

    def mean_bound_s(self, worst_s: float, miss_probability: float) -> float:
        """At most so long is the mean, but for the miss probability; never above the declared worst case."""
        if self.count < 2:
            return worst_s
        log = math.log(2 / miss_probability)
        variance = self.squares / (self.count - 1)
        margin_s = math.sqrt(2 * variance * log / self.count)
        margin_s += 7 * worst_s * log / (3 * (self.count - 1))
        return min(worst_s, self.mean_s + margin_s)
