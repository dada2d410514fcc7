"""How long the service's requests would wait for their first token beside rollouts."""

from math import exp

STRETCH = 1.3  # how much longer a prompt takes beside rollouts
_REMEMBERED_S = 30.0


class PromptQueue:
    """A model of a device that prefills one prompt after another, each `stretch` times as long as
    without rollouts. Prompts take longer beside rollouts for two reasons: the service decodes more
    slowly, so more requests decode in each of its steps; and an arriving prompt may have to wait
    for a running rollout step.
    """

    def __init__(self, stretch: float = STRETCH) -> None:
        self._stretch = stretch
        self._ends_s = self._came_s = float("-inf")
        self.longest_s = 0.0

    def record_arrival(self, now_s: float, work_s: float) -> float:
        """The wait for the first token of a new request that takes `work_s` without rollouts.
        `longest_s` is the longest recent wait, which decays over time.
        """
        self._ends_s = max(self._ends_s, now_s) + self._stretch * work_s
        faded_s = self.longest_s * exp((self._came_s - now_s) / _REMEMBERED_S)
        self._came_s, wait_s = now_s, self._ends_s - now_s
        self.longest_s = max(wait_s, faded_s)
        return wait_s
