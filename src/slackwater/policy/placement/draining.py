"""When a fleet that is paid for anyway can be done with its jobs, and what that leaves to each of
them.

On such a fleet nothing is saved by packing; what counts is when the work is done, and the job that
ends last decides that. So no job may be slowed beyond the moment at which all could be done; those
that might end last are placed first, then the shortest, for the mean; and while the one that would
end last of all waits, nobody takes the room that it needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec

# Sharing at the pace of running alone needs a little room, and a change of plan costs a cycle and a
# phase at worst.
_PACE_SHARE = 0.01
_ITERATIONS_LOST = 2.0
# Train nodes are never busy all the time; up to here the amount of work may decide after all, and
# no room is kept.
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
    """For placed jobs (iterations left, profile) and those that wait: what the longest takes alone,
    or all together on ever busy train nodes, and what it costs to share.
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
    """How long a job takes on nodes of its own, at worst."""
    return spec.iterations * spec.profile.solo_s


def admission_order(waiting: Sequence[JobSpec], bound_s: float) -> list[JobId]:
    """First those that need at least half of `bound_s`, and so might end last, the longest before
    the others; then the shortest. Waiting counts too: nobody is passed over for ever.
    """

    def rank(spec: JobSpec) -> tuple[bool, float]:
        if _CLEARLY_LONGER * solo_duration_s(spec) >= bound_s:
            return False, spec.arrival_s - solo_duration_s(spec)
        return True, spec.arrival_s + _WORK_OVER_WAITING * solo_duration_s(spec)

    return [spec.job for spec in sorted(waiting, key=rank)]
