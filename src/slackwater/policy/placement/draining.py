"""Placement rules for an owned fleet: minimize the time at which all jobs are done (the makespan).

Packing saves no rent on a fleet that is paid for anyway. What counts is when the work is done, and
the job that ends last decides that. So no job may be slowed down beyond the estimated end of all
work. Jobs that might end last are placed first, then the shortest, which lowers the mean completion
time. While the job that would end last is waiting, no other job takes the nodes that it needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec

# Sharing needs a little more time than running alone, and a change of plan costs at most a cycle
# and a phase.
_PACE_SHARE = 0.01
_ITERATIONS_LOST = 2.0
# Train nodes are never busy all the time. Unless the longest job takes this many times the total
# work, the total work may decide the end, and no nodes are reserved for that job.
_CLEARLY_LONGER = 2.0
# Among short jobs a second of waiting counts as much as a tenth of a second of work.
_WORK_OVER_WAITING = 10.0


@dataclass(frozen=True, slots=True)
class DrainBound:
    """No job may take longer than `bound_s` from now. `critical_job` is the waiting job that would
    finish last of all, if one clearly does.
    """

    bound_s: float
    critical_job: JobId | None


def estimate_drain(
    placed: Sequence[tuple[int, JobProfile]], waiting: Sequence[JobSpec], train_nodes: int
) -> DrainBound:
    """Estimate the end of all work: the longest job alone, or all work on train nodes that are
    always busy, whichever takes longer, plus the overhead of sharing. `placed` holds the iterations
    left and the profile of each placed job.
    """
    jobs = [*placed, *((spec.iterations, spec.profile) for spec in waiting)]
    busy_s = sum(left * profile.train_s * profile.train_nodes for left, profile in jobs)
    longest_s = max((left * profile.solo_s for left, profile in jobs), default=0.0)
    slowest_s = max((profile.solo_s for _, profile in jobs), default=0.0)
    end_s = max(longest_s, busy_s / train_nodes)
    critical_job = next((spec.job for spec in waiting if solo_duration_s(spec) == longest_s), None)
    if longest_s < _CLEARLY_LONGER * busy_s / train_nodes:
        critical_job = None
    return DrainBound(end_s * (1 + _PACE_SHARE) + _ITERATIONS_LOST * slowest_s, critical_job)


def solo_duration_s(spec: JobSpec) -> float:
    """The worst-case duration of a job on its own nodes."""
    return spec.iterations * spec.profile.solo_s


def admission_order(waiting: Sequence[JobSpec], bound_s: float) -> list[JobId]:
    """First the jobs that need at least half of `bound_s` and so might end last, longest first;
    then the others, shortest first. Waiting time counts too, so that no job starves.
    """

    def rank(spec: JobSpec) -> tuple[bool, float]:
        if _CLEARLY_LONGER * solo_duration_s(spec) >= bound_s:
            return False, spec.arrival_s - solo_duration_s(spec)
        return True, spec.arrival_s + _WORK_OVER_WAITING * solo_duration_s(spec)

    return [spec.job for spec in sorted(waiting, key=rank)]
