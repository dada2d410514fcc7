"""Frames of the same attempts as the one before, kept as columns and distributed in bulk."""

from array import array
from collections.abc import Sequence

import numpy as np

from slackwater.control.rollout.live_turn import LiveTurn

MOST_FRAMES = 64


class SteadyFrame:
    """The attempts of an instance's last frame, and how many more such frames their budgets allow.

    A turn gets its tokens when `LiveTurn.tokens` is read, or after `MOST_FRAMES`. Whoever takes a
    turn off the instance must forget the instance's steady frame.
    """

    __slots__ = ("_attempts", "_logprobs", "_room", "_tokens", "_turns")

    def __init__(self, attempts: Sequence[int], turns: Sequence[LiveTurn]) -> None:
        self._attempts = array("I", attempts)
        self._turns = list(turns)
        self._tokens: list[array[int]] = []
        self._logprobs: list[array[float]] = []
        self._room = min(turn.limit - len(turn.tokens) for turn in turns)

    @staticmethod
    def of(attempts: Sequence[int], turns: Sequence[LiveTurn | None]) -> "SteadyFrame | None":
        """Only for turns that need nothing but their token kept, each once in a frame."""
        plain = [
            turn
            for turn in turns
            if turn is not None and turn.topk is None and not turn.spec.stream
        ]
        if not plain or len(plain) < len(attempts) or len(set(attempts)) < len(attempts):
            return None
        return SteadyFrame(attempts, plain)

    def take(
        self, attempts: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> bool:
        """Keep the frame if it is of the same attempts and within every budget."""
        if not isinstance(attempts, array):
            same = list(attempts) == self._attempts.tolist()
        else:
            same = attempts == self._attempts
        if self._room <= 0 or not same:
            return False
        self._room -= 1
        if not self._tokens:
            for turn in self._turns:
                turn.settle = self.settle
        self._tokens.append(_ids(tokens))
        self._logprobs.append(_scores(logprobs))
        if len(self._tokens) == MOST_FRAMES:
            self.settle()
        return True

    def settle(self) -> None:
        """Give every turn its tokens of the frames kept so far."""
        shape = len(self._tokens), len(self._turns)
        tokens = np.frombuffer(b"".join(self._tokens), np.uintc).reshape(shape).T.copy()
        logprobs = np.frombuffer(b"".join(self._logprobs), np.float64).reshape(shape).T.copy()
        self._tokens.clear()
        self._logprobs.clear()
        for turn, ids, scores in zip(self._turns, tokens, logprobs, strict=True):
            turn.settle = None
            turn.tokens.frombytes(ids.tobytes())
            turn.logprobs.frombytes(scores.tobytes())


def _ids(values: Sequence[int]) -> "array[int]":
    return values if isinstance(values, array) else array("I", values)


def _scores(values: Sequence[float]) -> "array[float]":
    return values if isinstance(values, array) else array("d", values)
