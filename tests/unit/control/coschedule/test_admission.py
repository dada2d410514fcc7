"""Those that wait are tried again in order, a few in each event, and nobody is passed over."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_stage import Stage, job, of

from slackwater.control.coschedule.admission import _RETRIES
from slackwater.control.coschedule.commands import Command, StartJob, StopJob
from slackwater.control.coschedule.events import Event, JobArrived, JobFinished
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import JobId
from slackwater.model.job import JobSpec
from slackwater.model.placement import Placement, Refusal
from slackwater.policy.placement.consolidation import MIN_MOVE_GAP_S

NARROW, WIDE = 30, 20


def continues(commands: Sequence[Command]) -> str | None:
    """The timer of the work that is left over, if there is any."""
    timers = [timer for timer in of(SetTimer, commands) if timer.at_s <= 1.0]
    return timers[-1].name if timers else None


@settings(max_examples=30, deadline=None)
@given(departures=st.lists(st.booleans(), max_size=NARROW))
def test_a_queue_is_tried_to_its_end_however_often_others_leave(departures: list[bool]) -> None:
    stage = Stage("solo", rollout=64, train=64)
    for number in range(NARROW):
        stage.arrive(job(f"narrow-{number}"))
    waiting = [f"wide-{number}" for number in range(WIDE)]
    for name in waiting:
        stage.arrive(job(name, nodes=64))
    tried: list[str] = []
    place = stage.scheduler._policy.place

    def record(spec: JobSpec, now_s: float) -> Placement | Refusal:
        tried.append(spec.job)
        return place(spec, now_s)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stage.scheduler._policy, "place", record)
        leavers, timer = iter(range(NARROW)), None
        for departs in [*departures, *[False] * (2 * WIDE)]:
            before = len(tried)
            if departs:
                name = f"narrow-{next(leavers)}"
                event = JobFinished(1.0, JobId(name), stage.starts[name].epoch)
                timer = continues(stage.step(event))
            elif timer is not None:
                timer = continues(stage.step(TimerFired(1.0, timer)))
            assert len(tried) - before <= _RETRIES
    assert timer is None
    assert tried == list(islice(cycle(waiting), len(tried)))
    if any(departures):
        assert tried and len(tried) % WIDE == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_job_starts_once_where_the_look_for_moves_leaves_it_and_stays_a_while(seed: int) -> None:
    stage, draw = Stage("ours", rollout=64, train=64), np.random.default_rng(seed)
    started: dict[JobId, list[float]] = {}
    now_s, timer = 0.0, next(iter(of(SetTimer, ())), None)
    for number in range(30):
        now_s += float(draw.exponential(600.0))
        rollout_s, train_s, slo = (
            float(draw.uniform(*r)) for r in ((30, 500), (30, 500), (1.1, 2))
        )
        spec = job(f"job-{number}", rollout_s, train_s, slo=slo, iterations=300)
        due: list[Event] = [JobArrived(now_s, spec)]
        if timer is not None and timer.at_s < now_s:
            due.insert(0, TimerFired(timer.at_s, timer.name))
        for event in due:
            commands = stage.tell(event)
            for start in of(StartJob, commands):
                started.setdefault(start.job, []).append(event.now_s)
            timer = next(reversed(of(SetTimer, commands)), None)
    assert len(started) == 30 and any(len(times) > 1 for times in started.values())
    for times in started.values():
        assert min(np.diff(times), default=MIN_MOVE_GAP_S) >= MIN_MOVE_GAP_S - 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_a_job_starts_once_in_the_instant_in_which_others_leave_and_those_that_wait_come(
    seed: int,
) -> None:
    stage, draw = Stage("ours", rollout=6, train=4), np.random.default_rng(seed)
    came, now_s = 0, 0.0
    for number in range(60):
        now_s += float(draw.exponential(1200.0))
        rollout_s, train_s, slo = (
            float(draw.uniform(*r)) for r in ((30, 500), (30, 300), (1.2, 2))
        )
        spec = job(f"job-{number}", rollout_s, train_s, slo=slo, iterations=300)
        events: list[Event] = [JobArrived(now_s, spec)]
        placed = sorted(stage.scheduler._places.placed)
        if len(placed) > 5:
            leaver = placed[int(draw.integers(len(placed)))]
            epoch = stage.scheduler.job(leaver).epoch
            events.append(JobFinished(now_s + 1.0, leaver, epoch))
        for event in events:
            began = [start.job for start in of(StartJob, stage.tell(event))]
            assert len(began) == len(set(began)), f"started twice at {event.now_s:.0f} s: {began}"
            came += isinstance(event, JobFinished) and len(began) > 1
    assert came, "no one that waited came while others moved"


def test_one_that_fits_behind_many_that_do_not_gets_the_room_of_one_that_left() -> None:
    stage = Stage("solo", rollout=8, train=8)
    for number in range(8):
        stage.arrive(job(f"narrow-{number}"))
    for number in range(3 * _RETRIES):
        stage.arrive(job(f"wide-{number}", nodes=8))
    stage.arrive(job("last"))
    commands = stage.step(JobFinished(1.0, JobId("narrow-0"), 1))
    # The departure looks for moves; three retries find no place, one does; a look for moves again.
    for _ in range(5):
        assert not of(StartJob, commands)
        timer = continues(commands)
        assert timer is not None
        commands = stage.step(TimerFired(1.0, timer))
    assert [start.job for start in of(StartJob, commands)] == ["last"]


def test_an_event_looks_for_moves_or_tries_those_that_wait_but_never_both() -> None:
    stage = Stage("ours", rollout=4, train=4)
    for number in range(40):
        stage.arrive(job(f"job-{number}", 60 + number % 7 * 20, 40 + number % 5 * 30, slo=1.6))
    policy, done = stage.scheduler._policy, {"looks": 0, "tries": 0}
    seen: list[dict[str, int]] = []
    rebalance, place = policy.rebalance, policy.place

    def look(*args: Any) -> Any:
        done["looks"] += 1
        return rebalance(*args)

    def record(*args: Any) -> Any:
        done["tries"] += 1
        return place(*args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(policy, "rebalance", look)
        patched.setattr(policy, "place", record)
        for name in list(stage.starts)[:4]:
            timer: str | None = ""
            while timer is not None:
                done.update(looks=0, tries=0)
                left = JobFinished(1.0, JobId(name), stage.starts[name].epoch)
                timer = continues(stage.step(TimerFired(1.0, timer) if timer else left))
                seen.append(dict(done))
    assert all(each["looks"] + (each["tries"] > 0) <= 1 for each in seen)
    assert any(each["looks"] for each in seen) and any(each["tries"] for each in seen)


# The second is laid out with the first, on nodes that the first would not take alone.
TOGETHER = (
    job("a", 310, 220, slo=1.7, iterations=575),
    job("b", 120, 330, slo=1.9, iterations=224),
)


def test_jobs_that_arrive_together_start_once_after_the_last() -> None:
    stage = Stage("ours")
    first, second = TOGETHER
    assert not of(StartJob, stage.step(JobArrived(0.0, first, others_follow=True)))
    commands = stage.tell(JobArrived(0.0, second))
    assert not of(StopJob, commands)
    assert sorted(start.job for start in of(StartJob, commands)) == ["a", "b"]


def test_a_job_whose_followers_do_not_come_starts_by_a_timer_of_its_instant() -> None:
    stage = Stage("ours")
    first, second = TOGETHER
    commands = stage.tell(JobArrived(0.0, first, others_follow=True))
    assert [start.job for start in of(StartJob, commands)] == ["a"]
    commands = stage.tell(JobArrived(0.0, second))
    assert [stop.job for stop in of(StopJob, commands)] == ["a"]  # what the others avoid


def test_jobs_that_arrived_start_when_the_last_of_them_is_refused() -> None:
    stage = Stage("ours", rollout=1, train=1)
    stage.step(JobArrived(0.0, TOGETHER[0], others_follow=True))
    commands = stage.tell(JobArrived(0.0, job("wide", nodes=4)))
    assert [start.job for start in of(StartJob, commands)] == ["a"]


def test_a_phase_that_another_job_asks_for_meanwhile_starts_none_of_them() -> None:
    stage = Stage("ours")
    stage.arrive(job("loaded"))
    assert not of(StartJob, stage.step(JobArrived(60.0, TOGETHER[0], others_follow=True)))
    assert not of(StartJob, stage.request("loaded", 60.0))
    commands = stage.tell(JobArrived(60.0, TOGETHER[1]))
    assert {start.job for start in of(StartJob, commands)} >= {"a", "b"}
