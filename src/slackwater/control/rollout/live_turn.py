"""A live turn. The manager's copy of its tokens is the authoritative one."""

from array import array
from collections.abc import Sequence
from typing import Protocol

from slackwater.model.ids import InstanceId
from slackwater.model.turn import AttemptId, FinishReason, TurnSpec


class TokenBuffer(Protocol):
    """Tokens that turns have got and do not hold yet."""

    def flush(self) -> None: ...
    def release(self, turn: "LiveTurn") -> None: ...


class LiveTurn:
    """The tokens so far, and where the rest is generated.

    `base_tokens` is their number at the last dispatch, to which a false attempt is rolled back.
    `losses_without_progress` counts instances lost since the last token; `avoided_instance` refused
    the turn last. `buffer`: what may still have tokens of it. `inexact`: an engine
    without exact continuation had it.
    """

    __slots__ = (
        "_logprobs",
        "_tokens",
        "attempt",
        "avoided_instance",
        "base_tokens",
        "buffer",
        "deadline_s",
        "device_clock_s",
        "device_s",
        "earlier_queued_s",
        "inexact",
        "instance",
        "limit",
        "losses_without_progress",
        "moves",
        "prompt_alternatives",
        "prompt_logprobs",
        "prompt_targets",
        "prompt_tokens",
        "prompt_topk",
        "sent_context",
        "sent_s",
        "sequence",
        "spec",
        "streamed_tokens",
        "topk",
        "version",
        "waiting_since_s",
    )

    def __init__(self, spec: TurnSpec, deadline_s: float, sequence: int) -> None:
        self.spec = spec
        self.deadline_s = deadline_s
        self.sequence = sequence
        self.limit = spec.sampling.max_tokens
        self.prompt_tokens = len(spec.prompt)
        self._tokens = array("I")
        self._logprobs = array("f")
        self.buffer: TokenBuffer | None = None
        self.topk: list[Sequence[tuple[int, float]]] | None = (
            [] if spec.sampling.topk_logprobs else None
        )
        self.prompt_logprobs: Sequence[float | None] | None = None
        self.prompt_topk: Sequence[Sequence[tuple[int, float]] | None] = ()
        self.prompt_targets: Sequence[Sequence[float]] = ()
        self.prompt_alternatives: Sequence[Sequence[tuple[int, float]]] = ()
        self.attempt: AttemptId | None = None
        self.instance: InstanceId | None = None
        self.version = spec.version
        self.base_tokens = 0
        self.sent_context = 0
        self.sent_s = 0.0
        self.avoided_instance: InstanceId | None = None
        self.moves = 0
        self.streamed_tokens = 0
        self.inexact = False
        self.losses_without_progress = 0
        self.waiting_since_s: float | None = None
        self.earlier_queued_s = 0.0  # before `waiting_since_s`
        self.device_s = 0.0  # its share of earlier engines' time
        self.device_clock_s = 0.0

    @property
    def tokens(self) -> "array[int]":
        """All tokens accepted so far."""
        if self.buffer is not None:
            self.buffer.flush()
        return self._tokens

    @property
    def logprobs(self) -> "array[float]":
        """The log-prob of each token."""
        if self.buffer is not None:
            self.buffer.flush()
        return self._logprobs

    def take_buffered(self, tokens: bytes, logprobs: bytes) -> None:
        """Append what was buffered, 4 bytes each."""
        self._tokens.frombytes(tokens)
        self._logprobs.frombytes(logprobs)
        if self.spec.stream:
            self.streamed_tokens += len(tokens) // 4

    def leave_buffer(self) -> None:
        """Take what is buffered of this turn, which comes in no further frame."""
        if self.buffer is not None:
            self.buffer.release(self)

    def take_over(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Start from tokens that an earlier control plane accepted; one or more are left."""
        most = max(self.limit - 1, 0)
        self._tokens.extend(tokens[:most])
        self._logprobs.extend(logprobs[:most])

    def total_queued_s(self, now_s: float) -> float:
        """How long it has been queued so far."""
        return self.earlier_queued_s + (
            0.0 if self.waiting_since_s is None else now_s - self.waiting_since_s
        )

    def age_s(self, now_s: float) -> float:
        """How long it has been queued and has run so far."""
        return self.total_queued_s(now_s) + (now_s - self.sent_s if self.instance else 0.0)

    @property
    def context_tokens(self) -> int:
        """Tokens that an instance must hold to continue."""
        if self.buffer is not None:
            self.buffer.flush()
        return self.prompt_tokens + len(self._tokens)

    @property
    def must_continue(self) -> bool:
        """Whether only engines with exact continuation may go on: no other has had the turn."""
        return not self.inexact and len(self.tokens) > 0

    @property
    def is_stream_current(self) -> bool:
        """Whether its stream has all tokens so far, and at least one."""
        count = len(self.tokens)
        return 0 < count == self.streamed_tokens

    @property
    def wants_prompt_scores(self) -> bool:
        """Whether the prompt is still to be scored."""
        return self.prompt_logprobs is None and self.spec.sampling.scores_prompt

    def end_reason(self) -> FinishReason | None:
        """Why the turn is complete with the tokens so far, or None."""
        tokens = self.tokens
        if tokens and tokens[-1] in self.spec.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) >= self.limit else None

    def roll_back(self) -> None:
        """Discard the tokens of the current attempt."""
        del self.tokens[self.base_tokens :]
        del self.logprobs[self.base_tokens :]
        if self.topk is not None:
            del self.topk[self.base_tokens :]
