"""The gates of jobs that take part: where a job's turns and operations may run, by the permits that
are out.

A job without a permit has both gates closed. Beside the tail of another rollout a job has the
instances that the tail left, where there are any.
"""

from collections.abc import Callable, Mapping, Sequence

from slackwater.control.coschedule.job_phases import Hold, JobPhases
from slackwater.control.coschedule.permits import Permits
from slackwater.control.operations.events import OpsGated
from slackwater.control.rollout.events import JobGated
from slackwater.model.ids import InstanceId, JobId, NodeId
from slackwater.model.placement import Phase, overlap

EnginesOn = Callable[[Sequence[NodeId], JobId], list[InstanceId]]


class PhaseGates:
    """Looks at `jobs` and changes nothing. `engines_on` names the instances of nodes, those with
    most of a job's turns first.
    """

    def __init__(
        self, jobs: Mapping[JobId, JobPhases], permits: Permits, engines_on: EnginesOn
    ) -> None:
        self._jobs = jobs
        self._permits = permits
        self._engines_on = engines_on

    def of_turns(self, one: JobPhases, now_s: float) -> JobGated:
        """As its permit says; beside a tail of another rollout, on the other instances where there
        are any.
        """
        but: tuple[InstanceId, ...] = ()
        hold = one.hold
        if hold is not None and hold.phase is Phase.ROLLOUT and hold.kept is None:
            kept = {name for other in self._tails(hold.nodes, one.job) for name in other}
            if kept and set(self._engines_on(hold.nodes, one.job)) - kept:
                but = tuple(sorted(kept))
        return JobGated(now_s, one.job, one.gate(but))

    def of_both(self, one: JobPhases, now_s: float) -> tuple[JobGated, OpsGated]:
        """Of a job without a permit: closed."""
        return self.of_turns(one, now_s), OpsGated(now_s, one.job, ())

    def after(self, one: JobPhases, hold: Hold, now_s: float) -> JobGated | OpsGated:
        """The gate that a permit had opened closes with it."""
        return (
            self.of_turns(one, now_s)
            if hold.phase is Phase.ROLLOUT
            else OpsGated(now_s, one.job, ())
        )

    def beside(self, nodes: Sequence[NodeId], now_s: float) -> list[JobGated]:
        """A tail is over: whoever rolled out beside it has its instances too."""
        return [
            self.of_turns(other, now_s)
            for other in self._jobs.values()
            if other.hold is not None
            and other.hold.phase is Phase.ROLLOUT
            and any(overlap(node, place) for node in nodes for place in other.hold.nodes)
        ]

    def kept_for_tail(self, job: JobId, hold: Hold, share: float) -> tuple[InstanceId, ...] | None:
        """The instances on which a rollout's last turns end: that share of its own, and at least
        one.
        """
        engines = self._engines_on(hold.nodes, job)
        return tuple(engines[: max(int(len(engines) * share), 1)]) or None

    def _tails(self, nodes: Sequence[NodeId], but: JobId) -> list[tuple[InstanceId, ...]]:
        found = []
        for permit in self._permits.tails_on(nodes):
            other = self._jobs.get(permit.job)
            if permit.job != but and other is not None and other.hold is not None:
                found.append(other.hold.kept or ())
        return found
