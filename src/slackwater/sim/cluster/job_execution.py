"""The execution of a simulated job: its running phase, and the real lengths of its phases."""

from dataclasses import dataclass

from slackwater.model.ids import NodeId
from slackwater.model.job import JobSpec
from slackwater.model.placement import Phase
from slackwater.model.switching import SwitchCosts
from slackwater.policy.placement.fleet import FleetView
from slackwater.sim.cluster.ledger import SimulatedAccount
from slackwater.sim.cluster.lengths import PhaseShares


@dataclass(slots=True)
class PhaseRun:
    """A phase under way. `left_s` of its time at full speed was left at `at_s`; beside another's
    tail it is slower.
    """

    permit: int
    execution: "JobExecution"
    phase: Phase
    nodes: tuple[NodeId, ...]
    began_s: float
    switch_s: float
    work_s: float  # on the nodes of the profile
    left_s: float
    tail_left_s: float | None  # time at full speed until the tail is reached
    at_s: float
    speed: float = 1.0
    version: int = 0
    shrunk_s: float | None = None
    beside_s: float = 0.0  # node time that others' tails had meanwhile

    def advance(self, now_s: float) -> None:
        """Account for the time since the last change of speed."""
        done_s = (now_s - self.at_s) * self.speed
        self.beside_s += now_s - self.at_s - done_s
        self.left_s = max(self.left_s - done_s, 0.0)
        if self.tail_left_s is not None:
            self.tail_left_s = max(self.tail_left_s - done_s, 0.0)
        self.at_s = now_s


class JobExecution:
    """One job's processes, as far as time goes.

    `work_s` holds, per phase and iteration, what the work takes on the nodes of the profile: a
    declared length holds a warm switch.
    """

    __slots__ = (
        "_fleet",
        "account",
        "epoch",
        "iteration",
        "local",
        "run",
        "spec",
        "sync_s",
        "tails",
        "train_nodes",
        "warm_s",
        "work_s",
    )

    def __init__(
        self, spec: JobSpec, shares: PhaseShares, fleet: FleetView, costs: SwitchCosts
    ) -> None:
        self.spec = spec
        self.account = SimulatedAccount(spec)
        self.epoch = 0
        self.iteration = 0
        self.run: PhaseRun | None = None
        self.tails = shares.tail
        self.warm_s = costs.warm_s(spec.profile.model_billions)
        self.work_s = {
            Phase.ROLLOUT: self._work_s(spec.profile.rollout_s, shares.rollout),
            Phase.TRAIN: self._work_s(spec.profile.train_s, shares.train),
        }
        self._fleet = fleet
        self.settle(local=False, train_nodes=spec.profile.train_nodes)

    def _work_s(self, declared_s: float, shares: list[float]) -> list[float]:
        most_s = max(declared_s - self.warm_s, 0.0)
        return [most_s * share for share in shares]

    def settle(self, *, local: bool, train_nodes: int) -> None:
        """Where it runs from now on; `local`: rollouts on its train nodes, with nothing to sync
        over the link.
        """
        self.local = local
        self.train_nodes = train_nodes
        self.sync_s = 0.0 if local else self.spec.profile.sync_s

    def scale(self, phase: Phase) -> float:
        """Time on the nodes it has over time on the nodes of its profile."""
        profile = self.spec.profile
        if phase is Phase.TRAIN:
            return profile.train_nodes / self.train_nodes
        if self.local:
            return self._fleet.local_scale(profile, self.train_nodes)
        return 1.0

    def solo_s(self) -> float:
        """What the iteration that just ended would have taken on the job's own nodes."""
        number = self.iteration
        work_s = self.work_s
        alone_s = work_s[Phase.ROLLOUT][number] + work_s[Phase.TRAIN][number]
        return alone_s + self.spec.profile.sync_s
