"""Baseline: jobs share nodes by fractions of time, without interleaving their phases."""

from slackwater.model.ids import JobId
from slackwater.model.job import JobSpec
from slackwater.model.placement import Strategy
from slackwater.policy.columns import ROLL_S, TRAIN_S
from slackwater.policy.placement.grouped import GroupedPlacement
from slackwater.policy.placement.groups import GroupChoice, bits, choose_colocated, choose_isolated


class JobFractions(GroupedPlacement):
    """Job-level sharing as in Gavel, adapted to RL jobs (WEAVE 6.1, Gavel+).

    Each job uses the kind of nodes on which its iterations cost least within its bound: rollout and
    train nodes, or train nodes only. Jobs take turns on nodes as a whole. A job that tolerates the
    slowdown s needs the fraction 1 / s of the time, more if the nodes themselves are slower. Nodes
    can be shared while the fractions sum to at most 1.
    """

    name = "gavel"

    def _choose(self, job: JobSpec, now_s: float) -> GroupChoice | None:
        del now_s
        profile, fleet = job.profile, self.fleet
        nodes = profile.train_nodes
        local_s = fleet.local_rollout_s(profile, nodes) + profile.train_s
        local = (
            local_s <= job.slo * profile.solo_s
            and fleet.explain_infeasible_local(profile) is None
            and fleet.price_per_h(0, nodes) * local_s
            < fleet.price_per_h(profile.rollout_nodes, nodes) * profile.solo_s
        )
        iteration_s = local_s if local else profile.solo_s
        fraction = iteration_s / (job.slo * profile.solo_s)
        shared = self._choose_shared(job, fraction, local)
        if shared is not None:
            return shared
        reason = "the cheapest nodes for it, whole"
        if local:
            return choose_colocated(self.registry, nodes, reason)
        return choose_isolated(self.registry, profile, reason)

    def _choose_shared(self, job: JobSpec, fraction: float, local: bool) -> GroupChoice | None:
        profile, table = job.profile, self.registry.table
        for row, group in sorted(self.registry.groups.items()):
            same_shape = (
                len(group.train) == profile.train_nodes
                and len(group.rollout) == (0 if local else profile.rollout_nodes)
                and len(group.jobs) < self.max_group_size
            )
            extra_gb = profile.train_state_gb + (profile.rollout_state_gb if local else 0)
            memory = table.train_gb[row] + extra_gb <= self.fleet.train.node_type.host_memory_gb
            mask = int(table.node_mask[row])
            rollout_gb = max((table.node_gb[row, node] for node in bits(mask)), default=0.0)
            if not local:
                rollout_gb += profile.rollout_state_gb
            memory = memory and rollout_gb <= self.fleet.rollout.node_type.host_memory_gb
            taken = sum(self._fraction(member_job) for member_job in group.jobs)
            if same_shape and memory and taken + fraction <= 1 + 1e-9:
                strategy = Strategy.COLOCATE if local else Strategy.PACK
                return GroupChoice(row, mask, 0, 0, strategy, f"a fraction of {fraction:.2f}")
        return None

    def _fraction(self, job: JobId) -> float:
        member = self.registry.members[job]
        work = self.registry.table.work[member.row, :, member.index]
        profile = member.spec.profile
        return float(work[ROLL_S] + work[TRAIN_S]) / (member.spec.slo * profile.solo_s)
