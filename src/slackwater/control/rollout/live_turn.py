"""One turn while it lives: the manager's copy of its tokens is the only one that counts."""

from array import array
from collections.abc import Callable, Sequence

from slackwater.model.ids import InstanceId
from slackwater.model.turn import AttemptId, FinishReason, TurnSpec


class LiveTurn:
    """Tokens so far, and where the rest is being made.

    `base_tokens` is their number at the last dispatch, to which a false attempt is rolled back.
    `barren_losses` counts instances lost since the last token; `avoids` is the one that gave the
    turn back last. `settle` fetches tokens that a frame still keeps. `inexact`: an engine without
    exact continuation had it.
    """

    __slots__ = (
        "_logprobs",
        "_tokens",
        "attempt",
        "avoids",
        "barren_losses",
        "base_tokens",
        "deadline_s",
        "device_clock_s",
        "device_s",
        "inexact",
        "instance",
        "limit",
        "moves",
        "prompt_alternatives",
        "prompt_logprobs",
        "prompt_targets",
        "prompt_topk",
        "sent_context",
        "sent_s",
        "sequence",
        "settle",
        "spec",
        "streamed_tokens",
        "topk",
        "version",
        "waiting_since_s",
        "waits_s",
    )

    def __init__(self, spec: TurnSpec, deadline_s: float, sequence: int) -> None:
        self.spec = spec
        self.deadline_s = deadline_s
        self.sequence = sequence
        self.limit = spec.sampling.max_tokens
        self._tokens = array("I")
        self._logprobs = array("f")
        self.settle: Callable[[], None] | None = None
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
        self.avoids: InstanceId | None = None
        self.moves = 0
        self.streamed_tokens = 0
        self.inexact = False
        self.barren_losses = 0
        self.waiting_since_s: float | None = None
        self.waits_s = 0.0  # before `waiting_since_s`
        self.device_s = 0.0  # its share of its engines' time, without the present one's
        self.device_clock_s = 0.0

    @property
    def tokens(self) -> "array[int]":
        """All that was accepted so far."""
        if self.settle is not None:
            self.settle()
        return self._tokens

    @property
    def logprobs(self) -> "array[float]":
        """One for each token."""
        if self.settle is not None:
            self.settle()
        return self._logprobs

    def take_over(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Begin with tokens that were accepted before; at least one is left to be generated."""
        most = max(self.limit - 1, 0)
        self._tokens.extend(tokens[:most])
        self._logprobs.extend(logprobs[:most])

    def waited_s(self, now_s: float) -> float:
        """How long it has waited for an engine so far."""
        return self.waits_s + (
            0.0 if self.waiting_since_s is None else now_s - self.waiting_since_s
        )

    def age_s(self, now_s: float) -> float:
        """How long it has waited and run so far."""
        return self.waited_s(now_s) + (now_s - self.sent_s if self.instance else 0.0)

    @property
    def context_tokens(self) -> int:
        """What an instance must hold to go on."""
        return len(self.spec.prompt) + len(self.tokens)

    @property
    def must_continue(self) -> bool:
        """Whether an engine with exact continuation began it, so that only such may continue."""
        return not self.inexact and len(self.tokens) > 0

    @property
    def is_shown(self) -> bool:
        """Whether a client that streams it has seen some, and all of it so far."""
        count = len(self.tokens)
        return 0 < count == self.streamed_tokens

    @property
    def wants_prompt_scores(self) -> bool:
        """Whether the prompt still has to be scored."""
        return self.spec.sampling.scores_prompt and self.prompt_logprobs is None

    def finished_reason(self) -> FinishReason | None:
        """Why the tokens at hand are already all there will be, if so."""
        tokens = self.tokens
        if tokens and tokens[-1] in self.spec.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) >= self.limit else None

    def roll_back(self) -> None:
        """Forget what the current attempt sent."""
        del self.tokens[self.base_tokens :]
        del self.logprobs[self.base_tokens :]
        if self.topk is not None:
            del self.topk[self.base_tokens :]
