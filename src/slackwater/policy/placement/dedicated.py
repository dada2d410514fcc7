"""Baselines that never share nodes: a job has its own rollout and train nodes, or runs all phases
on its own train nodes.
"""

from slackwater.model.job import JobProfile, JobSpec
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.grouped import GroupedPlacement
from slackwater.policy.placement.groups import GroupChoice, choose_colocated, choose_isolated


class SoloDisaggregated(GroupedPlacement):
    """The standard disaggregated job: dedicated rollout and train nodes (WEAVE 6.1, Solo-D)."""

    name = "solo"

    def _choose(self, job: JobSpec, now_s: float) -> GroupChoice | None:
        del now_s
        return choose_isolated(self.registry, job.profile, "every job has nodes of its own")


class CoLocated(GroupedPlacement):
    """All phases run on the job's own train nodes, one after the other, without a weight sync
    (WEAVE 6.1, veRL). With `keep_slos` a job that would miss its SLO this way gets rollout nodes
    too.
    """

    name = "colocated"

    def __init__(self, fleet: FleetView, *, keep_slos: bool = False) -> None:
        super().__init__(fleet)
        self._keep_slos = keep_slos

    def _explain_infeasible(self, profile: JobProfile) -> str | None:
        return self.fleet.explain_infeasible_local(profile)

    def _choose(self, job: JobSpec, now_s: float) -> GroupChoice | None:
        del now_s
        profile, nodes = job.profile, job.profile.train_nodes
        local_s = self.fleet.local_rollout_s(profile, nodes) + profile.train_s
        if self._keep_slos and local_s > job.slo * profile.solo_s:
            return choose_isolated(self.registry, profile, "its bound leaves no time to co-locate")
        return choose_colocated(self.registry, nodes, "all phases on its own train nodes")
