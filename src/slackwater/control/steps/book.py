"""The step book: who has the trainers' devices, when a step begins and ends, and what waits (RLBoost 4.2).

Local engines and trainers share devices, so only one kind works at a time. A base model's step begins with the first turn
that comes while no trainer works, and ends with an optim_step. How long local engines roll out is the rollout manager's decision
(`SeedingChanged`); here is who holds the devices, and who waits for them. Without local engines nothing is shared, every
request for devices is granted at once, and no step is told of. All base models share one set of devices, as in a service with
a few trainers, unless each has devices of its own (`shared` off), as where every job is placed on nodes of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from slackwater.control.rollout.events import StepBegan, StepEnded, TrainerWaits, TrainerWanted
from slackwater.control.steps import commands as do
from slackwater.control.steps import events as on
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.ids import InstanceId, WorkerId
from slackwater.model.instance import InstanceSpec

NAG_S = 5.0
RESTART_S = 1.0
STEP = "step:"  # of the names of its timers; a base model follows

Out = list[do.StepCommand]


@dataclass(slots=True)
class Step:
    """A base model's step: the present one, or the last."""

    number: int = 0
    running: bool = False
    seeding: bool = False
    live_turns: int = 0
    turns: int = 0
    expected_turns: int = 1
    announced: bool = False  # `expected_turns` was said, not guessed from the step before
    tokens: int = 0
    trained_tokens: int = 0
    train_s: float = 0.0
    waited_s: float = 0.0
    waits_since_s: float | None = None
    last_response_s: float = 0.0


