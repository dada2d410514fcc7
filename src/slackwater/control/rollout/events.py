"""Events of the rollout manager.

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
    """A client requests a turn; `tokens` were generated under an earlier control plane."""

    spec: TurnSpec
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()


class TurnCancelled(TimedMessage, frozen=True):
    """The client cancelled its turn."""

    turn: TurnId


class InstanceJoined(TimedMessage, frozen=True):
    """An engine process connected and declared its capacity. It has no weights of ours yet."""

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
    """The instance refused the turn, which fails if `turn_at_fault` and else runs elsewhere."""

    instance: InstanceId
    attempt: AttemptId
    error: str
    turn_at_fault: bool


class InstanceHeartbeat(TimedMessage, frozen=True):
    """The instance lives, with this load. `produced_tokens` (decoded) and `prefilled_tokens` only
    grow: they tell a stall from a quiet moment, and show the engine's rate by batch size.
    """

    instance: InstanceId
    running: int
    waiting: int
    produced_tokens: int
    kv_used_tokens: int
    prefilled_tokens: int = 0
    stalled: bool = False


class InstanceNotice(TimedMessage, frozen=True):
    """The instance will be removed at `leaves_at_s`."""

    instance: InstanceId
    leaves_at_s: float


class DrainRequested(TimedMessage, frozen=True):
    """An operator drains the instance: its turns finish (`move_turns`: move) and it leaves."""

    instance: InstanceId
    move_turns: bool = False


class InstanceLost(TimedMessage, frozen=True):
    """The connection broke or the process died."""

    instance: InstanceId
    error: str


class BudgetChanged(TimedMessage, frozen=True):
    """A serving node lends another amount of capacity."""

    instance: InstanceId
    max_running: int
    kv_tokens: int


class StepBegan(TimedMessage, frozen=True):
    """A training step of the job started: local engines seed, and it needs `turns` responses."""

    job: JobId
    step: int
    turns: int


class TrainerWanted(TimedMessage, frozen=True):
    """The trainer needs devices on which local engines still seed."""

    job: JobId


class TrainerWaits(TimedMessage, frozen=True):
    """The trainer waits for responses, after this much training in the step."""

    job: JobId
    trained_tokens: int
    train_s: float


class StepEnded(TimedMessage, frozen=True):
    """The trainer finished the step; `train_s` and the waits are where its time went."""

    job: JobId
    step: int
    trained_tokens: int
    train_s: float
    trainer_wait_s: float
    remote_wait_s: float


class StepDropped(TimedMessage, frozen=True):
    """The job ended: its unfinished step, if any, is discarded."""

    job: JobId


class OwnersNamed(TimedMessage, frozen=True):
    """Owners of turns. With more than one, none may fill an instance alone."""

    owners: tuple[TenantId, ...]


class JobGated(TimedMessage, frozen=True):
    """The job's turns now run only where the gate admits them; None: anywhere."""

    job: JobId
    gate: TurnGate | None


TurnEvent = TurnSubmitted | TurnCancelled | TokensArrived | PromptScored | TurnEnded | TurnRefused
LivenessEvent = (
    VersionOffered | InstanceFaulted | InstanceHeartbeat | InstanceNotice | BudgetChanged
)
InstanceEvent = InstanceJoined | VersionRecalled | DrainRequested | InstanceLost | LivenessEvent
SeedingEvent = StepBegan | TrainerWaits | StepEnded | StepDropped | TrainerWanted
RolloutEvent = TurnEvent | InstanceEvent | SeedingEvent | TimerFired | OwnersNamed | JobGated

EVENT_TYPES: dict[str, type] = {kind.__name__: kind for kind in RolloutEvent.__args__}
