"""What an instance in a storm says that is not so."""

from dataclasses import dataclass
from enum import StrEnum

from msgspec.structs import replace

from slackwater.control.rollout.events import TokensArrived, TurnEnded
from slackwater.control.weights.events import InstanceReady
from slackwater.model.turn import AttemptId, FinishReason
from slackwater.sim.rollout.storm_instance import StormInstance, StormRequest


class FalseReport(StrEnum):
    """What an instance may say that is not so."""

    WRONG_VERSION = "ends a turn with another version"
    UNKNOWN_ATTEMPT = "names an attempt that was never sent"
    TOO_MANY = "sends tokens beyond the budget"
    GAP = "leaves tokens out"
    GARBAGE = "sends columns that disagree"
    CUT_SHORT = "ends a turn early"
    UNASKED_READY = "is ready with a version nobody asked for"


@dataclass(slots=True)
class TroubledInstance(StormInstance):
    """Frozen: it says nothing, but comes back later."""

    frozen_until_s: float = 0.0
    lie: FalseReport | None = None


def false_report(
    kind: FalseReport, ending: TurnEnded, attempt: int, request: StormRequest
) -> TokensArrived | TurnEnded | InstanceReady:
    """The report about a request whose honest ending, were it now, would be `ending`."""
    now_s, name, made = ending.now_s, ending.instance, request.made_tokens
    match kind:
        case FalseReport.WRONG_VERSION:
            return replace(ending, version="v-none")
        case FalseReport.UNKNOWN_ATTEMPT:
            return TurnEnded(now_s, name, AttemptId(10**9), FinishReason.STOP, 1, "v1")
        case FalseReport.TOO_MANY:
            return TokensArrived(now_s, name, [attempt], [7] * 100, [0.0] * 100, [100])
        case FalseReport.GAP:
            return replace(ending, total_tokens=made + 3)
        case FalseReport.GARBAGE:
            return TokensArrived(now_s, name, [attempt], [1, 2], [0.0])
        case FalseReport.CUT_SHORT:
            short = made - (made >= request.total_tokens)
            return replace(ending, reason=FinishReason.LENGTH, total_tokens=short)
        case FalseReport.UNASKED_READY:
            return InstanceReady(now_s, name, "v-none")
