"""Frames of the same attempts as the frame before, buffered as columns and appended in bulk."""

from array import array
from collections.abc import Sequence

import numpy as np

from slackwater.control.rollout.commands import StreamTokens
from slackwater.control.rollout.live_turn import LiveTurn

MOST_FRAMES = 64
_UNLIMITED = 1 << 62


class SteadyFrame:
    """The attempts of an instance's last frame, and how many more such frames their budgets allow.

    All turns get their tokens when `LiveTurn.tokens` of one is read, or after `MOST_FRAMES`; one
    that ends gets its own alone. Hazard: code that takes a turn off the instance must reset
    `InstanceRecord.steady_frame`. Streamed tokens are passed on as columns.
    """

    __slots__ = (
        "_attempts",
        "_frames_left",
        "_logprobs",
        "_streamed",
        "_streaming_rows",
        "_tokens",
        "_turns",
    )

    def __init__(
        self, attempts: Sequence[int], turns: Sequence[LiveTurn], frames_left: int
    ) -> None:
        self._attempts = array("I", attempts)
        self._turns = turns
        self._tokens: list[array[int]] = []
        self._logprobs: list[array[float]] = []
        self._frames_left = frames_left
        self._streaming_rows = [row for row, turn in enumerate(turns) if turn.spec.stream]
        self._streamed = [turns[row].spec.turn for row in self._streaming_rows]

    @staticmethod
    def build(attempts: Sequence[int], turns: Sequence[LiveTurn | None]) -> "SteadyFrame | None":
        """For turns that need nothing but their token appended, each once in a frame; else None."""
        plain: list[LiveTurn] = []
        frames_left = _UNLIMITED
        for turn in turns:
            if (
                turn is None
                or turn.topk is not None
                or (turn.spec.stream and not turn.is_stream_current)
            ):
                return None
            plain.append(turn)
            frames_left = min(frames_left, turn.limit - len(turn.tokens))
        if not plain or len(set(attempts)) < len(attempts):
            return None
        return SteadyFrame(attempts, plain, frames_left)

    def take(
        self, attempts: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> list[StreamTokens] | None:
        """Buffer the frame, and return what of it streams; None if it has other attempts or exceeds
        a budget.
        """
        if not isinstance(attempts, array):
            same = list(attempts) == self._attempts.tolist()
        else:
            same = attempts == self._attempts
        if self._frames_left <= 0 or not same:
            return None
        self._frames_left -= 1
        if not self._tokens:
            for turn in self._turns:
                turn.buffer = self
                turn.losses_without_progress = 0
        self._tokens.append(_ids(tokens))
        self._logprobs.append(_scores(logprobs))
        if len(self._tokens) == MOST_FRAMES:
            self.flush()
        if not self._streamed:
            return []
        if len(self._streaming_rows) < len(self._turns):
            tokens = [tokens[row] for row in self._streaming_rows]
            logprobs = [logprobs[row] for row in self._streaming_rows]
        return [StreamTokens(self._streamed, tokens, logprobs)]

    def flush(self) -> None:
        """Append the buffered tokens to every turn that still waits for its own."""
        shape = len(self._tokens), len(self._turns)
        tokens = np.frombuffer(b"".join(self._tokens), np.uintc).reshape(shape).T.tobytes()
        logprobs = np.frombuffer(b"".join(self._logprobs), np.float32).reshape(shape).T.tobytes()
        self._tokens.clear()
        self._logprobs.clear()
        start, size = 0, 4 * shape[0]
        for turn in self._turns:
            end = start + size
            if turn.buffer is self:
                turn.take_buffered(tokens[start:end], logprobs[start:end])
            start = end

    def flush_one(self, turn: LiveTurn) -> None:
        """Append the buffered tokens to one turn, which leaves: no further frame is taken."""
        self._frames_left = 0
        row = self._turns.index(turn)
        turn.take_buffered(
            array("I", [tokens[row] for tokens in self._tokens]).tobytes(),
            array("f", [logprobs[row] for logprobs in self._logprobs]).tobytes(),
        )


def _ids(values: Sequence[int]) -> "array[int]":
    return values if isinstance(values, array) else array("I", values)


def _scores(values: Sequence[float]) -> "array[float]":
    return values if isinstance(values, array) else array("f", values)
