"""Which serving nodes lend, and to which job: those with the lowest recent KV use (ROSE 4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slackwater.model.errors import ConfigError
from slackwater.model.ids import JobId, NodeId, ServiceName


@dataclass(frozen=True, slots=True)
class LendableNode:
    """A node that is not lent, and the shares of its KV memory and time that were used recently."""

    node: NodeId
    service: ServiceName
    kv_share: float
    busy_share: float


@dataclass(frozen=True, slots=True)
class LenderRule:
    """When a node is lent and taken back.

    A node can be lent while its service uses at most `most_kv` of its memory and `most_busy` of its
    time. It is taken back at once above `back_kv`, when its mean use of time exceeds `back_busy`,
    or when the borrower used less than `least_use` of it for `trial_s`. Then it is not lent for
    `rest_s`; that doubles after each further unused loan, up to `longest_rest_s`.
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
        """How long a node is not lent after so many unused loans in a row."""
        return min(
            self.rest_s * 2.0 ** min(unused_loans, 16), max(self.longest_rest_s, self.rest_s)
        )

    def choose(
        self,
        idle: Sequence[LendableNode],
        wanted: Mapping[JobId, int],
        limits: Mapping[ServiceName, int],
    ) -> list[tuple[NodeId, JobId]]:
        """Assign nodes, the least used first, each to the job that still wants most. `limits` is
        how many more nodes each service may lend.
        """
        left, lendable = dict(wanted), dict(limits)
        chosen: list[tuple[NodeId, JobId]] = []
        for node in sorted(idle, key=lambda one: (one.kv_share, one.busy_share, one.node)):
            if lendable.get(node.service, 0) <= 0 or not self.may_lend(node):
                continue
            job = max(left, key=lambda name: (left[name], name), default=None)
            if job is None or left[job] <= 0:
                break
            chosen.append((node.node, job))
            left[job] -= 1
            lendable[node.service] -= 1
        return chosen
