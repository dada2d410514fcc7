"""Finds the trajectory that a prompt continues: the prompt begins with its last turn.

Sequences are hashed in blocks, each hash covering all before it. A finished turn is remembered
under its last whole block; a prompt with that block in the same place continues it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from slackwater.model.ids import TrajectoryId

BLOCK_TOKENS = 16
_BLOCK_BYTES = BLOCK_TOKENS * array("I").itemsize
KEPT_S = 300.0  # by then engines have evicted the conversation's cache


class PromptEnd(NamedTuple):
    """Where a prompt's hash continues: the hash of its whole blocks, and the bytes after them."""

    value: int
    rest: bytes


class TrajectoryIndex:
    """Bounded by number and age; the oldest are forgotten."""

    def __init__(self, remembered: int = 16_384) -> None:
        self._remembered = remembered
        self._by_block: OrderedDict[int, tuple[TrajectoryId, float]] = OrderedDict()
        self._last_hashed: tuple[str, Sequence[int], list[int], PromptEnd] | None = None

    def find_continued(
        self, version: str, prompt: Sequence[int]
    ) -> tuple[TrajectoryId | None, PromptEnd]:
        """The trajectory whose last turn is the longest prefix of the prompt, and the prompt's end
        for `record_turn`. A prompt is hashed once for all its samples.
        """
        last = self._last_hashed
        if last is None or last[1] is not prompt or last[0] != version:
            whole = array("I", prompt).tobytes()
            blocks = _hash_blocks(hash(version), whole)
            rest = whole[len(blocks) * _BLOCK_BYTES :]
            end = PromptEnd(blocks[-1] if blocks else hash(version), rest)
            last = self._last_hashed = (version, prompt, blocks, end)
        by_block, blocks = self._by_block, last[2]
        if not by_block.keys().isdisjoint(blocks):  # few prompts continue a turn
            block = next(block for block in reversed(blocks) if block in by_block)
            return by_block[block][0], last[3]
        return None, last[3]

    def record_turn(
        self, prompt: PromptEnd, sampled: Sequence[int], trajectory: TrajectoryId, now_s: float
    ) -> None:
        """Remember a turn, if its last whole block has sampled tokens: a block of a shared prompt
        would attract every conversation with that prompt.
        """
        blocks = _hash_blocks(prompt.value, prompt.rest + array("I", sampled).tobytes())
        if not blocks:
            return
        by_block, last = self._by_block, blocks[-1]
        by_block[last] = (trajectory, now_s)
        by_block.move_to_end(last)
        kept_s = now_s - KEPT_S
        while len(by_block) > self._remembered or next(iter(by_block.values()))[1] < kept_s:
            by_block.popitem(last=False)


def _hash_blocks(value: int, tokens: bytes) -> list[int]:
    """The hash of each whole block and all before it, from that of what is before the first."""
    found: list[int] = []
    for end in range(_BLOCK_BYTES, len(tokens) + 1, _BLOCK_BYTES):
        value = hash((value, tokens[end - _BLOCK_BYTES : end]))
        found.append(value)
    return found
