"""Figures of `slackwater demo`, all on the clock of the watching process."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Rows: TypeAlias = Sequence[dict[str, Any]]
LOOK_S = 0.2
_OVER = ("finished", "failed", "stopped", "refused")
_USES = (("rollout", "engine_s"), ("train", "trainer_s"))


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds and device seconds per iteration between two completed iterations."""

    until_s: float
    seconds: float
    used: Mapping[str, float]


@dataclass(slots=True)
class WatchedJob:
    """When each iteration was first seen complete, usage then, and the job's last row."""

    name: str
    marks: dict[int, tuple[float, dict[str, Any]]] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    slowdown: float | None = None

    def look(self, row: dict[str, Any], now_s: float) -> None:
        self.last = row
        self.marks.setdefault(row.get("iteration") or 0, (now_s, row))

    @property
    def began_s(self) -> float:
        """When its first iteration was done: before that it starts."""
        return min(at_s for number, (at_s, _) in self.marks.items() if number >= 1)

    @property
    def ended_s(self) -> float:
        return max(at_s for at_s, _ in self.marks.values())

    @property
    def over(self) -> bool:
        return self.last.get("stage") in _OVER

    def intervals(self) -> list[Interval]:
        """Intervals between completed iterations, or from the start if only one completed."""
        numbers = sorted(number for number in self.marks if number >= 1)
        if len(numbers) < 2:
            numbers = sorted(self.marks)
        found = []
        for first, last in itertools.pairwise(numbers):
            (began_s, before), (ended_s, after) = self.marks[first], self.marks[last]
            found.append(
                Interval(
                    until_s=ended_s,
                    seconds=max(ended_s - began_s, LOOK_S) / (last - first),
                    used={what: (after[what] - before[what]) / (last - first) for _, what in _USES},
                )
            )
        return found

    def used_s(self, what: str, since_s: float, until_s: float) -> float:
        """Usage between two moments, by the marks inside."""
        inside = [row[what] for at_s, row in self.marks.values() if since_s <= at_s <= until_s]
        return float(inside[-1] - inside[0]) if len(inside) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class TypicalIteration:
    """Medians over a job's iterations, which exclude stalls (compilation, checkpoints)."""

    seconds: float
    used: Mapping[str, float]

    @classmethod
    def of(cls, job: WatchedJob, until_s: float | None = None) -> "TypicalIteration":
        """Of those that ended by `until_s`; of all, if none did."""
        found = job.intervals()
        found = [one for one in found if until_s is None or one.until_s <= until_s] or found
        return cls(
            statistics.median(one.seconds for one in found),
            {what: statistics.median(one.used[what] for one in found) for _, what in _USES},
        )


def sharing_figures(
    jobs: Sequence[WatchedJob], alone: Mapping[str, TypicalIteration], iterations: Mapping[str, int]
) -> dict[str, Any]:
    """Per job the iteration times alone and shared; total times; pool utilization."""
    both_s = min(job.ended_s for job in jobs)  # until the first was done
    per_job = {
        job.name: {
            "alone_s": alone[job.name].seconds,
            "shared_s": TypicalIteration.of(job, both_s).seconds,
            "slowdown": job.slowdown,
        }
        for job in jobs
    }
    return {
        "per_job": per_job,
        "took_s": max(job.ended_s for job in jobs) - min(job.began_s for job in jobs),
        "alone_s": sum((iterations[job.name] - 1) * alone[job.name].seconds for job in jobs),
        "pools": _pool_use(jobs, alone),
    }


def _pool_use(
    jobs: Sequence[WatchedJob], alone: Mapping[str, TypicalIteration]
) -> dict[str, dict[str, float]]:
    """Utilization of each pool while all jobs ran, and in an iteration of one job alone."""
    window = (max(job.began_s for job in jobs), min(job.ended_s for job in jobs))
    both_s = max(window[1] - window[0], 1e-9)
    each = [alone[job.name] for job in jobs]
    return {
        pool: {
            "used_together": sum(job.used_s(what, *window) for job in jobs) / both_s,
            "used_alone": sum(one.used[what] for one in each) / sum(one.seconds for one in each),
        }
        for pool, what in _USES
    }
