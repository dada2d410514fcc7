"""The trainers in a storm: jobs of one base model, step after step; their devices roll out until
seeding ends and again when it resumes.

Local engines are hit by the same faults as all others, trainers are lost while they wait or work,
and other training is due on the same devices. A step must end whatever happens, and while a
trainer has the devices no local engine may be at work on them. Some engines sleep: what says that
they do may come late, after the next order, or never.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from slackwater.control.devices.messages import GrantDevices
from slackwater.control.jobs.events import JobEnded
from slackwater.control.operations.events import TrainerLost
from slackwater.control.rollout.events import InstanceLost
from slackwater.control.steps import events as on
from slackwater.control.steps.commands import RestEngine, StartEngine
from slackwater.control.weights.events import WeightsPublished, WeightsRetired
from slackwater.model.ids import InstanceId, JobId, TrajectoryId, WorkerId
from slackwater.model.instance import InstanceKind, InstanceSpec

if TYPE_CHECKING:
    from benchmarks.rollout.storm import Storm

BASE = "learner"
LEARNERS = (JobId("learner-1"), JobId("learner-2"))


class StormLearner:
    """One job that trains; `stepping` while a step is under way."""

    def __init__(
        self, storm: "Storm", job: JobId, ask: Callable[["StormLearner", bool], None]
    ) -> None:
        self.job = job
        self.stepping = False
        self.ending = False  # a trainer was asked for the last of it
        self._storm = storm
        self._ask = ask
        self._step = 0
        self._left = 0

    def begin(self) -> None:
        """Publish, and submit all turns."""
        storm = self._storm
        if not storm.raging:
            return
        self._step += 1
        self._left = int(storm.rng.integers(4, 20))
        self.stepping = True
        name = f"{self.job}-w"
        version = f"{name}{self._step}"
        if storm.chance(0.5):
            storm.happen(on.StepExpected(storm.now_s, self.job, self._left))
        storm.happen(WeightsPublished(storm.now_s, self.job, version, BASE))
        if self._step > 1:
            storm.happen(WeightsRetired(storm.now_s, f"{name}{self._step - 1}"))
        for number in range(self._left):
            trajectory = TrajectoryId(f"{version}.{number}")
            storm.clients.ask(trajectory, self.job, (version,), self._answered, BASE)
        storm.after(5.0, self._train)

    def _train(self) -> None:
        """Train on what is there now and then; with all of it the step ends."""
        storm = self._storm
        if not self.stepping:
            return
        if storm.chance(0.02):  # it is given up for lost, and goes on all the same
            storm.happen(JobEnded(storm.now_s, self.job, "stopped"))
        if not self.ending and (self._left == 0 or storm.chance(0.2)):
            self._ask(self, self._left == 0)
        storm.after(5.0, self._train)

    def _answered(self) -> None:
        self._left -= 1

    def ended(self) -> None:
        """The optimizer has stepped."""
        self.stepping = False
        self._storm.after(self._storm.wait_s(60.0), self.begin)


class StormTrainer:
    """The devices of two jobs that train."""

    def __init__(self, storm: "Storm") -> None:
        self._storm = storm
        self._asks = 0
        self._learners = [StormLearner(storm, job, self._ask) for job in LEARNERS]
        self._asked: dict[WorkerId, tuple[StormLearner, bool]] = {}
        self._training: set[WorkerId] = set()
        self._engines: dict[InstanceId, InstanceSpec] = {}
        self._awake: set[InstanceId] = set()  # of those that sleep
        self._orders: dict[InstanceId, int] = {}  # to rest, the last of each

    @property
    def stepping(self) -> bool:
        """Whether a step is under way."""
        return any(learner.stepping for learner in self._learners)

    def start(self) -> None:
        for learner in self._learners:
            self._storm.after(self._storm.wait_s(60.0), learner.begin)
        self._storm.after(self._storm.wait_s(60.0), self._other_work)
        self._bring_engines()

    # ---- local engines ----
    def _bring_engines(self) -> None:
        """Keep one or two up; those that were lost come back under another name."""
        storm = self._storm
        if not storm.raging:
            return
        for instance in list(self._engines):
            if not storm.controller.steps.is_local(instance):
                del self._engines[instance]
        while len(self._engines) < 1 + storm.chance(0.5):
            spec = storm.spec(InstanceKind.LOCAL, BASE)
            self._engines[spec.instance] = spec
            if spec.sleeps:
                self._awake.add(spec.instance)
            storm.happen(on.LocalEngineUp(storm.now_s, spec))
        if storm.chance(0.05):  # a resting one dies too
            victim = next(iter(self._resting()), InstanceId("-"))
            storm.happen(InstanceLost(storm.now_s, victim, "killed"))
        storm.after(storm.wait_s(30.0), self._bring_engines)

    def _resting(self) -> list[InstanceId]:
        return [spec.instance for spec in self._storm.controller.steps.resting()]

    def take(self, command: StartEngine | GrantDevices | RestEngine) -> None:
        """The tracker gives the devices to local engines, or to a trainer."""
        storm = self._storm
        match command:
            case StartEngine(spec):
                if spec.sleeps:
                    self._awake.add(spec.instance)
                    self._orders.pop(spec.instance, None)
                storm.after(storm.wait_s(2.0), partial(self._joins, spec))
            case RestEngine(instance, _, number):
                storm.instances.pop(instance, None)
                if number is None:
                    return
                self._orders[instance] = number
                if not (storm.raging and storm.chance(0.1)):
                    mean_s = 40.0 if storm.chance(0.1) else 1.0
                    storm.after(storm.wait_s(mean_s), partial(self._rested, instance, number))
            case GrantDevices(trainer):
                assert not self._awake, f"{self._awake} on devices that {trainer} gets"
                self._training.add(trainer)
                storm.after(storm.wait_s(10.0), partial(self._done, trainer))

    def _rested(self, instance: InstanceId, number: int) -> None:
        if self._orders.get(instance) == number:  # else it has woken since
            self._awake.discard(instance)
        self._storm.happen(on.EngineRested(self._storm.now_s, instance, number))

    def lost(self, instance: InstanceId) -> None:
        """Its process has ended."""
        self._awake.discard(instance)

    def released(self, instance: InstanceId) -> None:
        """Its process is ended, if it is a local engine's."""
        if instance in self._engines:
            storm = self._storm
            storm.after(storm.wait_s(2.0), partial(self._end, instance))

    def _end(self, instance: InstanceId) -> None:
        self._storm.happen(InstanceLost(self._storm.now_s, instance, "released"))

    def _joins(self, spec: InstanceSpec) -> None:
        up = self._storm.controller.steps.is_started(spec.instance)
        if up and spec.instance not in self._storm.instances:
            self._storm.join(spec)

    # ---- trainers ----
    def _other_work(self) -> None:
        """Training of something else is due on the same devices."""
        storm = self._storm
        if storm.raging:
            learner = self._learners[int(storm.rng.integers(len(self._learners)))]
            self._ask(learner, False)
            storm.after(storm.wait_s(120.0), self._other_work)

    def _ask(self, learner: StormLearner, ends: bool) -> None:
        storm = self._storm
        self._asks += 1
        trainer = WorkerId(f"trainer-{self._asks}")
        self._asked[trainer] = (learner, ends)
        learner.ending = learner.ending or ends
        storm.happen(on.DevicesWanted(storm.now_s, trainer))
        if storm.raging and storm.chance(0.1):
            storm.after(storm.wait_s(20.0), partial(self._gone, trainer))
        if storm.chance(0.1):
            storm.after(storm.wait_s(1.0), partial(self._unwant, trainer))
        else:
            storm.after(storm.wait_s(0.1), partial(self._asks_now, trainer))

    def _asks_now(self, trainer: WorkerId) -> None:
        if trainer in self._asked:
            learner, _ = self._asked[trainer]
            self._storm.happen(on.DevicesAsked(self._storm.now_s, trainer, learner.job))

    def _over(self, trainer: WorkerId) -> tuple[StormLearner, bool] | None:
        """Take it out of the books, if it is in them."""
        found = self._asked.pop(trainer, None)
        if found is not None:
            self._training.discard(trainer)
            learner, ends = found
            learner.ending = learner.ending and not ends
        return found

    def _unwant(self, trainer: WorkerId) -> None:
        if self._over(trainer) is not None:
            self._storm.happen(on.DevicesUnwanted(self._storm.now_s, trainer))

    def _gone(self, trainer: WorkerId) -> None:
        """It dies: what it was to end is asked for again."""
        if self._over(trainer) is not None:
            self._storm.happen(TrainerLost(self._storm.now_s, trainer, "killed"))

    def _done(self, trainer: WorkerId) -> None:
        storm = self._storm
        found = self._over(trainer)
        if found is None:
            return
        learner, ends = found
        took_s = storm.wait_s(10.0)
        storm.happen(on.DevicesReturned(storm.now_s, trainer, took_s, ends, 100))
        if ends:
            learner.ended()

    def check_integrity(self) -> None:
        """The devices are the trainers' or the local engines', never both's."""
        fleet = self._storm.manager.state.instances
        local = [record.spec.instance for record in fleet if record.is_local]
        assert not (self._training and local), f"{local} on devices that {self._training} have"
        assert self._training == set(self._storm.controller.steps.holders())
