"""Splits the devices within a step: local engines give way to the trainer once the trajectories
that are left fit the other instances. Pure.
"""

from dataclasses import dataclass

from slackwater.policy.rollout.seeding import SeedingState, SeedingView, StepTimes
from slackwater.policy.rollout.tail import assign_tail


@dataclass(frozen=True, slots=True)
class TailSplit:
    """Give way when the trainer waits for devices, no trajectory waits to start, and those that
    run fit elsewhere as their contexts grow; take the devices again from a trainer that idles when
    that no longer holds.
    """

    def start(self) -> SeedingState:
        return SeedingState(window_s=0.0)

    def window_s(self, state: SeedingState, remote: int) -> float:
        return state.window_s

    def ends(self, state: SeedingState, view: SeedingView) -> str | None:
        if view.turns_left == 0:
            return "all turns are done"
        if not view.trainer_waits:
            return None
        tail = view.tail()
        if tail.starts or assign_tail(tail) is None:
            return None
        return f"the {len(tail.moving)} trajectories on local engines fit the other instances"

    def resumes(self, state: SeedingState, view: SeedingView) -> str | None:
        if view.turns_left == 0:
            return None
        tail = view.tail()
        if tail.starts:
            return f"{tail.starts} trajectories wait to start"
        if assign_tail(tail) is None:
            return f"{len(tail.moving)} trajectories have no room on the other instances"
        return None

    def after_step(self, state: SeedingState, times: StepTimes) -> SeedingState:
        return state

    def most_remote(self, state: SeedingState, view: SeedingView) -> int | None:
        return state.most_remote
