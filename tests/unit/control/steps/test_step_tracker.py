"""Who has the trainers' devices: steps begin, seed, train and end, and nobody shares."""

import random
from dataclasses import replace
from typing import Any

import pytest

from slackwater.control.jobs.events import JobEnded
from slackwater.control.operations.events import TrainerLost
from slackwater.control.rollout.events import (
    InstanceLost,
    StepBegan,
    StepDropped,
    StepEnded,
    TrainerWaits,
    TrainerWanted,
)
from slackwater.control.rollout.facts import InstanceReleased, TurnClosed, TurnOpened
from slackwater.control.steps import commands as do
from slackwater.control.steps import events as on
from slackwater.control.steps.tracker import REST, STEP, StepTracker
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import InstanceId, JobId, WorkerId
from slackwater.model.instance import InstanceKind, InstanceSpec

JOB, OTHER, BASE = JobId("run"), JobId("other"), "tiny"
TRAINER = WorkerId("trainer")


def engine(name: str, base_model: str = BASE) -> InstanceSpec:
    local = InstanceKind.LOCAL
    return InstanceSpec(InstanceId(name), local, 4, 1000, 4000, base_model=base_model)


class Stage:
    def __init__(self) -> None:
        self.tracker = StepTracker()
        self.now_s = 0.0

    def tell(self, kind: type, *fields: Any, **named: Any) -> list[do.StepCommand]:
        commands = list(self.tracker.handle(kind(self.now_s, *fields, **named)))
        self.tracker.check_integrity()
        return commands

    def kinds(self, kind: type, *fields: Any, **named: Any) -> list[str]:
        return [type(command).__name__ for command in self.tell(kind, *fields, **named)]


def test_without_local_engines_trainers_get_the_devices_at_once_and_no_step_is_told_of() -> None:
    stage = Stage()
    assert stage.tell(TurnOpened, JOB, BASE) == []
    stage.tell(on.DevicesWanted, TRAINER)
    assert stage.tell(on.DevicesAsked, TRAINER, JOB) == [on.DevicesGranted(0.0, TRAINER, JOB)]
    assert stage.tell(on.DevicesReturned, TRAINER, 1.0, True) == []


def test_a_step_begins_with_the_first_turn_and_its_local_engines_are_started() -> None:
    stage = Stage()
    stage.tell(on.LocalEngineUp, engine("a"))
    stage.tell(on.StepExpected, JOB, 8)
    commands = stage.tell(TurnOpened, JOB, BASE)
    assert commands == [StepBegan(0.0, JOB, 1, 8), do.StartEngine(engine("a"), False)]


def test_a_trainer_waits_for_seeding_to_end_and_says_that_it_does() -> None:
    stage = Stage()
    stage.tell(on.LocalEngineUp, engine("a"))
    stage.tell(TurnOpened, JOB, BASE)
    stage.tell(on.DevicesWanted, TRAINER)
    assert stage.tell(on.DevicesAsked, TRAINER, JOB) == [TrainerWanted(0.0, JOB)]
    stage.tell(InstanceReleased, InstanceId("a"))
    commands = stage.tell(on.SeedingChanged, JOB, False)
    assert on.DevicesGranted(0.0, TRAINER, JOB) in commands


def test_a_step_ends_with_an_optim_step_and_says_where_its_time_went() -> None:
    stage = Stage()
    stage.tell(on.LocalEngineUp, engine("a"))
    stage.tell(TurnOpened, JOB, BASE)
    stage.tell(InstanceReleased, InstanceId("a"))
    stage.tell(on.SeedingChanged, JOB, False)
    stage.now_s = 1.0
    assert stage.kinds(TimerFired, STEP + JOB) == ["SetTimer", "TrainerWaits"]
    stage.now_s = 4.0
    stage.tell(TurnClosed, JOB, BASE, tokens=40)
    stage.tell(on.DevicesWanted, TRAINER)
    stage.tell(on.DevicesAsked, TRAINER, JOB)
    stage.now_s = 10.0
    commands = stage.tell(on.DevicesReturned, TRAINER, 6.0, True)
    assert commands == [StepEnded(10.0, JOB, 1, 40, 6.0, 3.0, 6.0)]


def test_an_engine_that_is_let_go_while_it_starts_does_not_work() -> None:
    stage = Stage()
    stage.tell(on.LocalEngineUp, engine("a"))
    stage.tell(TurnOpened, JOB, BASE)
    assert stage.tracker.is_started(InstanceId("a"))
    stage.tell(on.SeedingChanged, JOB, False)
    assert not stage.tracker.is_started(InstanceId("a"))


def test_an_engine_that_the_manager_gave_up_while_its_step_seeds_is_started_again() -> None:
    stage = Stage()
    stage.tell(on.LocalEngineUp, engine("a"))
    stage.tell(TurnOpened, JOB, BASE)
    assert stage.kinds(InstanceReleased, InstanceId("a")) == ["SetTimer", "RestEngine"]
    assert stage.tell(TimerFired, STEP + JOB) == [do.StartEngine(engine("a"), True)]


