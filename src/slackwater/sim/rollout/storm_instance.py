"""A simulated instance that generates known tokens, and can be told to misbehave."""

from dataclasses import dataclass, field
from zlib import crc32

from slackwater.control.rollout.commands import DispatchTurn
from slackwater.model.ids import InstanceId, TurnId
from slackwater.model.instance import InstanceSpec


def true_token(turn: TurnId, version: str, position: int) -> int:
    """The token at a position of a turn's random stream: what every honest instance makes."""
    return crc32(f"{turn}/{version}/{position}".encode()) % 50_000


@dataclass(slots=True)
class StormRequest:
    """An attempt on the instance; `total_tokens` is the turn's hidden length."""

    command: DispatchTurn
    total_tokens: int
    made_tokens: int

    def next_tokens(self, count: int) -> list[int]:
        """Generate up to `count` more tokens."""
        end = min(self.made_tokens + count, self.total_tokens)
        turn, version = self.command.turn, self.command.version
        tokens = [true_token(turn, version, i) for i in range(self.made_tokens, end)]
        self.made_tokens = end
        return tokens


@dataclass(slots=True)
class StormInstance:
    """One process. While it is stalled it sends heartbeats and generates nothing."""

    spec: InstanceSpec
    serial: int
    requests: dict[int, StormRequest] = field(default_factory=dict)
    versions: set[str] = field(default_factory=set)
    produced_tokens: int = 0
    stalled_until_s: float = 0.0
    says_stalled: bool = True
    refuses_until_s: float = 0.0

    @property
    def instance(self) -> InstanceId:
        return self.spec.instance

    @property
    def kv_used_tokens(self) -> int:
        return sum(len(r.command.prompt) + r.made_tokens for r in self.requests.values())
