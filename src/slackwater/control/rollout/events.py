"""What can happen to the rollout manager. Plain data, so that a record of it can be replayed.

Frames of an instance are atomic: the body turns one frame into `TokensArrived`, then one
`TurnEnded` per turn that finished in it, before it reads the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.control.rollout.gates import TurnGate
from slackwater.control.timer import TimerFired
from slackwater.model.ids import InstanceId, JobId, TenantId, TurnId
from slackwater.model.instance import InstanceSpec
from slackwater.model.turn import AttemptId, FinishReason, TurnSpec


@dataclass(frozen=True, slots=True)
class TurnSubmitted:
    """A client wants a turn generated."""

    now_s: float
    spec: TurnSpec


@dataclass(frozen=True, slots=True)
class TurnCancelled:
    """The client does not want it any more."""

    now_s: float
    turn: TurnId


@dataclass(frozen=True, slots=True)
class InstanceJoined:
    """An engine process connected and said what it can do. It holds no weights of ours yet."""

    now_s: float
    spec: InstanceSpec


@dataclass(frozen=True, slots=True)
class VersionOffered:
    """From the weight director: turns may run with `version` on the instance."""

    now_s: float
    instance: InstanceId
    version: str


@dataclass(frozen=True, slots=True)
class VersionRecalled:
    """From the weight director: nothing more may start with `version` there."""

    now_s: float
    instance: InstanceId
    version: str


@dataclass(frozen=True, slots=True)
class InstanceFaulted:
    """From the weight director: the instance failed, or said something about a version that is not
    so.
    """

    now_s: float
    instance: InstanceId
    what: str


@dataclass(frozen=True, slots=True)
class TokensArrived:
    """One frame, columnar: `counts[i]` tokens of `attempts[i]`, one after the other (no counts: one
    each).

    `topk` has one entry per token when any turn of the frame asked for it. Columns may be lists or,
    to save time, `array("I")` and `array("d")`.
    """

    now_s: float
    instance: InstanceId
    attempts: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    counts: Sequence[int] = ()
    topk: Sequence[Sequence[tuple[int, float]]] = ()


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probs of the prompt's tokens (None for the first), and the best k of each where asked."""

    now_s: float
    instance: InstanceId
    attempt: AttemptId
    logprobs: Sequence[float | None]
    topk: Sequence[Sequence[tuple[int, float]] | None] = ()
    targets: Sequence[Sequence[float]] = ()
    alternatives: Sequence[Sequence[tuple[int, float]]] = ()


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The instance finished the turn: `total_tokens` generated in all, counting those sent along
    with it.
    """

    now_s: float
    instance: InstanceId
    attempt: AttemptId
    reason: FinishReason
    total_tokens: int
    version: str


@dataclass(frozen=True, slots=True)
class TurnRefused:
    """The instance gives the turn back: `turn_at_fault` if it can run nowhere, else it moves on."""

    now_s: float
    instance: InstanceId
    attempt: AttemptId
    error: str
    turn_at_fault: bool


@dataclass(frozen=True, slots=True)
class InstanceHeartbeat:
    """Alive; with its load. `produced_tokens` (decoded) and `prefilled_tokens` only ever grow.

    They tell a stall from a quiet moment, and teach the manager the engine's rate by batch size.
    """

    now_s: float
    instance: InstanceId
    running: int
    waiting: int
    produced_tokens: int
    kv_used_tokens: int
    prefilled_tokens: int = 0
    stalled: bool = False


@dataclass(frozen=True, slots=True)
class InstanceNotice:
    """It will be taken away at `leaves_at_s`."""

    now_s: float
    instance: InstanceId
    leaves_at_s: float


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """An operator wants it to finish what it runs (`move_turns`: to hand it over) and leave."""

    now_s: float
    instance: InstanceId
    move_turns: bool = False


@dataclass(frozen=True, slots=True)
class InstanceLost:
    """The connection broke or the process died."""

    now_s: float
    instance: InstanceId
    error: str


@dataclass(frozen=True, slots=True)
class BudgetChanged:
    """A serving node lends more or less room."""

    now_s: float
    instance: InstanceId
    max_running: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class StepBegan:
    """A training step of the job starts: local engines are seeding, and `turns` responses are
    wanted.
    """

    now_s: float
    job: JobId
    step: int
    turns: int


@dataclass(frozen=True, slots=True)
class TrainerWanted:
    """The trainer has work for devices on which local engines still seed."""

    now_s: float
    job: JobId


@dataclass(frozen=True, slots=True)
class TrainerWaits:
    """The trainer waits for responses, and says what it has trained on in this step so far."""

    now_s: float
    job: JobId
    trained_tokens: int
    train_s: float


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The trainer finished the step, and says where its time went."""

    now_s: float
    job: JobId
    step: int
    trained_tokens: int
    train_s: float
    trainer_wait_s: float
    remote_wait_s: float


@dataclass(frozen=True, slots=True)
class StepDropped:
    """The job is over: its step, if it has one, teaches nothing and holds nothing."""

    now_s: float
    job: JobId


@dataclass(frozen=True, slots=True)
class OwnersNamed:
    """Whose turns may come: with more than one owner, none may fill an instance alone."""

    now_s: float
    owners: tuple[TenantId, ...]


@dataclass(frozen=True, slots=True)
class JobGated:
    """From now on the job's turns run where the gate admits them; without a gate, anywhere."""

    now_s: float
    job: JobId
    gate: TurnGate | None


RolloutEvent = (
    TurnSubmitted
    | TurnCancelled
    | InstanceJoined
    | VersionOffered
    | VersionRecalled
    | InstanceFaulted
    | TokensArrived
    | PromptScored
    | TurnEnded
    | TurnRefused
    | InstanceHeartbeat
    | InstanceNotice
    | DrainAsked
    | InstanceLost
    | BudgetChanged
    | TimerFired
    | StepBegan
    | TrainerWaits
    | StepEnded
    | StepDropped
    | TrainerWanted
    | OwnersNamed
    | JobGated
)

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in RolloutEvent.__args__}