def test_a_lost_trainer_neither_waits_nor_holds() -> None:
    stage = Stage()
    stage.tell(on.DevicesWanted, TRAINER)
    stage.tell(on.DevicesAsked, TRAINER, JOB)
    assert stage.tracker.holders() == {TRAINER: JOB}
    stage.tell(TrainerLost, TRAINER, "killed")
    assert stage.tracker.holders() == {}


def two_jobs_seed() -> Stage:
    """Two jobs of one base model, each with a turn on the one local engine."""
    stage = Stage()
    stage.tell(on.LocalEngineUp, engine("a"))
    stage.tell(TurnOpened, JOB, BASE)
    commands = stage.tell(TurnOpened, OTHER, BASE)
    assert commands == [StepBegan(0.0, OTHER, 1, 1)]  # the engine works already
    return stage


def test_an_engine_works_until_the_last_job_that_seeds_on_it_is_done() -> None:
    stage = two_jobs_seed()
    stage.tell(on.DevicesWanted, TRAINER)
    asked = stage.tell(on.DevicesAsked, TRAINER, JOB)
    assert asked == [TrainerWanted(0.0, JOB), TrainerWanted(0.0, OTHER)]
    assert on.DevicesGranted(0.0, TRAINER, JOB) not in stage.tell(on.SeedingChanged, JOB, False)
    assert stage.tracker.is_started(InstanceId("a"))
    assert on.DevicesGranted(0.0, TRAINER, JOB) in stage.tell(on.SeedingChanged, OTHER, False)
    assert not stage.tracker.is_started(InstanceId("a"))


def test_one_jobs_optim_step_does_not_end_another_jobs_step_of_the_same_base_model() -> None:
    stage = two_jobs_seed()
    for job in (JOB, OTHER):
        stage.tell(on.SeedingChanged, job, False)
        stage.tell(TurnClosed, job, BASE, tokens=40)
    stage.tell(on.DevicesAsked, TRAINER, JOB)
    commands = stage.tell(on.DevicesReturned, TRAINER, 6.0, True)
    assert [type(c) for c in commands] == [StepEnded]
    stage.tell(on.DevicesAsked, TRAINER, OTHER)
    assert stage.tell(on.DevicesReturned, TRAINER, 2.0, True) == [
        StepEnded(0.0, OTHER, 1, 40, 2.0, 0.0, 0.0)
    ]


def test_turns_that_ran_where_another_job_seeded_are_looked_after_when_it_is_done() -> None:
    stage = two_jobs_seed()
    stage.tell(on.SeedingChanged, JOB, False)
    timers = [
        c.name for c in stage.tell(on.SeedingChanged, OTHER, False) if isinstance(c, SetTimer)
    ]
    assert timers == [STEP + JOB, STEP + OTHER]


def test_a_job_that_never_trains_begins_a_step_with_each_burst_of_turns() -> None:
    stage = Stage()
    stage.tell(on.LocalEngineUp, engine("a"))
    for number in (1, 2):
        commands = stage.tell(TurnOpened, JOB, BASE)
        assert StepBegan(0.0, JOB, number, 1) in commands
        stage.tell(TurnClosed, JOB, BASE, tokens=5)
        stage.tell(on.SeedingChanged, JOB, False)


def test_a_job_with_turns_of_two_base_models_gets_the_engines_of_both() -> None:
    stage = Stage()
    stage.tell(on.LocalEngineUp, engine("a"))
    stage.tell(on.LocalEngineUp, engine("b", "teacher"))
    stage.tell(TurnOpened, JOB, BASE)
    assert not stage.tracker.is_started(InstanceId("b"))
    assert stage.tell(TurnOpened, JOB, "teacher") == [do.StartEngine(engine("b", "teacher"), True)]


def test_a_job_that_is_over_holds_no_engine_and_is_forgotten_with_its_last_turn() -> None:
    stage = Stage()
    stage.tell(on.LocalEngineUp, engine("a"))
    stage.tell(TurnOpened, JOB, BASE)
    assert stage.tell(JobEnded, JOB, "stopped") == []
    assert stage.tell(TurnClosed, JOB, BASE, tokens=5) == [StepDropped(0.0, JOB)]
    stage.tell(on.SeedingChanged, JOB, False)
    assert stage.tracker.jobs() == []


def test_jobs_without_local_engines_leave_nothing_behind() -> None:
    stage = Stage()
    stage.tell(TurnOpened, JOB, BASE)
    stage.tell(TurnClosed, JOB, BASE, tokens=5)
    assert stage.tracker.jobs() == []


