"""The tokens of an engine's turns, kept so that a restarted control plane resumes from them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.wire import messages


@dataclass(slots=True)
class _Turn:
    """`turn` is empty where nothing could resume it."""

    turn: str
    version: str
    tokens: "array[int]"
    logprobs: "array[float]"
    ended: bool = False

    def held(self) -> messages.HeldTurn:
        """Without the last token of a turn that ended: who samples it again sees why it did."""
        count = len(self.tokens) - self.ended
        tokens, logprobs = self.tokens[:count].tobytes(), self.logprobs[:count].tobytes()
        return messages.HeldTurn(self.turn, self.version, tokens, logprobs)


class TurnHistory:
    """Turns by request, and the last of those that ended or were reported: no control plane may
    have them durably.
    """

    def __init__(self) -> None:
        self._live: dict[int, _Turn] = {}
        self._kept: dict[str, _Turn] = {}
        self._kept_tokens = 0

    def begin(self, order: messages.Generate) -> None:
        """A turn begins, or goes on after what was generated elsewhere."""
        tokens, logprobs = array("I", order.generated), array("f", order.logprobs)
        resumable = len(tokens) == len(logprobs) and not order.sampling.topk_logprobs
        name = order.turn if resumable else ""
        self._live[order.request] = _Turn(name, order.version, tokens, logprobs)
        self._drop_kept(name)

    def append(
        self, requests: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> None:
        """One token of each."""
        live = self._live
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            turn = live[request]
            turn.tokens.append(token)
            turn.logprobs.append(logprob)

    def end(self, request: int) -> int:
        """The turn is whole; returns how many tokens it has."""
        turn = self._live.pop(request)
        turn.ended = len(turn.tokens) > 0
        self._keep(turn)
        return len(turn.tokens)

    def _keep(self, turn: _Turn) -> None:
        if not turn.turn:
            return
        self._kept[turn.turn] = turn
        self._kept_tokens += len(turn.tokens)
        most, most_tokens = messages.MAX_HELD_TURNS, messages.MAX_HELD_TOKENS
        while len(self._kept) > most or self._kept_tokens > most_tokens:
            self._drop_kept(next(iter(self._kept)))

    def _drop_kept(self, name: str) -> None:
        if (turn := self._kept.pop(name, None)) is not None:
            self._kept_tokens -= len(turn.tokens)

    def drop(self, request: int) -> None:
        """The turn is not wanted here any more."""
        self._live.pop(request, None)

    def report(self) -> messages.HeldTurns:
        """All turns; those that live stop."""
        for turn in self._live.values():
            self._keep(turn)
        self._live = {}
        return messages.HeldTurns([turn.held() for turn in self._kept.values()])
