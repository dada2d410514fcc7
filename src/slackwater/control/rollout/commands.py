"""Commands of the rollout manager, and its messages to other controllers."""

from collections.abc import Sequence

from slackwater.control.message import Message
from slackwater.control.rollout.facts import TurnClosed, TurnOpened
from slackwater.control.steps.events import SeedingChanged
from slackwater.control.timer import SetTimer
from slackwater.control.weights.events import VersionFreed, VersionNeeded
from slackwater.model.ids import InstanceId, JobId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import AttemptId, FinishReason


class DispatchTurn(Message, frozen=True):
    """Run the turn on the instance: prefill prompt + generated, then continue at that position.

    `attempt` is the request id for the engine. `sampling.max_tokens` counts `generated` too.
    """

    instance: InstanceId
    attempt: AttemptId
    turn: TurnId
    version: str
    prompt: Sequence[int]
    generated: Sequence[int]
    sampling: Sampling
    score_prompt: bool = False
    owner: str = ""
    logprobs: Sequence[float] = ()  # of `generated`
    stream: bool = False


class AbortTurn(Message, frozen=True):
    """Stop the attempt; tokens that it still sends are discarded."""

    instance: InstanceId
    attempt: AttemptId


class AppendTokens(Message, frozen=True):
    """New tokens of a streamed turn; the first time also the prompt's scores, if requested."""

    turn: TurnId
    tokens: Sequence[int]
    logprobs: Sequence[float]
    topk: Sequence[Sequence[tuple[int, float]]] = ()
    prompt_logprobs: Sequence[float | None] | None = None
    prompt_topk: Sequence[Sequence[tuple[int, float]] | None] = ()


class StreamTokens(Message, frozen=True):
    """New tokens of streamed turns, in columns: the next `counts[i]` are of `turns[i]` (no counts:
    one each). The first tokens of a turn come in `AppendTokens`.
    """

    turns: Sequence[TurnId]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    counts: Sequence[int] = ()


class CompleteTurn(Message, frozen=True):
    """The turn is complete. Completion, failure or cancellation ends every turn exactly once."""

    turn: TurnId
    tokens: Sequence[int]
    logprobs: Sequence[float]
    reason: FinishReason
    version: str
    moves: int
    topk: Sequence[Sequence[tuple[int, float]]] = ()
    prompt_logprobs: Sequence[float | None] | None = None
    prompt_topk: Sequence[Sequence[tuple[int, float]] | None] = ()
    prompt_targets: Sequence[Sequence[float]] = ()
    prompt_alternatives: Sequence[Sequence[tuple[int, float]]] = ()


class FailTurn(Message, frozen=True):
    """The turn has failed, and no other with it; `error` says why."""

    turn: TurnId
    error: str


class ReleaseInstance(Message, frozen=True):
    """Release the instance: none of our turns runs on it any more."""

    instance: InstanceId
    reason: str


class ReportFault(Message, frozen=True):
    """Log a fault for the operator; the manager has handled it."""

    instance: InstanceId
    what: str


class EndSeeding(Message, frozen=True):
    """Release the job's local engines on which no other job seeds; the trainer may start."""

    job: JobId
    reason: str


class ResumeSeeding(Message, frozen=True):
    """The trainer waits for responses: start local engines again to generate them."""

    job: JobId
    reason: str


class LimitInstances(Message, frozen=True):
    """More remote instances than this would not shorten the job's steps."""

    job: JobId
    most: int


TurnCommand = DispatchTurn | AbortTurn | AppendTokens | StreamTokens | CompleteTurn | FailTurn
SeedingCommand = SeedingChanged | EndSeeding | ResumeSeeding | LimitInstances
RolloutReport = TurnOpened | TurnClosed | VersionNeeded | VersionFreed
RolloutCommand = (
    TurnCommand | SeedingCommand | RolloutReport | SetTimer | ReleaseInstance | ReportFault
)
