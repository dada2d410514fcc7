"""In which order new trajectories start: much longer ones first, since a step ends with its
longest. Trajectories of one prompt last alike: a group's samples, or a later epoch's.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from statistics import median_low
from typing import NewType

from slackwater.model.ids import JobId

PromptKey = NewType("PromptKey", int)  # one number: as many are kept as trajectories

_KEY_TOKENS = 1024  # a prompt's end tells it from others; hashing a long one takes a millisecond
_KEPT_PROMPTS = 65_536
_MUCH_LONGER = 2.0  # than the median; to sort the rest by length would only crowd the caches


def make_prompt_key(job: JobId, prompt: Sequence[int]) -> PromptKey:
    """What trajectories of one job with the same first prompt share."""
    end = prompt[-_KEY_TOKENS:]
    return PromptKey(
        hash((job, len(prompt), end.tobytes() if isinstance(end, array) else tuple(end)))
    )


class StartOrder:
    """How long trajectories of each prompt have lasted at most, as far as is known."""

    def __init__(self) -> None:
        self._lasted_s: OrderedDict[PromptKey, float] = OrderedDict()

    def record(self, prompt: PromptKey, lasted_s: float) -> None:
        """A trajectory of the prompt has lasted so long, and may go on."""
        self._lasted_s[prompt] = max(lasted_s, self._lasted_s.pop(prompt, 0.0))
        if len(self._lasted_s) > _KEPT_PROMPTS:
            self._lasted_s.popitem(last=False)

    def order(self, waiting: Sequence[tuple[PromptKey, float]]) -> list[int]:
        """Indices of waiting trajectories, given by prompt and since when they wait. Much longer
        ones are ahead by their length, and one of each unknown prompt by as much as any, so that
        something is learned of it; hence none waits for ever.
        """
        prompts = [prompt for prompt, _ in waiting]
        # Per prompt, and the rest without Python code: thousands may wait, and all else meanwhile.
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
