"""Frames of the same attempts as the one before, kept as columns and distributed in bulk."""

from array import array
from collections.abc import Sequence

import numpy as np

from slackwater.control.rollout.commands import StreamTokens
from slackwater.control.rollout.live_turn import LiveTurn

MOST_FRAMES = 64


class SteadyFrame:
    """The attempts of an instance's last frame, and how many more such frames their budgets allow.

    A turn gets its tokens when `LiveTurn.tokens` is read, or after `MOST_FRAMES`. Whoever takes a
    turn off the instance must forget the instance's steady frame. What streams is passed on as
    columns.
    """

    __slots__ = ("_attempts", "_logprobs", "_places", "_room", "_streamed", "_tokens", "_turns")

    def __init__(self, attempts: Sequence[int], turns: Sequence[LiveTurn]) -> None:
        self._attempts = array("I", attempts)
        self._turns = list(turns)
        self._tokens: list[array[int]] = []
        self._logprobs: list[array[float]] = []
        self._room = min(turn.limit - len(turn.tokens) for turn in turns)
        self._places = [place for place, turn in enumerate(turns) if turn.spec.stream]
        self._streamed = [turns[place].spec.turn for place in self._places]

    @staticmethod
    def of(attempts: Sequence[int], turns: Sequence[LiveTurn | None]) -> "SteadyFrame | None":
        """Only for turns that need nothing but their token kept, each once in a frame."""
        plain = [
            turn
            for turn in turns
            if turn is not None and turn.topk is None and (not turn.spec.stream or turn.is_shown)
        ]
        if not plain or len(plain) < len(attempts) or len(set(attempts)) < len(attempts):
            return None
        return SteadyFrame(attempts, plain)

    def take(
        self, attempts: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> list[StreamTokens] | None:
        """Keep the frame, and say what of it streams; None if it is of other attempts or beyond a
        budget.
        """
        if not isinstance(attempts, array):
            same = list(attempts) == self._attempts.tolist()
        else:
            same = attempts == self._attempts
        if self._room <= 0 or not same:
            return None
        self._room -= 1
        if not self._tokens:
            for turn in self._turns:
                turn.settle = self.settle
        self._tokens.append(_ids(tokens))
        self._logprobs.append(_scores(logprobs))
        if len(self._tokens) == MOST_FRAMES:
            self.settle()
        if not self._streamed:
            return []
        if len(self._places) < len(self._turns):
            tokens = [tokens[place] for place in self._places]
            logprobs = [logprobs[place] for place in self._places]
        return [StreamTokens(self._streamed, tokens, logprobs)]

    def settle(self) -> None:
        """Give every turn its tokens of the frames kept so far."""
        shape = len(self._tokens), len(self._turns)
        tokens = np.frombuffer(b"".join(self._tokens), np.uintc).reshape(shape).T.copy()
        logprobs = np.frombuffer(b"".join(self._logprobs), np.float32).reshape(shape).T.copy()
        self._tokens.clear()
        self._logprobs.clear()
        for turn, ids, scores in zip(self._turns, tokens, logprobs, strict=True):
            turn.settle = None
            turn.tokens.frombytes(ids.tobytes())
            turn.logprobs.frombytes(scores.tobytes())
            if turn.spec.stream:
                turn.streamed_tokens += len(ids)


def _ids(values: Sequence[int]) -> "array[int]":
    return values if isinstance(values, array) else array("I", values)


def _scores(values: Sequence[float]) -> "array[float]":
    return values if isinstance(values, array) else array("f", values)
