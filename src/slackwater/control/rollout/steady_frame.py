"""Frames of the same attempts as the frame before, buffered as columns and appended in bulk."""

from array import array
from collections.abc import Sequence

import numpy as np

from slackwater.control.rollout.commands import StreamTokens
from slackwater.control.rollout.live_turn import LiveTurn

MOST_FRAMES = 64


class SteadyFrame:
    """The attempts of an instance's last frame, and how many more such frames their budgets allow.

    A turn gets its tokens when `LiveTurn.tokens` is read, or after `MOST_FRAMES`. Hazard: code that
    takes a turn off the instance must reset `InstanceRecord.steady_frame`. Streamed tokens are
    passed on as columns.
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

    def __init__(self, attempts: Sequence[int], turns: Sequence[LiveTurn]) -> None:
        self._attempts = array("I", attempts)
        self._turns = list(turns)
        self._tokens: list[array[int]] = []
        self._logprobs: list[array[float]] = []
        self._frames_left = min(turn.limit - len(turn.tokens) for turn in turns)
        self._streaming_rows = [row for row, turn in enumerate(turns) if turn.spec.stream]
        self._streamed = [turns[row].spec.turn for row in self._streaming_rows]

    @staticmethod
    def build(attempts: Sequence[int], turns: Sequence[LiveTurn | None]) -> "SteadyFrame | None":
        """For turns that need nothing but their token appended, each once in a frame; else None."""
        plain = [
            turn
            for turn in turns
            if turn is not None
            and turn.topk is None
            and (not turn.spec.stream or turn.is_stream_current)
        ]
        if not plain or len(plain) < len(attempts) or len(set(attempts)) < len(attempts):
            return None
        return SteadyFrame(attempts, plain)

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
                turn.flush = self.flush
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
        """Append the buffered tokens to every turn."""
        shape = len(self._tokens), len(self._turns)
        tokens = np.frombuffer(b"".join(self._tokens), np.uintc).reshape(shape).T.copy()
        logprobs = np.frombuffer(b"".join(self._logprobs), np.float32).reshape(shape).T.copy()
        self._tokens.clear()
        self._logprobs.clear()
        for turn, ids, scores in zip(self._turns, tokens, logprobs, strict=True):
            turn.flush = None
            turn.tokens.frombytes(ids.tobytes())
            turn.logprobs.frombytes(scores.tobytes())
            if turn.spec.stream:
                turn.streamed_tokens += len(ids)


def _ids(values: Sequence[int]) -> "array[int]":
    return values if isinstance(values, array) else array("I", values)


def _scores(values: Sequence[float]) -> "array[float]":
    return values if isinstance(values, array) else array("f", values)
