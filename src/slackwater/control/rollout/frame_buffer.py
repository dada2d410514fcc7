"""The last frames of an instance, kept as columns and dealt out to their turns in bulk."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slackwater.control.rollout.commands import StreamTokens
from slackwater.control.rollout.live_turn import LiveTurn

MOST_FRAMES = 64


@dataclass(slots=True)
class _Block:
    """Consecutive frames of equal width. Row `i` of the buffer is `columns[i]` here; rows beyond
    joined later.
    """

    width: int
    columns: list[int]
    tokens: "list[array[int]]" = field(default_factory=list)
    logprobs: "list[array[float]]" = field(default_factory=list)


class FrameBuffer:
    """Takes frames with one token for each of the same turns as the frame before (its rows), less
    those that ended, and with new ones behind them.

    All rows get their tokens when `LiveTurn.tokens` of one is read, or after `MOST_FRAMES`; a turn
    that leaves gets its own alone. Hazard: code that takes a turn off the instance must `release`
    it. Streamed tokens are passed on as columns.
    """

    __slots__ = (
        "_attempts",
        "_block",
        "_blocks",
        "_frames_left",
        "_held",
        "_known",
        "_streaming",
        "_turns",
    )

    def __init__(self, known: Mapping[int, LiveTurn]) -> None:
        """`known`: the attempts that run on the instance."""
        self._known = known
        self._attempts = array("I")
        self._turns: list[LiveTurn] = []
        self._blocks: list[_Block] = []
        self._block: _Block | None = None  # the last one, while the rows are the same
        self._held = 0  # frames
        self._frames_left = 0  # until a row may have reached its budget
        self._streaming: list[int] = []  # rows

    def take(
        self, attempts: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> Sequence[StreamTokens] | None:
        """Buffer a frame, and return what of it streams; None if a turn needs more than its token
        appended, or if the frame is not well formed.
        """
        try:
            attempts, tokens, logprobs = _ids(attempts), _ids(tokens), _scores(logprobs)
        except OverflowError:
            return None
        if not len(attempts) == len(tokens) == len(logprobs):
            return None
        if attempts != self._attempts and not self.follow(attempts):
            return None
        if not self._frames_left and not self._count_frames_left():
            return None
        self._frames_left -= 1
        block = self._block
        if block is None:
            block = self._block = _Block(len(attempts), list(range(len(attempts))))
            self._blocks.append(block)
        block.tokens.append(tokens)
        block.logprobs.append(logprobs)
        self._held += 1
        if self._held == MOST_FRAMES:
            self.flush()
        rows = self._streaming
        if not rows:
            return ()
        if len(rows) < len(attempts):
            tokens, logprobs = [tokens[row] for row in rows], [logprobs[row] for row in rows]
        return (StreamTokens([self._turns[row].spec.turn for row in rows], tokens, logprobs),)

    def follow(self, attempts: Sequence[int]) -> bool:
        """Let the rows be these attempts; False if one of them needs more than its token appended,
        or is there twice.
        """
        kept = len(self._turns)
        if list(attempts[:kept]) != self._attempts.tolist():
            self.clear()
            kept = 0
        turns = [self._known.get(attempt) for attempt in attempts[kept:]]
        joined = [turn for turn in turns if turn is not None and _needs_nothing_more(turn)]
        if len(joined) < len(turns) or len(set(attempts)) < len(attempts):
            self.clear()
            return False
        left = [turn.limit - len(turn.tokens) for turn in joined]
        left = [self._frames_left, *left] if kept else left
        self._frames_left = max(min(left, default=0), 0)
        for row, turn in enumerate(joined, start=kept):
            turn.buffer = self
            turn.losses_without_progress = 0
            if turn.spec.stream:
                self._streaming.append(row)
        self._block = None
        self._turns += joined
        self._attempts = array("I", attempts)
        return True

    def release(self, turn: LiveTurn) -> None:
        """A turn leaves: it gets its own tokens, and of the turns beside it nothing is read."""
        row = self._turns.index(turn)
        tokens, logprobs = array("I"), array("f")
        for block in self._blocks:
            if row < len(block.columns):
                column = block.columns.pop(row)
                tokens.extend([frame[column] for frame in block.tokens])
                logprobs.extend([frame[column] for frame in block.logprobs])
        self._block = None
        del self._turns[row], self._attempts[row]
        if self._streaming:
            self._streaming = [one - (one > row) for one in self._streaming if one != row]
        turn.buffer = None
        turn.take_buffered(tokens.tobytes(), logprobs.tobytes())

    def flush(self) -> None:
        """Append the buffered tokens to all turns. Whoever reads them may change them, so their
        budgets are counted anew.
        """
        self._frames_left = 0
        if not self._held:
            return
        tokens = np.empty((len(self._turns), self._held), np.uintc)
        logprobs = np.empty((len(self._turns), self._held), np.float32)
        starts: list[int] = []  # the first frame of each row
        end = 0
        for block in self._blocks:
            start, end = end, end + len(block.tokens)
            starts += [start] * (len(block.columns) - len(starts))
            _fill(tokens[: len(block.columns), start:end], block, block.tokens)
            _fill(logprobs[: len(block.columns), start:end], block, block.logprobs)
        self._blocks.clear()
        self._block, self._held = None, 0
        token_bytes, logprob_bytes, size = tokens.tobytes(), logprobs.tobytes(), 4 * end
        for row, (turn, start) in enumerate(zip(self._turns, starts, strict=False)):
            first, last = row * size + 4 * start, (row + 1) * size
            turn.take_buffered(token_bytes[first:last], logprob_bytes[first:last])

    def clear(self) -> None:
        """All turns leave."""
        self.flush()
        for turn in self._turns:
            turn.buffer = None
        self._turns = []
        self._attempts = array("I")
        self._streaming = []

    def _count_frames_left(self) -> int:
        self.flush()
        left = min((turn.limit - len(turn.tokens) for turn in self._turns), default=0)
        self._frames_left = max(left, 0)
        return self._frames_left


def _needs_nothing_more(turn: LiveTurn) -> bool:
    return turn.topk is None and (not turn.spec.stream or turn.is_stream_current)


def _fill(
    cells: "NDArray[np.uintc] | NDArray[np.float32]",
    block: _Block,
    frames: "Sequence[array[int]] | Sequence[array[float]]",
) -> None:
    """The frames of a block as columns of rows."""
    values = np.frombuffer(b"".join(frames), cells.dtype).reshape(len(frames), block.width)
    if len(block.columns) < block.width:
        values = values[:, block.columns]
    cells[:] = values.T


def _ids(values: Sequence[int]) -> "array[int]":
    if isinstance(values, array) and values.typecode == "I":
        return values
    return array("I", values)


def _scores(values: Sequence[float]) -> "array[float]":
    if isinstance(values, array) and values.typecode == "f":
        return values
    return array("f", values)
