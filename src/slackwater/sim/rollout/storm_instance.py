"""An instance in a storm of faults: it makes the right tokens slowly, until it is told to
misbehave.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from zlib import crc32

from msgspec.structs import replace

from slackwater.control.rollout.commands import Dispatch
from slackwater.control.rollout.events import TokensArrived, TurnEnded
from slackwater.control.weights.events import InstanceReady
from slackwater.model.ids import InstanceId, TurnId
from slackwater.model.instance import InstanceSpec
from slackwater.model.turn import AttemptId, FinishReason


class FalseReport(StrEnum):
    """What an instance may say that is not so."""

    WRONG_VERSION = "ends a turn with another version"
    UNKNOWN_ATTEMPT = "names an attempt that was never sent"
    TOO_MANY = "sends tokens beyond the budget"
    GAP = "leaves tokens out"
    GARBAGE = "sends columns that disagree"
    CUT_SHORT = "ends a turn early"
    UNASKED_READY = "is ready with a version nobody asked for"


def true_token(turn: TurnId, version: str, position: int) -> int:
    """The token at a position of a turn's random stream: what every honest instance makes."""
    return crc32(f"{turn}/{version}/{position}".encode()) % 50_000


@dataclass(slots=True)
class StormRequest:
    """An attempt on the instance; `total_tokens` is the turn's hidden length."""

    command: Dispatch
    total_tokens: int
    made_tokens: int

    def next_tokens(self, count: int) -> list[int]:
        """Make up to `count` more, from where it stands."""
        end = min(self.made_tokens + count, self.total_tokens)
        turn, version = self.command.turn, self.command.version
        tokens = [true_token(turn, version, i) for i in range(self.made_tokens, end)]
        self.made_tokens = end
        return tokens


@dataclass(slots=True)
class StormInstance:
    """One process's life. Frozen: says nothing, but comes back later. Stalled: beats, makes
    nothing.
    """

    spec: InstanceSpec
    serial: int
    requests: dict[int, StormRequest] = field(default_factory=dict)
    versions: set[str] = field(default_factory=set)
    produced_tokens: int = 0
    frozen_until_s: float = 0.0
    stalled_until_s: float = 0.0
    says_stalled: bool = True
    lie: FalseReport | None = None
    refuses_until_s: float = 0.0

    @property
    def instance(self) -> InstanceId:
        return self.spec.instance

    @property
    def kv_used_tokens(self) -> int:
        return sum(len(r.command.prompt) + r.made_tokens for r in self.requests.values())


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
