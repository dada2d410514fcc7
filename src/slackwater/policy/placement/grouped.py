"""The base class of all placement policies that keep co-execution groups."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from slackwater.model.errors import ConfigError
from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.placement import Placement, Refusal
from slackwater.policy.columns import MAX_MEMBERS
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.groups import GroupChoice, GroupRegistry, choose_isolated
from slackwater.policy.placement.interface import JobProgress


class GroupedPlacement(ABC):
    """Refusals, bookkeeping and departures. A policy adds `_choose`, which picks a job's place. The
    public methods are those of `PlacementPolicy`.
    """

    name = "grouped"

    def __init__(self, fleet: FleetView, max_group_size: int = MAX_MEMBERS) -> None:
        if not 1 <= max_group_size <= MAX_MEMBERS:
            raise ConfigError.of(
                "max_group_size", max_group_size, f"must lie between 1 and {MAX_MEMBERS}"
            )
        self.fleet = fleet
        self.max_group_size = max_group_size
        self.registry = GroupRegistry(fleet)

    @abstractmethod
    def _choose(self, job: JobSpec, now_s: float) -> GroupChoice | None:
        """Choose the nodes of an arriving job; None if the pools have no free nodes for it now."""

    def _explain_infeasible(self, profile: JobProfile) -> str | None:
        """Why a job can never be placed, or None if it can."""
        return self.fleet.explain_infeasible(profile)

    def place(self, job: JobSpec, now_s: float) -> Placement | Refusal:
        if job.job in self.registry.members:
            raise ConfigError.of("job", job.job, "is placed already; use another name")
        never = self._explain_infeasible(job.profile)
        if never is not None:
            return Refusal(job.job, never, final=True)
        choice = self._choose(job, now_s)
        if choice is None:
            return Refusal(job.job, self._explain_refusal(job), final=False)
        self.registry.admit(job, choice, self._budget_s(job))
        return self.registry.placement(job.job)

    def _explain_refusal(self, job: JobSpec) -> str:
        profile, rollout, train = job.profile, self.fleet.rollout, self.fleet.train
        used = [f"{p.max_nodes - self.registry.ledger.free(p.role)} of {p.max_nodes} {p.role}"
                for p in (rollout, train)]  # fmt: skip
        return (
            "no group can take it within every member's bound, and its own "
            f"{profile.rollout_nodes} rollout + {profile.train_nodes} train nodes are not free "
            f"(in use: {', '.join(used)})"
        )

    def observe(self, progress: Sequence[JobProgress], waiting: Sequence[JobSpec] = ()) -> None:
        """Record the progress of placed jobs. Most policies ignore the waiting jobs."""
        del waiting
        self.registry.observe(progress)

    def admission_order(self, waiting: Sequence[JobSpec]) -> Sequence[JobId]:
        """Try jobs in order of arrival."""
        return [spec.job for spec in waiting]

    def _budget_s(self, job: JobSpec) -> float:
        """The longest that an arriving job may take."""
        return job.slo * job.iterations * job.profile.solo_s

    def remove(self, job: JobId) -> None:
        self.registry.remove(job)

    def revise(self, job: JobId, profile: JobProfile, now_s: float) -> Sequence[Placement]:
        """Take over a changed profile. Most policies do not move the job."""
        del now_s
        self.registry.revise(job, profile)
        return ()

    def isolate(self, job: JobId, now_s: float) -> Sequence[Placement]:
        del now_s
        member = self.registry.members[job]
        if len(self.registry.groups[member.row].jobs) == 1 and member.pins:
            return ()
        choice = choose_isolated(
            self.registry, member.spec.profile, "its bound leaves no time for others"
        )
        if choice is None:
            return ()
        self.registry.move(job, choice)
        return (self.registry.placement(job),)

    def rebalance(self, now_s: float, profile: JobProfile | None = None) -> Sequence[Placement]:
        """Most policies never move a job."""
        del now_s, profile
        return ()

    def next_rebalance_s(self, profile: JobProfile, now_s: float) -> float | None:
        del profile, now_s
        return None

    def list_rented(self) -> Sequence[NodeId]:
        return self.registry.ledger.list_rented()

    def take_rent_changes(self) -> tuple[Collection[NodeId], Collection[NodeId]]:
        return self.registry.ledger.take_changes()

    def hourly_cost(self) -> float:
        return self.registry.ledger.hourly_cost()

    def check_integrity(self) -> None:
        self.registry.check_integrity()
