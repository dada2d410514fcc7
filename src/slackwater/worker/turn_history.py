"""The tokens of an engine's turns: what the control plane has not been sent of them yet, and all,
kept so that a restarted one resumes from them.

Each frame wakes the control plane, which costs it more than the tokens do: those of a few steps go
together, unless steps are long or somebody waits for a turn's first token.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.wire import messages
from slackwater.wire.tokens import TokenColumns

STREAMED_EVERY_S = 0.02  # as often as a screen shows them
OTHERS_EVERY_S = 0.05  # what an engine that dies takes with it


@dataclass(slots=True)
class _Turn:
    """`turn` is empty where nothing could resume it."""

    turn: str
    version: str
    tokens: "array[int]"
    logprobs: "array[float]"
    sent: int
    every_s: float
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
        self._sent_s = self._every_s = 0.0

    def begin(self, order: messages.Generate) -> None:
        """A turn begins, or goes on after what was generated elsewhere."""
        tokens, logprobs = array("I", order.generated), array("f", order.logprobs)
        resumable = len(tokens) == len(logprobs) and not order.sampling.topk_logprobs
        name = order.turn if resumable else ""
        every_s = 0.0 if order.stream else OTHERS_EVERY_S
        turn = _Turn(name, order.version, tokens, logprobs, len(tokens), every_s)
        self._live[order.request] = turn
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
            self._every_s = min(self._every_s, turn.every_s)

    def is_due(self, now_s: float) -> bool:
        """Whether tokens should not wait for those of another step."""
        return now_s - self._sent_s >= self._every_s

    def unsent(self, now_s: float) -> TokenColumns:
        """All that was appended since the last call."""
        requests, counts = list[int](), list[int]()
        tokens, logprobs = array("I"), array("f")
        for request, turn in self._live.items():
            if count := len(turn.tokens) - turn.sent:
                requests.append(request)
                counts.append(count)
                tokens += turn.tokens[turn.sent :]
                logprobs += turn.logprobs[turn.sent :]
                turn.sent += count
                turn.every_s = min(max(turn.every_s, STREAMED_EVERY_S), OTHERS_EVERY_S)
        self._sent_s, self._every_s = now_s, OTHERS_EVERY_S
        return TokenColumns(requests, tokens, logprobs, counts)

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
