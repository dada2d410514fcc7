"""What can happen to the rollout manager.

Frames of an instance are atomic: one frame becomes `TokensArrived`, then one `TurnEnded` per turn
that finished in it, before the next is read.
"""

from collections.abc import Sequence

from slackwater.control.message import TimedMessage
from slackwater.control.rollout.gates import TurnGate
from slackwater.control.timer import TimerFired
from slackwater.model.ids import InstanceId, JobId, TenantId, TurnId
from slackwater.model.instance import InstanceSpec
from slackwater.model.turn import AttemptId, FinishReason, TurnSpec


class TurnSubmitted(TimedMessage, frozen=True):
    """A client wants a turn generated; `tokens` of it were, under another control plane."""

    spec: TurnSpec
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()


class TurnCancelled(TimedMessage, frozen=True):
    """The client does not want it any more."""

    turn: TurnId


class InstanceJoined(TimedMessage, frozen=True):
    """An engine process connected and said what it can do. It holds no weights of ours yet."""

    spec: InstanceSpec


class VersionOffered(TimedMessage, frozen=True):
    """From the weight director: turns may run with `version` on the instance."""

    instance: InstanceId
    version: str


class VersionRecalled(TimedMessage, frozen=True):
    """From the weight director: nothing more may start with `version` there."""

    instance: InstanceId
    version: str


class InstanceFaulted(TimedMessage, frozen=True):
    """From the weight director: the instance failed, or reported a version falsely."""

    instance: InstanceId
    what: str


class TokensArrived(TimedMessage, frozen=True):
    """One frame in columns: `counts[i]` tokens of `attempts[i]` in order (no counts: one each).

    `topk` has one entry per token if any turn of the frame requested it. Columns may be lists or,
    to save time, `array("I")` and `array("f")`.
    """

    instance: InstanceId
    attempts: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    counts: Sequence[int] = ()
    topk: Sequence[Sequence[tuple[int, float]]] = ()


class PromptScored(TimedMessage, frozen=True):
    """Log-probs of the prompt's tokens (None for the first), and the best k of each where asked."""

    instance: InstanceId
    attempt: AttemptId
    logprobs: Sequence[float | None]
    topk: Sequence[Sequence[tuple[int, float]] | None] = ()
    targets: Sequence[Sequence[float]] = ()
    alternatives: Sequence[Sequence[tuple[int, float]]] = ()


class TurnEnded(TimedMessage, frozen=True):
    """The instance finished the turn: `total_tokens` includes those it was sent."""

    instance: InstanceId
    attempt: AttemptId
    reason: FinishReason
    total_tokens: int
    version: str


class TurnRefused(TimedMessage, frozen=True):
    """The instance gives the turn back: `turn_at_fault` if it can run nowhere, else it moves on."""

    instance: InstanceId
    attempt: AttemptId
    error: str
    turn_at_fault: bool


class InstanceHeartbeat(TimedMessage, frozen=True):
    """Alive; with its load. `produced_tokens` (decoded) and `prefilled_tokens` only ever grow.

    They tell a stall from a quiet moment, and teach the manager the engine's rate by batch size.
    """

    instance: InstanceId
    running: int
    waiting: int
    produced_tokens: int
    kv_used_tokens: int
    prefilled_tokens: int = 0
    stalled: bool = False


class InstanceNotice(TimedMessage, frozen=True):
    """It will be taken away at `leaves_at_s`."""

    instance: InstanceId
    leaves_at_s: float


class DrainAsked(TimedMessage, frozen=True):
    """An operator wants it to finish what it runs (`move_turns`: to hand it over) and leave."""

    instance: InstanceId
    move_turns: bool = False


class InstanceLost(TimedMessage, frozen=True):
    """The connection broke or the process died."""

    instance: InstanceId
    error: str


class BudgetChanged(TimedMessage, frozen=True):
    """A serving node lends more or less room."""

    instance: InstanceId
    max_running: int
    kv_tokens: int


class StepBegan(TimedMessage, frozen=True):
    """A training step of the job starts: local engines seed, and `turns` responses are wanted."""

    job: JobId
    step: int
    turns: int


class TrainerWanted(TimedMessage, frozen=True):
    """The trainer has work for devices on which local engines still seed."""

    job: JobId


class TrainerWaits(TimedMessage, frozen=True):
    """The trainer waits for responses, and says what it has trained on in this step so far."""

    job: JobId
    trained_tokens: int
    train_s: float


class StepEnded(TimedMessage, frozen=True):
    """The trainer finished the step, and says where its time went."""

    job: JobId
    step: int
    trained_tokens: int
    train_s: float
    trainer_wait_s: float
    remote_wait_s: float


class StepDropped(TimedMessage, frozen=True):
    """The job is over: its step, if it has one, teaches nothing and holds nothing."""

    job: JobId


class OwnersNamed(TimedMessage, frozen=True):
    """Whose turns may come: with more than one owner, none may fill an instance alone."""

    owners: tuple[TenantId, ...]


class JobGated(TimedMessage, frozen=True):
    """From now on the job's turns run where the gate admits them; without a gate, anywhere."""

    job: JobId
    gate: TurnGate | None


TurnEvent = TurnSubmitted | TurnCancelled | TokensArrived | PromptScored | TurnEnded | TurnRefused
SignOfLife = VersionOffered | InstanceFaulted | InstanceHeartbeat | InstanceNotice | BudgetChanged
InstanceEvent = InstanceJoined | VersionRecalled | DrainAsked | InstanceLost | SignOfLife
SeedingEvent = StepBegan | TrainerWaits | StepEnded | StepDropped | TrainerWanted
RolloutEvent = TurnEvent | InstanceEvent | SeedingEvent | TimerFired | OwnersNamed | JobGated

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in RolloutEvent.__args__}
