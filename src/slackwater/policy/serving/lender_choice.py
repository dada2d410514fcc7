"""Which serving nodes lend, and to which job: those with the lowest recent KV use (ROSE 4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slackwater.model.errors import ConfigError
from slackwater.model.ids import JobId, NodeId, ServiceName


@dataclass(frozen=True, slots=True)
class LendableNode:
    """A node without a loan, and the shares of its KV memory and time used lately."""

    node: NodeId
    service: ServiceName
    kv_share: float
    busy_share: float


@dataclass(frozen=True, slots=True)
class LenderRule:
    """A node lends while its service uses less than `most_kv` of its memory and `most_busy` of its
    time. It is taken back above `back_kv` at once, above `back_busy` on the mean, or if its
    borrower used less than `least_use` for `trial_s`; then it rests for `rest_s`, twice as long
    after each further unused loan, up to `longest_rest_s`.
    """

    most_kv: float = 0.5
    most_busy: float = 0.7
    back_kv: float = 0.8
    back_busy: float = 0.9
    rest_s: float = 30.0
    least_use: float = 0.01
    trial_s: float = 30.0
    longest_rest_s: float = 600.0

    def __post_init__(self) -> None:
        for low, high in (("most_kv", "back_kv"), ("most_busy", "back_busy")):
            if not 0 < getattr(self, low) <= getattr(self, high) <= 1:
                values = (getattr(self, low), getattr(self, high))
                raise ConfigError.of(f"{low}, {high}", values, "must rise, from above 0 to 1")

    def may_lend(self, node: LendableNode) -> bool:
        return node.kv_share <= self.most_kv and node.busy_share <= self.most_busy

    def must_return(self, kv_share: float, busy_share: float) -> bool:
        return kv_share > self.back_kv or busy_share > self.back_busy

    def rest_duration_s(self, unused_loans: int) -> float:
        """How long a node rests when so many loans in a row went unused."""
        return min(
            self.rest_s * 2.0 ** min(unused_loans, 16), max(self.longest_rest_s, self.rest_s)
        )

    def choose(
        self,
        idle: Sequence[LendableNode],
        wanted: Mapping[JobId, int],
        room: Mapping[ServiceName, int],
    ) -> list[tuple[NodeId, JobId]]:
        """Deal nodes out, the emptiest first, to the job that still wants most; `room` is how many
        more each service may lend.
        """
        left, limits = dict(wanted), dict(room)
        chosen: list[tuple[NodeId, JobId]] = []
        for node in sorted(idle, key=lambda one: (one.kv_share, one.busy_share, one.node)):
            if limits.get(node.service, 0) <= 0 or not self.may_lend(node):
                continue
            job = max(left, key=lambda name: (left[name], name), default=None)
            if job is None or left[job] <= 0:
                break
            chosen.append((node.node, job))
            left[job] -= 1
            limits[node.service] -= 1
        return chosen
