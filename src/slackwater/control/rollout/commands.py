"""What the rollout manager asks for, and what it tells other controllers."""

from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.control.message import Message
from slackwater.control.rollout.facts import TurnClosed, TurnOpened
from slackwater.control.steps.events import SeedingChanged
from slackwater.control.timer import SetTimer
from slackwater.control.weights.events import VersionFreed, VersionNeeded
from slackwater.model.ids import InstanceId, JobId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import AttemptId, FinishReason


class Dispatch(Message, frozen=True):
    """Run the turn there: prefill prompt + generated, then go on at that position.

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


class AbortOn(Message, frozen=True):
    """Forget the attempt; what it still sends is discarded."""

    instance: InstanceId
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class AppendTokens:
    """New tokens of a streamed turn; the first time also the prompt's scores, if requested."""

    turn: TurnId
    tokens: Sequence[int]
    logprobs: Sequence[float]
    topk: Sequence[Sequence[tuple[int, float]]] = ()
    prompt_logprobs: Sequence[float | None] | None = None
    prompt_topk: Sequence[Sequence[tuple[int, float]] | None] = ()


@dataclass(frozen=True, slots=True)
class StreamTokens:
    """New tokens of streamed turns, in columns: the next `counts[i]` are of `turns[i]` (no counts:
    one each); of no turn the first.
    """

    turns: Sequence[TurnId]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    counts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class CompleteTurn:
    """The turn is whole. Exactly one of Complete, Fail or a cancellation ends every turn."""

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
    """The turn alone has failed; `error` says why."""

    turn: TurnId
    error: str


class ReleaseInstance(Message, frozen=True):
    """Let the instance go: nothing of ours runs on it any more."""

    instance: InstanceId
    reason: str


class ReportFault(Message, frozen=True):
    """Something that an operator should see; the manager has dealt with it."""

    instance: InstanceId
    what: str


class EndSeeding(Message, frozen=True):
    """Release the job's local engines on which no other job seeds; the trainer may start."""

    job: JobId
    reason: str


class ResumeSeeding(Message, frozen=True):
    """The trainer waits and generation is short of hands: start local engines again."""

    job: JobId
    reason: str


class LimitInstances(Message, frozen=True):
    """More remote instances than this would not make the job's steps shorter."""

    job: JobId
    most: int


TurnCommand = Dispatch | AbortOn | AppendTokens | StreamTokens | CompleteTurn | FailTurn
SeedingCommand = SeedingChanged | EndSeeding | ResumeSeeding | LimitInstances
RolloutReport = TurnOpened | TurnClosed | VersionNeeded | VersionFreed
RolloutCommand = (
    TurnCommand | SeedingCommand | RolloutReport | SetTimer | ReleaseInstance | ReportFault
)
