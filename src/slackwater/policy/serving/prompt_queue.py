"""How long the service's requests would wait for their first token beside rollouts."""

from math import exp

STRETCH = 1.3  # of a prompt beside rollouts
_REMEMBERED_S = 30.0


class PromptQueue:
    """The queue of a device that prefills one prompt after another, each `stretch` times as long as
    alone. Rollouts stretch prompts: the service decodes more slowly, so that more requests decode
    in each of its steps, and a prompt that comes may find a rollout's step under way.
    """

    def __init__(self, stretch: float = STRETCH) -> None:
        self._stretch = stretch
        self._ends_s = self._came_s = float("-inf")
        self.longest_s = 0.0

    def record_arrival(self, now_s: float, work_s: float) -> float:
        """How long a new request waits that takes `work_s` alone; `longest_s` fades over time."""
        self._ends_s = max(self._ends_s, now_s) + self._stretch * work_s
        faded_s = self.longest_s * exp((self._came_s - now_s) / _REMEMBERED_S)
        self._came_s, wait_s = now_s, self._ends_s - now_s
        self.longest_s = max(wait_s, faded_s)
        return wait_s
