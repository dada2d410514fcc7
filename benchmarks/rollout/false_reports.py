"""What an instance in a storm says that is not so."""

from msgspec.structs import replace

from slackwater.control.rollout.events import TokensArrived, TurnEnded
from slackwater.control.weights.events import InstanceReady
from slackwater.model.turn import AttemptId, FinishReason
from slackwater.sim.rollout.storm_instance import FalseReport, StormRequest


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
