"""The backoff before a dead worker is restarted."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Twice as long after each death, reset once a worker has lived for `healthy_after_s`."""

    first_s: float = 0.1
    longest_s: float = 30.0
    healthy_after_s: float = 20.0

    def delay_s(self, deaths: int) -> float:
        """The delay after the `deaths`-th death in a row (1, 2, ...)."""
        return min(self.first_s * 2.0 ** min(deaths - 1, 30), self.longest_s)

    def deaths_after(self, deaths: int, lived_s: float) -> int:
        """The number of deaths in a row after one more, at an age of `lived_s`."""
        return 1 if lived_s >= self.healthy_after_s else deaths + 1
