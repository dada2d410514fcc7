"""Small builders for co-scheduler tests."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from slackwater.control.coschedule.commands import Command, GrantPermit, StartJob
from slackwater.control.coschedule.config import CoScheduleConfig
from slackwater.control.coschedule.events import (
    Event,
    JobArrived,
    PhaseFinished,
    PhaseRequested,
)
from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.model.placement import Phase
from slackwater.policy.placement.catalogue import make_policy
from slackwater.policy.placement.fleet import FleetView

Kind = TypeVar("Kind")


def fleet(rollout: int = 8, train: int = 8, *, owned: bool = False) -> FleetView:
    return FleetView(
        Pool(Role.ROLLOUT, H20, rollout, owned=owned), Pool(Role.TRAIN, H800, train, owned=owned)
    )


def job(
    name: str,
    rollout_s: float = 100,
    train_s: float = 100,
    *,
    slo: float = 2.0,
    iterations: int = 10,
    arrival_s: float = 0.0,
    nodes: int = 1,
) -> JobSpec:
    profile = JobProfile(rollout_s, train_s, rollout_nodes=nodes, train_nodes=nodes)
    return JobSpec(JobId(name), arrival_s, iterations, slo, profile)


class Stage:
    """A co-scheduler and the bookkeeping of a body that does as told; invariants are checked after
    every event.
    """

    def __init__(
        self,
        policy: str = "group",
        *,
        rollout: int = 8,
        train: int = 8,
        owned: bool = False,
        **config: Any,
    ) -> None:
        where = fleet(rollout, train, owned=owned)
        config.setdefault("ordering", "plan" if policy == "ours" else "round_robin")
        self.policy = make_policy(policy, where)
        self.scheduler = CoScheduler(self.policy, where, CoScheduleConfig(**config))
        self.permits: dict[str, GrantPermit] = {}
        self.starts: dict[str, StartJob] = {}

    def tell(self, event: Event) -> Sequence[Command]:
        """One event, and the timers that are due at once with it."""
        commands = list(self.step(event))
        for timer in of(SetTimer, commands):
            if timer.at_s <= event.now_s:
                commands += self.tell(TimerFired(event.now_s, timer.name))
        return commands

    def step(self, event: Event) -> Sequence[Command]:
        """One event alone."""
        commands = self.scheduler.handle(event)
        self.scheduler.check_integrity()
        for command in commands:
            if isinstance(command, GrantPermit):
                self.permits[command.job] = command
            elif isinstance(command, StartJob):
                self.starts[command.job] = command
        return commands

    def arrive(self, spec: JobSpec, now_s: float = 0.0) -> Sequence[Command]:
        return self.tell(JobArrived(now_s, spec))

    def request(
        self, name: str, now_s: float, phase: Phase = Phase.ROLLOUT, iteration: int = 0
    ) -> Sequence[Command]:
        epoch = self.starts[name].epoch
        return self.tell(PhaseRequested(now_s, JobId(name), epoch, phase, iteration))

    def finish(self, name: str, now_s: float, work_s: float = 100) -> Sequence[Command]:
        return self.tell(PhaseFinished(now_s, JobId(name), self.permits[name].permit, work_s))

    def iteration(self, name: str, now_s: float, number: int, work_s: float = 100) -> float:
        """One whole iteration of a job that is not made to wait; answers when it ended."""
        self.request(name, now_s, Phase.ROLLOUT, number)
        self.finish(name, now_s + work_s, work_s)
        self.request(name, now_s + work_s, Phase.TRAIN, number)
        self.finish(name, now_s + 2 * work_s, work_s)
        return now_s + 2 * work_s


def of(kind: type[Kind], commands: Iterable[Command]) -> list[Kind]:
    return [command for command in commands if isinstance(command, kind)]
