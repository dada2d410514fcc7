"""Where the time of a shared run went: phases, waits for another job's phase, and the hand-over.

The hand-over is the rest: the driver's own work between two phases, requests and answers, and
publishing and pulling weights.
"""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

_SKIPPED_S = 1e-3  # a phase that the job had nothing to do in


@dataclass(frozen=True, slots=True)
class Stretch:
    """One permit's time; `granted_ms` passed between the event that made it possible and its grant,
    of which the service computed `granted_own_ms`.
    """

    job: str
    phase: str
    start_s: float
    end_s: float
    granted_ms: float = 0.0
    granted_own_ms: float = 0.0

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def inside(self, start_s: float, end_s: float) -> float:
        """Its overlap with an interval, in seconds."""
        return max(min(self.end_s, end_s) - max(self.start_s, start_s), 0.0)


def stretches(trace: bytes) -> list[Stretch]:
    """The permits in a trace of the service."""
    found = []
    for event in json.loads(trace)["traceEvents"]:
        if event.get("ph") == "X" and event["cat"].endswith(",run"):
            phase = event["cat"].partition(",")[0]
            start_s, args = event["ts"] / 1e6, event["args"]
            took_ms = (args["granted_ms"], args["granted_own_ms"])
            found.append(
                Stretch(args["job"], phase, start_s, start_s + event["dur"] / 1e6, *took_ms)
            )
    return sorted(found, key=lambda permit: permit.start_s)


def without_warm_up(permits: Sequence[Stretch]) -> list[Stretch]:
    """Drop what a job trains before its first rollout, which is no iteration."""
    first_s: dict[str, float] = {}
    for permit in permits:
        if permit.phase == "rollout" and permit.length_s > _SKIPPED_S:
            first_s.setdefault(permit.job, permit.start_s)
    return [permit for permit in permits if permit.start_s >= first_s.get(permit.job, math.inf)]


@dataclass(frozen=True, slots=True)
class JobTimes:
    """Means over a job's iterations: both phases, the hand-over after each, and the wait for
    another's phase before each.
    """

    rollout_s: float
    train_s: float
    handover_s: float
    sync_s: float
    rollout_wait_s: float
    train_wait_s: float

    def figures(self) -> dict[str, float]:
        return {name: round(getattr(self, name), 4) for name in self.__slots__}

    def shares(self) -> dict[str, float]:
        """What part of an iteration each takes."""
        parts = {
            "rollout": self.rollout_s,
            "train": self.train_s,
            "waits": self.rollout_wait_s + self.train_wait_s,
            "hand_over": self.handover_s + self.sync_s,
        }
        whole_s = max(sum(parts.values()), 1e-9)
        return {name: round(part_s / whole_s, 4) for name, part_s in parts.items()}


@dataclass(frozen=True, slots=True)
class Account:
    """One run from `start_s` to `end_s`, the time in which all its jobs made steps."""

    start_s: float
    end_s: float
    jobs: Mapping[str, JobTimes]
    utilisation: Mapping[str, float]


def account(permits: Sequence[Stretch], jobs: Sequence[str], first_steps: int) -> Account | None:
    """Account for these jobs, from when each had made its first steps until one had made its last;
    None if there is no such time.
    """
    ours = [permit for permit in permits if permit.job in jobs]
    ends = {
        job: [permit.end_s for permit in ours if permit.job == job and permit.phase == "train"]
        for job in jobs
    }
    if min(map(len, ends.values())) <= first_steps:
        return None
    start_s = max(found[first_steps - 1] for found in ends.values())
    end_s = min(found[-1] for found in ends.values())
    if end_s <= start_s:
        return None
    used = {
        phase: sum(permit.inside(start_s, end_s) for permit in ours if permit.phase == phase)
        / (end_s - start_s)
        for phase in ("rollout", "train")
    }
    times = {job: _times(ours, job, start_s, end_s) for job in jobs}
    return Account(start_s, end_s, times, used)


def _times(permits: Sequence[Stretch], job: str, start_s: float, end_s: float) -> JobTimes:
    mine = [permit for permit in permits if permit.job == job and start_s <= permit.end_s <= end_s]
    lengths: dict[str, list[float]] = defaultdict(list)
    for permit in mine:
        lengths[permit.phase].append(permit.length_s)
    for before, after in itertools.pairwise(mine):
        wait_s = sum(
            permit.inside(before.end_s, after.start_s)
            for permit in permits
            if permit.job != job and permit.phase == after.phase
        )
        lengths[f"{after.phase} wait"].append(wait_s)
        lengths[f"to {after.phase}"].append(after.start_s - before.end_s - wait_s)

    def mean_of(name: str) -> float:
        return mean(lengths[name]) if lengths[name] else 0.0

    return JobTimes(
        mean_of("rollout"),
        mean_of("train"),
        mean_of("to train"),
        mean_of("to rollout"),
        mean_of("rollout wait"),
        mean_of("train wait"),
    )
