"""The trainers in a storm: step after step, their devices roll out until seeding ends and again when it resumes.

Local engines are hit by the same faults as all others, trainers are lost while they wait or work, and other training is due on
the same devices. A step must end whatever happens, and while a trainer has the devices no local engine may be at work on them.
"""

from functools import partial

from slackwater.control.steps import events as on
from slackwater.control.steps.commands import GrantDevices, StartEngine
from slackwater.control.weights.events import WeightsPublished, WeightsRetired
from slackwater.model.ids import InstanceId, JobId, TrajectoryId, WorkerId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.sim.rollout.storm_stage import StormStage

LEARNER = JobId("learner")


class StormTrainer:
    """One job that trains; `stepping` while a step is under way."""

    def __init__(self, storm: StormStage) -> None:
        self._storm = storm
        self._step = 0
        self._left = 0
        self._asks = 0
        self._ends: dict[WorkerId, bool] = {}
        self._training: set[WorkerId] = set()
        self._engines: dict[InstanceId, InstanceSpec] = {}
        self.stepping = False

    def start(self) -> None:
        self._storm.after(self._storm.wait_s(60.0), self._begin)
        self._storm.after(self._storm.wait_s(60.0), self._other_work)
        self._bring_engines()

    def _begin(self) -> None:
        storm = self._storm
        if not storm.raging:
            return
        self._step += 1
        self._left = int(storm.rng.integers(4, 20))
        self.stepping = True
        version = f"w{self._step}"
        if storm.chance(0.5):
            storm.happen(on.StepExpected(storm.now_s, LEARNER, self._left))
        storm.happen(WeightsPublished(storm.now_s, LEARNER, version, LEARNER))
        if self._step > 1:
            storm.happen(WeightsRetired(storm.now_s, f"w{self._step - 1}"))
        for number in range(self._left):
            trajectory = TrajectoryId(f"{version}.{number}")
            storm.asks.ask(trajectory, LEARNER, (version,), self._answered)
        storm.after(5.0, self._train)

    # ---- local engines ----
    def _bring_engines(self) -> None:
        """Keep one or two up; those that were lost come back under another name."""
        storm = self._storm
        if not storm.raging:
            return
        for instance in list(self._engines):
            if not storm.brain.steps.is_local(instance):
                del self._engines[instance]
        while len(self._engines) < 1 + storm.chance(0.5):
            spec = storm.spec(InstanceKind.LOCAL, LEARNER)
            self._engines[spec.instance] = spec
            storm.happen(on.LocalEngineUp(storm.now_s, spec))
        if storm.chance(0.05):  # a resting one dies too
            storm.happen(
                on.LocalEngineDown(storm.now_s, next(iter(self._resting()), InstanceId("-")))
            )
        storm.after(storm.wait_s(30.0), self._bring_engines)

    def _resting(self) -> list[InstanceId]:
        return [spec.instance for spec in self._storm.brain.steps.resting()]

    def take(self, command: StartEngine | GrantDevices) -> None:
        """The book gives the devices to local engines, or to a trainer."""
        storm = self._storm
        if isinstance(command, StartEngine):
            spec = command.spec
            storm.after(storm.wait_s(2.0), partial(self._joins, spec))
        else:
            self._training.add(command.trainer)
            storm.after(storm.wait_s(10.0), partial(self._done, command.trainer))

    def _joins(self, spec: InstanceSpec) -> None:
        up = self._storm.brain.steps.works(spec.instance)
        if up and spec.instance not in self._storm.instances:
            self._storm.join(spec)

    # ---- trainers ----
    def _train(self) -> None:
        """Train on what is there now and then; with all of it the step ends."""
        storm = self._storm
        if not self.stepping:
            return
        if not any(self._ends.values()) and (self._left == 0 or storm.chance(0.2)):
            self._ask(ends=self._left == 0)
        storm.after(5.0, self._train)

    def _other_work(self) -> None:
        """Training of something else is due on the same devices."""
        if self._storm.raging:
            self._ask(ends=False)
            self._storm.after(self._storm.wait_s(120.0), self._other_work)

    def _ask(self, *, ends: bool) -> None:
        storm = self._storm
        self._asks += 1
        trainer = WorkerId(f"trainer-{self._asks}")
        self._ends[trainer] = ends
        storm.happen(on.DevicesWanted(storm.now_s, trainer))
        if storm.raging and storm.chance(0.1):
            storm.after(storm.wait_s(20.0), partial(self._gone, trainer))
        if storm.chance(0.1):
            storm.after(storm.wait_s(1.0), partial(self._unwant, trainer))
        else:
            storm.after(storm.wait_s(0.1), partial(self._asks_now, trainer))

    def _asks_now(self, trainer: WorkerId) -> None:
        if trainer in self._ends:
            self._storm.happen(on.DevicesAsked(self._storm.now_s, trainer, LEARNER))

    def _unwant(self, trainer: WorkerId) -> None:
        if self._ends.pop(trainer, None) is not None:
            self._storm.happen(on.DevicesUnwanted(self._storm.now_s, trainer))

    def _gone(self, trainer: WorkerId) -> None:
        """It dies: what it was to end is asked for again."""
        if self._ends.pop(trainer, None) is not None:
            self._training.discard(trainer)
            self._storm.happen(on.TrainerGone(self._storm.now_s, trainer))

    def _done(self, trainer: WorkerId) -> None:
        storm = self._storm
        if trainer not in self._ends:
            return
        ends = self._ends.pop(trainer)
        self._training.discard(trainer)
        took_s = storm.wait_s(10.0)
        storm.happen(on.DevicesReturned(storm.now_s, trainer, took_s, ends, 100))
        if ends:
            self.stepping = False
            storm.after(storm.wait_s(60.0), self._begin)

    def _answered(self) -> None:
        self._left -= 1

    def check_integrity(self) -> None:
        """The devices are the trainers' or the local engines', never both's."""
        fleet = self._storm.manager.books.instances
        local = [record.spec.instance for record in fleet if record.local]
        assert not (self._training and local), f"{local} on devices that {self._training} have"
        assert self._training == set(self._storm.brain.steps.holders())
