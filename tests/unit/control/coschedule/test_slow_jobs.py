"""A job that is slow for a while keeps its place; one that is slow for good, beside others that
could not keep their bound, makes room.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_stage import Stage, job

from slackwater.control.coschedule.commands import Command, GrantPermit, HoldJob, StartJob, StopJob
from slackwater.control.coschedule.events import Event, JobFinished, PhaseFinished, PhaseRequested
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import JobId

DECLARED_S, ITERATIONS, SLO = 100.0, 40, 2.0
# As a live service has it.
REALISED: dict[str, Any] = {
    "slo_basis": "realised",
    "drift_tolerance": 0.25,
    "drift_headroom": 0.1,
}
LengthOf: TypeAlias = Callable[[str, int], float]


class SharedNodes:
    """Two jobs that declare the same, on one node of each kind, in virtual time; `length_of` is
    what their phases really take.
    """

    def __init__(self, policy: str, length_of: LengthOf) -> None:
        self.stage = Stage(policy, rollout=1, train=1, owned=True, **REALISED)
        self.length_of = length_of
        self.held: list[str] = []
        self.slowdown: dict[str, float] = {}
        self._due: list[tuple[float, int, int, Event]] = []  # when, in which order, of which epoch
        self._numbers = count()
        self._epoch: dict[str, int] = {}
        for name in ("honest", "other"):
            spec = job(name, DECLARED_S, DECLARED_S, slo=SLO, iterations=ITERATIONS)
            self._obey(self.stage.arrive(spec), 0.0)
        while self._due:
            now_s, _, epoch, event = heapq.heappop(self._due)
            concerned: str | None = getattr(event, "job", None)
            if concerned is None or self._epoch[concerned] == epoch:
                self._obey(self.stage.tell(event), now_s)
                if isinstance(event, PhaseFinished):
                    self._goes_on(event.job, now_s)

    def _later(self, event: Event, epoch: int = 0) -> None:
        heapq.heappush(self._due, (event.now_s, next(self._numbers), epoch, event))

    def _obey(self, commands: Sequence[Command], now_s: float) -> None:
        for command in commands:
            match command:
                case StartJob(name, epoch):
                    self._epoch[name] = epoch
                    self._goes_on(name, now_s)
                case StopJob(name):
                    self._epoch[name] = -1
                case HoldJob(name):
                    self.held.append(name)
                case GrantPermit(permit, name, epoch, _):
                    work_s = self.length_of(name, self.stage.scheduler.job(name).iterations_done)
                    self._later(PhaseFinished(now_s + work_s, name, permit, work_s), epoch)
                case SetTimer(timer, at_s):
                    self._later(TimerFired(at_s, timer))
                case _:
                    pass

    def _goes_on(self, name: JobId, now_s: float) -> None:
        state = self.stage.scheduler.job(name)
        if state.epoch != self._epoch[name]:
            return  # that phase was its last one here for now
        if state.iterations_left == 0:
            self.slowdown[name] = state.clock_time_s(now_s) / state.observed_s
            self._later(JobFinished(now_s, name, state.epoch), state.epoch)
        else:
            asked = (state.next_phase, state.iterations_done)
            self._later(PhaseRequested(now_s, name, state.epoch, *asked), state.epoch)


@pytest.mark.parametrize("policy", ["ours", "group"])
@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(1.0, 5.0), min_size=1, max_size=4), st.integers(0, 30))
def test_a_job_that_is_slow_for_a_while_is_not_held(
    policy: str, times: list[float], since: int
) -> None:
    def length_s(name: str, iteration: int) -> float:
        slow = name == "other" and since <= iteration < since + len(times)
        return DECLARED_S * (times[iteration - since] if slow else 1.0)

    shared = SharedNodes(policy, length_s)
    assert shared.held == []
    assert max(shared.slowdown.values()) <= SLO and len(shared.slowdown) == 2


@pytest.mark.parametrize("policy", ["ours", "group"])
@settings(max_examples=25, deadline=None)
@given(st.floats(3.0, 6.0))
def test_a_job_that_takes_three_times_what_it_declared_costs_the_other_nothing_of_its_bound(
    policy: str, times: float
) -> None:
    shared = SharedNodes(policy, lambda name, _: DECLARED_S * (times if name == "other" else 1.0))
    assert shared.held == ["other"] * len(shared.held) and shared.held
    assert len(shared.slowdown) == 2, "the one that made room ends too"
    assert shared.slowdown["honest"] <= SLO
