"""The trainer in a storm: step after step, its devices roll out until seeding ends and again when it resumes.

Instances of its own are hit by the same faults as all others. A step must end whatever happens, and while the
trainer has its devices no local engine may be at work on them.
"""

from slackwater.control.rollout import events as ev
from slackwater.control.rollout.commands import EndSeeding, ResumeSeeding
from slackwater.model.ids import JobId, TrajectoryId
from slackwater.model.instance import InstanceKind
from slackwater.sim.rollout.storm_stage import StormStage

LEARNER = JobId("learner")


class StormTrainer:
    """One job that trains; `stepping` while a step is under way."""

    def __init__(self, storm: StormStage) -> None:
        self._storm = storm
        self._step = 0
        self._left = 0
        self._seeding = False
        self._waiting_s = 0.0
        self.stepping = False

    def start(self) -> None:
        self._storm.after(self._storm.wait_s(60.0), self._begin)

    def _begin(self) -> None:
        storm = self._storm
        if not storm.raging:
            return
        self._step += 1
        self._left = int(storm.rng.integers(4, 20))
        self.stepping = self._seeding = True
        version = f"w{self._step}"
        storm.happen(ev.StepBegan(storm.now_s, LEARNER, self._step, self._left))
        storm.happen(ev.WeightsPublished(storm.now_s, LEARNER, version))
        if self._step > 1:
            storm.happen(ev.WeightsRetired(storm.now_s, f"w{self._step - 1}"))
        self._start_local()
        storm.after(storm.wait_s(120.0), self._want)
        for number in range(self._left):
            trajectory = TrajectoryId(f"{version}.{number}")
            storm.asks.ask(trajectory, LEARNER, (version,), self._answered)

    def _want(self) -> None:
        """Training of something else is due on the same devices."""
        if self._seeding:
            self._storm.happen(ev.TrainerWanted(self._storm.now_s, LEARNER))

    def _start_local(self) -> None:
        if self._seeding:
            for _ in range(int(self._storm.rng.integers(1, 3))):
                self._storm.join(InstanceKind.LOCAL, LEARNER)

    def take(self, command: EndSeeding | ResumeSeeding) -> None:
        """The manager gives the devices to the trainer, or takes them back."""
        storm = self._storm
        assert self.stepping, f"{command} without a step"
        self._seeding = isinstance(command, ResumeSeeding)
        if self._seeding:
            storm.after(storm.wait_s(2.0), self._start_local)
        else:
            storm.after(storm.wait_s(5.0), self._train)

    def _train(self) -> None:
        """Wait for responses, and say so; with all of them the step ends."""
        storm = self._storm
        if not self.stepping or self._seeding:
            return
        if self._left:
            self._waiting_s += 5.0
            storm.happen(ev.TrainerWaits(storm.now_s, LEARNER, 100 * self._step, 1.0))
            storm.after(5.0, self._train)
            return
        self.stepping = False
        train_s, waited_s, self._waiting_s = storm.wait_s(20.0), self._waiting_s, 0.0
        ended = ev.StepEnded(storm.now_s, LEARNER, self._step, 500, train_s, waited_s, train_s)
        storm.happen(ended)
        storm.after(storm.wait_s(60.0), self._begin)

    def _answered(self) -> None:
        self._left -= 1

    def check_integrity(self) -> None:
        """The devices are the trainer's or the local engines', never both's."""
        fleet = self._storm.manager.books.instances
        local = [record.spec.instance for record in fleet if record.local]
        assert self._seeding or not local, f"{local} on devices that the trainer has"
