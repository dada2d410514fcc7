"""Who has the trainers' devices: steps begin, seed, train and end, and nobody shares."""

import random
from typing import Any

import pytest

from slackwater.control.rollout.events import StepBegan, StepEnded, TrainerWaits, TrainerWanted
from slackwater.control.steps import commands as do
from slackwater.control.steps import events as on
from slackwater.control.steps.book import STEP, StepBook
from slackwater.control.timer import TimerFired
from slackwater.model.ids import InstanceId, WorkerId
from slackwater.model.instance import InstanceKind, InstanceSpec

BASE = "tiny"
TRAINER = WorkerId("trainer")


def engine(name: str, base_model: str = BASE) -> InstanceSpec:
    local = InstanceKind.LOCAL
    return InstanceSpec(InstanceId(name), local, 4, 1000, 4000, base_model=base_model)


class Stage:
    def __init__(self) -> None:
        self.book = StepBook()
        self.now_s = 0.0

    def tell(self, kind: type, *fields: Any, **named: Any) -> list[do.StepCommand]:
        commands = list(self.book.handle(kind(self.now_s, *fields, **named)))
        self.book.check_integrity()
        return commands

    def kinds(self, kind: type, *fields: Any, **named: Any) -> list[str]:
        return [type(command).__name__ for command in self.tell(kind, *fields, **named)]


def test_without_local_engines_trainers_get_the_devices_at_once_and_no_step_is_told_of() -> None:
    stage = Stage()
    assert stage.tell(on.LiveTurnsChanged, BASE, True) == []
    stage.tell(on.DevicesWanted, TRAINER)
    assert stage.tell(on.DevicesAsked, TRAINER, BASE) == [do.GrantDevices(TRAINER)]
    assert stage.tell(on.DevicesReturned, TRAINER, 1.0, True) == []


def test_a_step_begins_with_the_first_turn_and_its_local_engines_are_started() -> None:
    stage = Stage()
    stage.tell(on.LocalEngineUp, engine("a"))
    stage.tell(on.StepExpected, BASE, 8)
    commands = stage.tell(on.LiveTurnsChanged, BASE, True)
    assert commands == [StepBegan(0.0, BASE, 1, 8), do.StartEngine(engine("a"), False)]


def test_a_trainer_waits_for_seeding_to_end_and_says_that_it_does() -> None:
    stage = Stage()
    stage.tell(on.LocalEngineUp, engine("a"))
    stage.tell(on.LiveTurnsChanged, BASE, True)
    stage.tell(on.DevicesWanted, TRAINER)
    assert stage.tell(on.DevicesAsked, TRAINER, BASE) == [TrainerWanted(0.0, BASE)]
    stage.tell(on.EngineRested, InstanceId("a"))
    commands = stage.tell(on.SeedingChanged, BASE, False)
    assert do.GrantDevices(TRAINER) in commands


def test_a_step_ends_with_an_optim_step_and_says_where_its_time_went() -> None:
    stage = Stage()
    stage.tell(on.LocalEngineUp, engine("a"))
    stage.tell(on.LiveTurnsChanged, BASE, True)
    stage.tell(on.EngineRested, InstanceId("a"))
    stage.tell(on.SeedingChanged, BASE, False)
    stage.now_s = 1.0
    assert stage.kinds(TimerFired, STEP + BASE) == ["SetTimer", "TrainerWaits"]
    stage.now_s = 4.0
    stage.tell(on.LiveTurnsChanged, BASE, False, 40)
    stage.tell(on.DevicesWanted, TRAINER)
    stage.tell(on.DevicesAsked, TRAINER, BASE)
    stage.now_s = 10.0
    commands = stage.tell(on.DevicesReturned, TRAINER, 6.0, True)
    assert commands == [StepEnded(10.0, BASE, 1, 40, 6.0, 3.0, 6.0)]


def test_an_engine_that_is_let_go_while_it_starts_does_not_work() -> None:
    stage = Stage()
    stage.tell(on.LocalEngineUp, engine("a"))
    stage.tell(on.LiveTurnsChanged, BASE, True)
    assert stage.book.works(InstanceId("a"))
    stage.tell(on.SeedingChanged, BASE, False)
    assert not stage.book.works(InstanceId("a"))


def test_an_engine_that_the_manager_gave_up_while_its_step_seeds_is_started_again() -> None:
    stage = Stage()
    stage.tell(on.LocalEngineUp, engine("a"))
    stage.tell(on.LiveTurnsChanged, BASE, True)
    assert stage.kinds(on.EngineRested, InstanceId("a")) == ["SetTimer"]
    assert stage.tell(TimerFired, STEP + BASE) == [do.StartEngine(engine("a"), True)]


def test_a_lost_trainer_neither_waits_nor_holds() -> None:
    stage = Stage()
    stage.tell(on.DevicesWanted, TRAINER)
    stage.tell(on.DevicesAsked, TRAINER, BASE)
    assert stage.book.holders() == {TRAINER: BASE}
    stage.tell(on.TrainerGone, TRAINER)
    assert stage.book.holders() == {}


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_local_engines_and_trainers_never_work_at_once(  # noqa: C901 -- one step of many kinds
    seed: int,
) -> None:
    """The integrity check after every event is the assertion; at the end everybody who asked has had the devices."""
    rng, stage = random.Random(seed), Stage()
    live = {"x": 0, "y": 0}
    seeding: set[str] = set()
    asked: dict[WorkerId, str] = {}
    busy: set[WorkerId] = set()
    trainers = 0

    def tell(kind: type, *fields: Any, **named: Any) -> None:
        for command in stage.tell(kind, *fields, **named):
            match command:
                case StepBegan(_, base_model):
                    seeding.add(base_model)
                case do.GrantDevices(trainer):
                    del asked[trainer]
                    busy.add(trainer)
                case TrainerWaits(_, base_model) if rng.random() < 0.3 and not busy:
                    resumes.append(base_model)
                case _:
                    pass

    for number, base in enumerate(("x", "x", "y")):
        resumes: list[str] = []
        tell(on.LocalEngineUp, engine(f"e{number}", base))
    for _ in range(300):
        stage.now_s += 1.0
        resumes = []
        base = rng.choice("xy")
        match rng.choice(("open", "open", "close", "ask", "return", "end", "lose", "timer")):
            case "open":
                live[base] += 1
                tell(on.LiveTurnsChanged, base, True)
            case "close" if live[base]:
                live[base] -= 1
                tell(on.LiveTurnsChanged, base, False, 5)
            case "ask":
                trainers += 1
                name = WorkerId(f"t{trainers}")
                tell(on.DevicesWanted, name)
                asked[name] = base
                tell(on.DevicesAsked, name, base)
            case "return" if busy:
                name = rng.choice(sorted(busy))
                busy.discard(name)
                tell(on.DevicesReturned, name, 1.0, rng.random() < 0.5)
            case "end" if seeding:
                base = rng.choice(sorted(seeding))
                seeding.discard(base)
                for spec in list(stage.book._engines.values()):
                    if spec.base_model == base and stage.book.works(spec.instance):
                        tell(on.EngineRested, spec.instance)
                tell(on.SeedingChanged, base, False)
            case "lose" if asked:
                name = rng.choice(sorted(asked))
                del asked[name]
                tell(on.TrainerGone, name)
            case "timer":
                tell(TimerFired, STEP + base)
            case _:
                pass
        if resumes and not busy and not asked and resumes[0] not in seeding:
            seeding.add(resumes[0])
            tell(on.SeedingChanged, resumes[0], True)
    for base in sorted(seeding):
        tell(on.SeedingChanged, base, False)
    assert asked == {}
