"""The tokens of an engine's turns: those not yet sent, and all, so that turns can be resumed.

A restarted control plane resumes turns from this history. Each frame wakes the control plane, which
costs it more than the tokens do, so the tokens of a few steps are sent together, unless steps are
long or a client waits for a turn's first token.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.wire import messages
from slackwater.wire.tokens import TokenColumns

STREAM_DELAY_S = 0.02  # one frame of a screen that shows a stream
MAX_DELAY_S = 0.05  # tokens of this time are lost with an engine


@dataclass(slots=True)
class _Turn:
    """One turn; `turn` is empty if it cannot be resumed."""

    turn: str
    version: str
    tokens: "array[int]"
    logprobs: "array[float]"
    sent: int
    delay_s: float
    ended: bool = False

    def to_message(self) -> messages.HeldTurn:
        """Without the last token of an ended turn: sampling it again shows why the turn ended."""
        count = len(self.tokens) - self.ended
        tokens, logprobs = self.tokens[:count].tobytes(), self.logprobs[:count].tobytes()
        return messages.HeldTurn(self.turn, self.version, tokens, logprobs)


class TurnHistory:
    """Live turns by request, and the most recent ended ones, which may not be durable yet."""

    def __init__(self) -> None:
        self._live: dict[int, _Turn] = {}
        self._recent: dict[str, _Turn] = {}
        self._recent_tokens = 0
        self._last_send_s = self._delay_s = 0.0

    def begin(self, order: messages.Generate) -> None:
        """Begin a turn, or resume one after the tokens that were generated elsewhere."""
        tokens, logprobs = array("I", order.generated), array("f", order.logprobs)
        resumable = len(tokens) == len(logprobs) and not order.sampling.topk_logprobs
        name = order.turn if resumable else ""
        delay_s = 0.0 if order.stream else MAX_DELAY_S
        turn = _Turn(name, order.version, tokens, logprobs, len(tokens), delay_s)
        self._live[order.request] = turn
        self._drop_recent(name)

    def append(
        self, requests: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> None:
        live = self._live
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            turn = live[request]
            turn.tokens.append(token)
            turn.logprobs.append(logprob)
            self._delay_s = min(self._delay_s, turn.delay_s)

    def is_due(self, now_s: float) -> bool:
        """Whether tokens should be sent now rather than with those of the next step."""
        return now_s - self._last_send_s >= self._delay_s

    def take_unsent(self, now_s: float) -> TokenColumns:
        """All tokens that were appended since the last call."""
        requests, counts = list[int](), list[int]()
        tokens, logprobs = array("I"), array("f")
        for request, turn in self._live.items():
            if count := len(turn.tokens) - turn.sent:
                requests.append(request)
                counts.append(count)
                tokens += turn.tokens[turn.sent :]
                logprobs += turn.logprobs[turn.sent :]
                turn.sent += count
                turn.delay_s = min(max(turn.delay_s, STREAM_DELAY_S), MAX_DELAY_S)
        self._last_send_s, self._delay_s = now_s, MAX_DELAY_S
        return TokenColumns(requests, tokens, logprobs, counts)

    def end(self, request: int) -> int:
        """End a turn; returns its number of tokens."""
        turn = self._live.pop(request)
        turn.ended = len(turn.tokens) > 0
        self._remember(turn)
        return len(turn.tokens)

    def _remember(self, turn: _Turn) -> None:
        if not turn.turn:
            return
        self._recent[turn.turn] = turn
        self._recent_tokens += len(turn.tokens)
        max_turns, max_tokens = messages.MAX_HELD_TURNS, messages.MAX_HELD_TOKENS
        while len(self._recent) > max_turns or self._recent_tokens > max_tokens:
            self._drop_recent(next(iter(self._recent)))

    def _drop_recent(self, name: str) -> None:
        if (turn := self._recent.pop(name, None)) is not None:
            self._recent_tokens -= len(turn.tokens)

    def drop(self, request: int) -> None:
        self._live.pop(request, None)

    def report(self) -> messages.HeldTurns:
        """Report all turns; live ones stop."""
        for turn in self._live.values():
            self._remember(turn)
        self._live = {}
        return messages.HeldTurns([turn.to_message() for turn in self._recent.values()])
