"""The order in which new trajectories start: much longer ones first, because a step ends with its
longest one. The length is predicted from earlier trajectories of the same prompt: other samples of
the group, or an earlier epoch.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from statistics import median_low
from typing import NewType

from slackwater.model.ids import JobId

PromptKey = NewType("PromptKey", int)  # a hash, because many are kept

_KEY_TOKENS = 1024  # only the end is hashed: a whole long prompt takes a millisecond
_KEPT_PROMPTS = 65_536
_MUCH_LONGER = 2.0  # than the median; sorting the rest by length too would only crowd the caches


def make_prompt_key(job: JobId, prompt: Sequence[int]) -> PromptKey:
    """The key of all trajectories of one job with the same first prompt."""
    end = prompt[-_KEY_TOKENS:]
    return PromptKey(
        hash((job, len(prompt), end.tobytes() if isinstance(end, array) else tuple(end)))
    )


class StartOrder:
    """Remembers the longest known duration of a trajectory for each prompt."""

    def __init__(self) -> None:
        self._lasted_s: OrderedDict[PromptKey, float] = OrderedDict()

    def record(self, prompt: PromptKey, lasted_s: float) -> None:
        """Record that a trajectory of the prompt has lasted `lasted_s` so far."""
        self._lasted_s[prompt] = max(lasted_s, self._lasted_s.pop(prompt, 0.0))
        if len(self._lasted_s) > _KEPT_PROMPTS:
            self._lasted_s.popitem(last=False)

    def predict_left_s(self, prompt: PromptKey, age_s: float) -> float | None:
        """How much longer a trajectory of the prompt will take; None if that is unknown."""
        lasted_s = self._lasted_s.get(prompt, 0.0)
        return lasted_s - age_s if lasted_s > age_s else None

    def order(self, waiting: Sequence[tuple[PromptKey, float]]) -> list[int]:
        """The indices of waiting trajectories, in starting order. Each is given by its prompt and
        the time since which it waits.

        A much longer trajectory counts as waiting longer by its length. One trajectory of each
        unknown prompt counts as the longest, so that its length becomes known. No trajectory waits
        for ever.
        """
        prompts = [prompt for prompt, _ in waiting]
        # Thousands may wait, and everything else waits for this. So Python code runs once per
        # prompt, not once per trajectory.
        lasted_s = {prompt: self._lasted_s.get(prompt) for prompt in set(prompts)}
        known_s = [known for prompt in prompts if (known := lasted_s[prompt]) is not None]
        if not known_s:
            return list(range(len(waiting)))
        long_s, longest_s = _MUCH_LONGER * median_low(known_s), max(known_s)
        ahead_s = {
            prompt: known if known is not None and known > long_s else 0.0
            for prompt, known in lasted_s.items()
        }
        ranks = [since_s - ahead_s[prompt] for prompt, since_s in waiting]
        if len(known_s) < len(prompts):
            firsts = dict(zip(reversed(prompts), reversed(range(len(prompts))), strict=True))
            for prompt, index in firsts.items():
                if lasted_s[prompt] is None:
                    ranks[index] -= longest_s
        return sorted(range(len(ranks)), key=ranks.__getitem__)