class StepBook:
    """See the module. `check_integrity()` holds after every event."""

    def __init__(self, *, shared: bool = True) -> None:
        self._shared = shared
        self._engines: dict[InstanceId, InstanceSpec] = {}
        self._at_work: set[InstanceId] = set()
        self._steps: dict[str, Step] = {}
        self._busy: dict[WorkerId, str | None] = {}
        self._wanting: dict[WorkerId, str | None] = {}
        self._asking: dict[WorkerId, str | None] = {}

    def handle(self, event: on.StepEvent) -> Sequence[do.StepCommand]:
        """Take one event; return what is to be done, in order."""
        out: Out = []
        now_s = event.now_s
        match event:
            case on.LocalEngineUp(_, spec):
                self._engine_up(spec, now_s, out)
            case on.LocalEngineDown(_, instance):
                self._at_work.discard(instance)
                self._engines.pop(instance, None)
            case on.EngineRested(_, instance):
                self._rests(instance, now_s, out)
            case on.StepExpected(_, base_model, turns):
                step = self._step(base_model)
                step.expected_turns, step.announced = max(turns, 1), True
            case on.LiveTurnsChanged():
                self._turns_changed(event, out)
            case on.DevicesWanted(_, trainer, base_model):
                self._wanting[trainer] = base_model
                self._end_waits(base_model, now_s)
            case on.DevicesUnwanted(_, trainer) | on.TrainerGone(_, trainer):
                self._gives_up(trainer, isinstance(event, on.TrainerGone), now_s, out)
            case on.DevicesAsked(_, trainer, base_model):
                self._asked(trainer, base_model, now_s, out)
            case on.DevicesReturned():
                self._returned(event, out)
            case on.SeedingChanged(_, base_model, seeds):
                self._seeding_changed(base_model, seeds, now_s, out)
            case TimerFired(_, name):
                self._timer(name.removeprefix(STEP), now_s, out)
            case _:
                assert_never(event)
        return out

    # ---- questions ----
    def is_local(self, instance: InstanceId) -> bool:
        """Whether it is an engine on the trainers' devices."""
        return instance in self._engines

    def works(self, instance: InstanceId) -> bool:
        """Whether it was started, and not let go since."""
        return instance in self._at_work

    def resting(self) -> list[InstanceSpec]:
        """Local engines that do not work now."""
        return [spec for name, spec in self._engines.items() if name not in self._at_work]

    def holders(self) -> dict[WorkerId, str | None]:
        """Trainers that hold the devices, and for which base model."""
        return dict(self._busy)

    def _one_place(self, one: str | None, other: str | None) -> bool:
        """Whether two base models share devices; a trainer that names none could be anywhere."""
        return self._shared or one is None or other is None or one == other

    def _holds_or_wants(self, base_model: str) -> bool:
        claims = (*self._busy.values(), *self._wanting.values())
        return any(self._one_place(base_model, other) for other in claims)

    def _busy_at(self, base_model: str) -> bool:
        return any(self._one_place(base_model, other) for other in self._busy.values())

    def _seeding_at(self, base_model: str | None) -> list[str]:
        return [name for name in self._seeding() if self._one_place(base_model, name)]

    # ---- local engines ----
    def _engine_up(self, spec: InstanceSpec, now_s: float, out: Out) -> None:
        self._engines[spec.instance] = spec
        self._at_work.discard(spec.instance)
        if self._step(spec.base_model).seeding:
            self._start(spec, out, again=True)
        self._look(spec.base_model, now_s, out)

    def _rests(self, instance: InstanceId, now_s: float, out: Out) -> None:
        """The manager let it go. If that was not the end of seeding, it gave it up: it is started again."""
        self._at_work.discard(instance)
        base_model = self._engines[instance].base_model if instance in self._engines else ""
        if self._step(base_model).seeding:
            out.append(SetTimer(STEP + base_model, now_s + RESTART_S))

    def _timer(self, base_model: str, now_s: float, out: Out) -> None:
        if self._step(base_model).seeding:
            self._start_resting(base_model, out)
        self._look(base_model, now_s, out)

    def _start_resting(self, base_model: str, out: Out) -> None:
        for name, spec in self._engines.items():
            if spec.base_model == base_model and name not in self._at_work:
                self._start(spec, out, again=True)

    def _start(self, spec: InstanceSpec, out: Out, *, again: bool) -> None:
        self._at_work.add(spec.instance)
        out.append(do.StartEngine(spec, again))

    def _seed(self, base_model: str, step: Step, now_s: float, out: Out, *, again: bool) -> None:
        assert not self._busy_at(base_model), f"{self._busy} hold what local engines get"
        step.seeding = True
        self._end_wait(step, now_s)
        for name, spec in self._engines.items():
            if spec.base_model == base_model and name not in self._at_work:
                self._start(spec, out, again=again)

    def _seeding_changed(self, base_model: str, seeds: bool, now_s: float, out: Out) -> None:
        step = self._step(base_model)
        if seeds:
            self._seed(base_model, step, now_s, out, again=True)
            return
        step.seeding = False
        # Those that are still being started have not joined the manager: they need not be let go.
        self._at_work -= {n for n in self._at_work if self._engines[n].base_model == base_model}
        self._grant_all(now_s, out)
        # Only after the trainers have heard of it do they wait: they may have work.
        out.append(SetTimer(STEP + base_model, now_s))

    def _seeding(self) -> list[str]:
        return [base_model for base_model, step in self._steps.items() if step.seeding]

    # ---- turns ----
    def _turns_changed(self, event: on.LiveTurnsChanged, out: Out) -> None:
        step = self._step(event.base_model)
        if event.opened:
            step.live_turns += 1
            step.turns += 1
            self._look(event.base_model, event.now_s, out)
        else:
            step.live_turns -= 1
            step.tokens += event.tokens
            step.last_response_s = event.now_s

    # ---- trainers ----
    def _gives_up(self, trainer: WorkerId, gone: bool, now_s: float, out: Out) -> None:
        """It wants nothing more; one that is gone holds nothing either."""
        self._wanting.pop(trainer, None)
        self._asking.pop(trainer, None)
        if gone:
            self._busy.pop(trainer, None)
        self._look_at_all(now_s, out)

    def _asked(self, trainer: WorkerId, base_model: str | None, now_s: float, out: Out) -> None:
        self._wanting[trainer] = self._asking[trainer] = base_model
        self._grant_all(now_s, out)
        if trainer in self._asking:
            out.extend(TrainerWanted(now_s, name) for name in self._seeding_at(base_model))

    def _grant_all(self, now_s: float, out: Out) -> None:
        """Whoever has asked for devices on which no local engine works gets them; trainers do not share among each other."""
        for trainer, base_model in list(self._asking.items()):
            if self._seeding_at(base_model):
                continue
            del self._asking[trainer]
            del self._wanting[trainer]
            self._busy[trainer] = base_model
            self._end_waits(base_model, now_s)
            out.append(do.GrantDevices(trainer))

    def _end_waits(self, base_model: str | None, now_s: float) -> None:
        for name, step in self._steps.items():
            if self._one_place(base_model, name):
                self._end_wait(step, now_s)

    def _returned(self, event: on.DevicesReturned, out: Out) -> None:
        base_model = self._busy.pop(event.trainer, None)
        if base_model is not None:
            step = self._step(base_model)
            step.train_s += event.elapsed_s
            step.trained_tokens += event.trained_tokens
            if event.ends_step and step.running:
                self._end(base_model, step, event.now_s, out)
        self._look_at_all(event.now_s, out)

    # ---- steps ----
    def _step(self, base_model: str) -> Step:
        return self._steps.setdefault(base_model, Step())

    def _look_at_all(self, now_s: float, out: Out) -> None:
        for base_model in list(self._steps):
            self._look(base_model, now_s, out)

    def _look(self, base_model: str, now_s: float, out: Out) -> None:
        """Turns are live and trainers idle: a step begins, or the trainer waits in the one that runs."""
        step = self._step(base_model)
        if not step.live_turns or step.seeding or self._holds_or_wants(base_model):
            return
        if not any(spec.base_model == base_model for spec in self._engines.values()):
            return
        if step.running:
            self._trainer_waits(base_model, now_s, out)
            return
        step.number += 1
        step.running = True
        step.turns, step.tokens, step.trained_tokens = step.live_turns, 0, 0
        step.train_s = step.waited_s = 0.0
        out.append(StepBegan(now_s, base_model, step.number, step.expected_turns))
        self._seed(base_model, step, now_s, out, again=False)

    def _trainer_waits(self, base_model: str, now_s: float, out: Out) -> None:
        """Say that the trainer waits, now and as long as it does."""
        step = self._step(base_model)
        if not step.running or step.seeding or not step.live_turns:
            return
        if step.waits_since_s is None:
            step.waits_since_s = now_s
        out.append(SetTimer(STEP + base_model, now_s + NAG_S))
        out.append(TrainerWaits(now_s, base_model, self._trained(step), step.train_s))

    @staticmethod
    def _trained(step: Step) -> int:
        """Tokens trained on, as far as they were told; else whatever came in before training began."""
        if step.trained_tokens:
            return step.trained_tokens
        return step.tokens if step.train_s else 0

    @staticmethod
    def _end_wait(step: Step, now_s: float) -> None:
        if step.waits_since_s is not None:
            step.waited_s += now_s - step.waits_since_s
            step.waits_since_s = None

    def _end(self, base_model: str, step: Step, now_s: float, out: Out) -> None:
        step.running = False
        if not step.announced:
            step.expected_turns = max(step.turns - step.live_turns, 1)
        remote_waited_s = 0.0 if step.live_turns else now_s - step.last_response_s
        out.append(
            StepEnded(
                *(now_s, base_model, step.number, step.trained_tokens or step.tokens),
                *(step.train_s, step.waited_s, remote_waited_s),
            )
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        assert self._at_work <= self._engines.keys(), "an engine that is gone is at work"
        assert self._asking.keys() <= self._wanting.keys(), "asks without wanting"
        for base_model in self._seeding():
            assert not self._busy_at(base_model), f"{base_model} seeds where {self._busy} train"
        for trainer, of in self._asking.items():
            assert self._seeding_at(of), f"{trainer} waits for devices that nobody holds"
        for name in self._at_work:
            assert self._step(self._engines[name].base_model).seeding, f"{name} works unasked"
        for base_model, step in self._steps.items():
            assert step.live_turns >= 0, f"{base_model}: more turns ended than began"
            assert step.running or not step.seeding, f"{base_model} seeds without a step"
