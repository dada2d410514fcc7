"""Finds the trajectory that a prompt continues: the prompt begins with its last turn.

Sequences are hashed in blocks, each hash covering all before it. A finished turn is remembered
under its last whole block; a prompt with that block in the same place continues it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from slackwater.model.ids import TrajectoryId

BLOCK_TOKENS = 16
_BLOCK_BYTES = BLOCK_TOKENS * array("I").itemsize
KEPT_S = 300.0  # by then engines have evicted the conversation's cache


class TrajectoryIndex:
    """Bounded by number and age; the oldest are forgotten."""

    def __init__(self, remembered: int = 16_384) -> None:
        self._remembered = remembered
        self._by_block: OrderedDict[int, tuple[TrajectoryId, float]] = OrderedDict()
        self._last_lookup: tuple[str, Sequence[int], TrajectoryId | None] | None = None

    def find_continued(self, version: str, prompt: Sequence[int]) -> TrajectoryId | None:
        """The trajectory whose last turn is the longest prefix of the prompt; cached."""
        if (
            self._last_lookup is None
            or self._last_lookup[0] != version
            or self._last_lookup[1] is not prompt
        ):
            self._last_lookup = (version, prompt, self._find(version, prompt))
        return self._last_lookup[2]

    def _find(self, version: str, prompt: Sequence[int]) -> TrajectoryId | None:
        for block in reversed(list(_blocks(version, prompt))):
            found = self._by_block.get(block)
            if found is not None:
                return found[0]
        return None

    def record_turn(
        self,
        version: str,
        prompt: Sequence[int],
        sampled: Sequence[int],
        trajectory: TrajectoryId,
        now_s: float,
    ) -> None:
        """Remember a turn, if its last whole block has sampled tokens: a block of a shared prompt
        would attract every conversation with that prompt.
        """
        whole = (len(prompt) + len(sampled)) // BLOCK_TOKENS * BLOCK_TOKENS
        if whole <= len(prompt):
            return
        self._last_lookup = None
        *_, last = _blocks(version, array("I", prompt) + array("I", sampled))
        self._by_block[last] = (trajectory, now_s)
        self._by_block.move_to_end(last)
        while len(self._by_block) > self._remembered or self._oldest_s < now_s - KEPT_S:
            self._by_block.popitem(last=False)

    @property
    def _oldest_s(self) -> float:
        return next(iter(self._by_block.values()))[1]


def _blocks(version: str, tokens: Sequence[int]) -> Iterator[int]:
    value, whole = hash(version), array("I", tokens).tobytes()
    for start in range(0, len(whole) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        value = hash((value, whole[start : start + _BLOCK_BYTES]))
        yield value