BASE_OF = {JobId("p"): "x", JobId("q"): "x", JobId("r"): "y"}


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_local_engines_and_trainers_never_work_at_once(  # noqa: C901 -- one step of many kinds
    seed: int,
) -> None:
    """The integrity check after every event is the assertion; at the end everybody who asked has
    had the devices.
    """
    rng, stage = random.Random(seed), Stage()
    live = dict.fromkeys(BASE_OF, 0)
    seeding: set[JobId] = set()
    asked: dict[WorkerId, JobId] = {}
    busy: set[WorkerId] = set()
    trainers = 0

    def tell(kind: type, *fields: Any, **named: Any) -> None:
        for command in stage.tell(kind, *fields, **named):
            match command:
                case StepBegan(_, job):
                    seeding.add(job)
                case on.DevicesGranted(_, trainer):
                    del asked[trainer]
                    busy.add(trainer)
                case TrainerWaits(_, job) if rng.random() < 0.3 and not busy:
                    resumes.append(job)
                case _:
                    pass

    for number, base in enumerate(("x", "x", "y")):
        resumes: list[JobId] = []
        tell(on.LocalEngineUp, engine(f"e{number}", base))
    for _ in range(300):
        stage.now_s += 1.0
        resumes = []
        job = rng.choice(list(BASE_OF))
        match rng.choice(("open", "open", "close", "ask", "return", "end", "lose", "timer")):
            case "open":
                live[job] += 1
                tell(TurnOpened, job, BASE_OF[job])
            case "close" if live[job]:
                live[job] -= 1
                tell(TurnClosed, job, BASE_OF[job], tokens=5)
            case "ask":
                trainers += 1
                name = WorkerId(f"t{trainers}")
                tell(on.DevicesWanted, name)
                asked[name] = job
                tell(on.DevicesAsked, name, job)
            case "return" if busy:
                name = rng.choice(sorted(busy))
                busy.discard(name)
                tell(on.DevicesReturned, name, 1.0, rng.random() < 0.5)
            case "end" if seeding:
                job = rng.choice(sorted(seeding))
                seeding.discard(job)
                bases = {BASE_OF[other] for other in seeding}
                for spec in list(stage.tracker._engines.values()):
                    mine = spec.base_model == BASE_OF[job] and spec.base_model not in bases
                    if mine and stage.tracker.is_started(spec.instance):
                        tell(InstanceReleased, spec.instance)
                tell(on.SeedingChanged, job, False)
            case "lose" if asked:
                name = rng.choice(sorted(asked))
                del asked[name]
                tell(TrainerLost, name, "killed")
            case "timer":
                tell(TimerFired, STEP + job)
            case _:
                pass
        if resumes and not busy and not asked and resumes[0] not in seeding:
            seeding.add(resumes[0])
            tell(on.SeedingChanged, resumes[0], True)
    for job in sorted(seeding):
        tell(on.SeedingChanged, job, False)
    assert asked == {}


def sleeper_leaves() -> Stage:
    """A trainer waits for the devices of an engine that was told to rest."""
    stage = Stage()
    (rest,) = stage.tell(on.LocalEngineUp, replace(engine("a"), sleeps=True))[1:]
    assert isinstance(rest, do.RestEngine) and rest.number == 1, "it comes up awake"
    stage.tell(on.EngineRested, InstanceId("a"), 1)
    stage.tell(TurnOpened, JOB, BASE)
    stage.tell(on.DevicesWanted, TRAINER)
    stage.tell(on.DevicesAsked, TRAINER, JOB)
    assert "RestEngine" in stage.kinds(InstanceReleased, InstanceId("a"), True, "seeding ended")
    assert granted(stage.tell(on.SeedingChanged, JOB, False)) == []
    return stage


def granted(commands: list[do.StepCommand]) -> list[WorkerId]:
    return [command.trainer for command in commands if isinstance(command, on.DevicesGranted)]


def test_a_trainer_waits_until_a_sleeping_engine_has_left_its_devices() -> None:
    stage = sleeper_leaves()
    assert stage.tell(on.EngineRested, InstanceId("a"), 1) == [], "of an earlier order"
    assert granted(stage.tell(on.EngineRested, InstanceId("a"), 2)) == [TRAINER]
    assert stage.tell(TimerFired, REST + "a") == [], "its deadline has no meaning any more"


def test_an_engine_that_does_not_rest_in_time_is_ended_and_its_loss_frees_the_devices() -> None:
    stage = sleeper_leaves()
    assert stage.kinds(TimerFired, REST + "a") == ["ReleaseInstance", "SetTimer"]
    assert not stage.tracker.is_local(InstanceId("a")), "its release must not be another rest"
    assert granted(stage.tell(InstanceLost, InstanceId("a"), "killed")) == [TRAINER]


def test_an_engine_whose_seeding_ends_while_it_wakes_is_told_to_rest() -> None:
    stage = Stage()
    stage.tell(on.LocalEngineUp, replace(engine("a"), sleeps=True))
    stage.tell(TurnOpened, JOB, BASE)
    assert stage.tracker.is_started(InstanceId("a"))
    stage.tell(on.DevicesWanted, TRAINER)
    stage.tell(on.DevicesAsked, TRAINER, JOB)
    commands = stage.tell(on.SeedingChanged, JOB, False)
    assert not granted(commands)
    assert [c.number for c in commands if isinstance(c, do.RestEngine)] == [2]
    assert granted(stage.tell(on.EngineRested, InstanceId("a"), 2)) == [TRAINER]
