"""Which instances a job's turns may use, by its permit."""

from collections.abc import Callable, Mapping, Sequence

from slackwater.control.coschedule.managed_job import HeldPermit, ManagedJob
from slackwater.control.coschedule.permits import Permits
from slackwater.control.rollout.events import JobGated
from slackwater.model.ids import InstanceId, JobId, NodeId
from slackwater.model.placement import Phase, overlap

# The instances on nodes, those with most turns of the job first.
InstancesOn = Callable[[Sequence[NodeId], JobId], list[InstanceId]]


class PhaseGates:
    """Computes gates; changes nothing."""

    def __init__(
        self, jobs: Mapping[JobId, ManagedJob], permits: Permits, instances_on: InstancesOn
    ) -> None:
        self._jobs = jobs
        self._permits = permits
        self._instances_on = instances_on

    def turn_gate(self, job: ManagedJob, now_s: float) -> JobGated:
        """The gate that the job's permit gives its turns.

        Beside the tail of another rollout it excludes the tail's instances, unless those are all
        there are.
        """
        excluded: tuple[InstanceId, ...] = ()
        permit = job.permit
        if permit is not None and permit.phase is Phase.ROLLOUT and permit.tail_instances is None:
            tails = self._tail_instances_of_others(permit.nodes, job.id)
            if tails and set(self._instances_on(permit.nodes, job.id)) - tails:
                excluded = tuple(sorted(tails))
        return JobGated(now_s, job.id, job.turn_gate(excluded))

    def rollout_gates_on(self, nodes: Sequence[NodeId], now_s: float) -> list[JobGated]:
        """The gates of all rollouts on these nodes: when a tail ends, they get its instances."""
        return [
            self.turn_gate(job, now_s)
            for job in self._jobs.values()
            if job.permit is not None
            and job.permit.phase is Phase.ROLLOUT
            and any(overlap(node, place) for node in nodes for place in job.permit.nodes)
        ]

    def tail_instances(
        self, job: ManagedJob, permit: HeldPermit, share: float
    ) -> tuple[InstanceId, ...] | None:
        """The instances on which the last turns of a rollout finish: this share of those on its
        nodes, at least one; None if there is none.
        """
        instances = self._instances_on(permit.nodes, job.id)
        return tuple(instances[: max(int(len(instances) * share), 1)]) or None

    def _tail_instances_of_others(self, nodes: Sequence[NodeId], job: JobId) -> set[InstanceId]:
        found: set[InstanceId] = set()
        for shrunk in self._permits.tails_on(nodes):
            other = self._jobs.get(shrunk.job)
            if shrunk.job != job and other is not None and other.permit is not None:
                found.update(other.permit.tail_instances or ())
        return found
