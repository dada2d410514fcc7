"""Training nodes as rollout instances, live (RLBoost 4.2): local engines work while trainers have nothing to do.

Local engines and trainers share their processors, so only one kind works at a time. A base model's step begins with the
first turn that comes while no trainer works, and ends with an optim_step. When the devices change hands is the
rollout manager's decision (`EndSeeding`, `ResumeSeeding`); here is only who holds them, and who waits.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from slackwater.control.rollout import events as on
from slackwater.model.ids import JobId, WorkerId
from slackwater.runtime.bodies.timers import Timers
from slackwater.wire.messages import EngineFacts

logger = logging.getLogger(__name__)

NAG_S = 5.0


@dataclass(slots=True)
class _Step:
    """A base model's step: the present one, or the last."""

    number: int = 0
    running: bool = False
    seeding: bool = False
    live_turns: int = 0
    turns: int = 0
    expected_turns: int = 1
    tokens: int = 0
    train_s: float = 0.0
    waited_s: float = 0.0
    waits_since_s: float | None = None
    last_response_s: float = 0.0


class LentTrainers:
    """`feed` tells the rollout manager; `join` makes a local engine an instance. Without local engines it does nothing."""

    def __init__(
        self,
        feed: Callable[[on.RolloutEvent], None],
        join: Callable[[WorkerId, EngineFacts], None],
    ) -> None:
        self._feed = feed
        self._join = join
        self._engines: dict[WorkerId, EngineFacts] = {}
        self._at_work: set[WorkerId] = set()
        self._steps: dict[JobId, _Step] = {}
        self._busy: dict[WorkerId, JobId | None] = {}
        self._wanting: set[WorkerId] = set()
        self._handed_over = asyncio.Event()
        self._handed_over.set()
        self._timers = Timers(lambda name: self._trainer_waits(JobId(name)))

    # ---- local engines ----
    def engine_joined(self, worker: WorkerId, facts: EngineFacts) -> None:
        """A local engine is up; it works from the next step on, or now if its base model seeds."""
        self._engines[worker] = facts
        step = self._step(JobId(facts.base_model))
        if step.seeding:
            self._start(worker)
        self._look(JobId(facts.base_model))

    def engine_lost(self, worker: WorkerId) -> None:
        self._engines.pop(worker, None)
        self._at_work.discard(worker)

    def keeps(self, worker: WorkerId) -> bool:
        """Whether it is a local engine that was let go: it rests until it is needed again, and says nothing that counts."""
        return worker in self._engines and worker not in self._at_work

    def has(self, worker: WorkerId) -> bool:
        """Whether it is a local engine."""
        return worker in self._engines

    def released(self, worker: WorkerId) -> None:
        """The manager has let it go."""
        self._at_work.discard(worker)

    def resting(self) -> dict[WorkerId, EngineFacts]:
        return {worker: facts for worker, facts in self._engines.items() if self.keeps(worker)}

    def _start(self, worker: WorkerId) -> None:
        self._at_work.add(worker)
        self._join(worker, self._engines[worker])

    # ---- turns ----
    def turn_submitted(self, job: JobId) -> None:
        step = self._step(job)
        step.live_turns += 1
        step.turns += 1
        self._look(job)

    def turn_ended(self, job: JobId, tokens: int) -> None:
        step = self._step(job)
        step.live_turns -= 1
        step.tokens += tokens
        step.last_response_s = _now_s()

    # ---- trainers ----
    def want(self, trainer: WorkerId) -> None:
        """The trainer has work: `take` or `unwant` follows. Until then no local engine starts."""
        self._wanting.add(trainer)

    def unwant(self, trainer: WorkerId) -> None:
        self._wanting.discard(trainer)
        self._look_at_all()

    async def take(self, trainer: WorkerId, base_model: str | None) -> bool:
        """Wait until no local engine works, then hold the devices until `done`; False if the trainer is gone by then."""
        while not self._handed_over.is_set() and trainer in self._wanting:
            for seeding in [job for job, step in self._steps.items() if step.seeding]:
                self._feed(on.TrainerWanted(_now_s(), seeding))
            await self._handed_over.wait()
        if trainer not in self._wanting:
            return False
        self._wanting.discard(trainer)
        self._busy[trainer] = None if base_model is None else JobId(base_model)
        for step in self._steps.values():
            self._end_wait(step)
        return True

    def done(self, trainer: WorkerId, elapsed_s: float = 0.0, *, ends_step: bool = False) -> None:
        """The trainer has done what it took the devices for."""
        job = self._busy.pop(trainer, None)
        if job is not None:
            step = self._step(job)
            step.train_s += elapsed_s
            if ends_step and step.running:
                self._end(job, step)
        self._look_at_all()

    def trainer_lost(self, trainer: WorkerId) -> None:
        self._wanting.discard(trainer)
        self.done(trainer)

    # ---- commands of the manager ----
    def end_seeding(self, job: JobId, reason: str) -> None:
        logger.info("seeding ended job=%s reason=%s", job, reason)
        self._step(job).seeding = False
        if not any(step.seeding for step in self._steps.values()):
            assert not self._at_work, f"{self._at_work} work on devices that the trainers get"
            self._handed_over.set()
        asyncio.get_running_loop().call_soon(self._look, job)

    def resume_seeding(self, job: JobId, reason: str) -> None:
        logger.info("seeding resumed job=%s reason=%s", job, reason)
        self._seed(job, self._step(job))

    def close(self) -> None:
        self._timers.cancel_all()

    # ---- steps ----
    def _step(self, job: JobId) -> _Step:
        return self._steps.setdefault(job, _Step())

    def _look_at_all(self) -> None:
        for job in list(self._steps):
            self._look(job)

    def _look(self, job: JobId) -> None:
        """Turns are live and trainers idle: a step begins, or the trainer waits in the one that runs."""
        step = self._step(job)
        local = any(JobId(facts.base_model) == job for facts in self._engines.values())
        if not local or not step.live_turns or step.seeding or self._busy or self._wanting:
            return
        if step.running:
            self._trainer_waits(job)
            return
        step.number += 1
        step.running = True
        step.turns, step.tokens, step.train_s, step.waited_s = step.live_turns, 0, 0.0, 0.0
        self._feed(on.StepBegan(_now_s(), job, step.number, step.expected_turns))
        self._seed(job, step)

    def _seed(self, job: JobId, step: _Step) -> None:
        assert not self._busy, f"{self._busy} hold the devices that local engines get"
        step.seeding = True
        self._end_wait(step)
        self._handed_over.clear()
        for worker, facts in list(self._engines.items()):
            if JobId(facts.base_model) == job and worker not in self._at_work:
                self._start(worker)

    def _trainer_waits(self, job: JobId) -> None:
        """Say that the trainer waits, now and as long as it does."""
        step = self._step(job)
        idle = step.running and not step.seeding and not self._busy and not self._wanting
        if not idle or not step.live_turns:
            return
        if step.waits_since_s is None:
            step.waits_since_s = _now_s()
        self._timers.set(job, _now_s() + NAG_S)
        self._feed(on.TrainerWaits(_now_s(), job, step.tokens if step.train_s else 0, step.train_s))

    def _end_wait(self, step: _Step) -> None:
        if step.waits_since_s is not None:
            step.waited_s += _now_s() - step.waits_since_s
            step.waits_since_s = None

    def _end(self, job: JobId, step: _Step) -> None:
        step.running = False
        step.expected_turns = max(step.turns - step.live_turns, 1)
        remote_waited_s = 0.0 if step.live_turns else _now_s() - step.last_response_s
        self._feed(
            on.StepEnded(
                *(_now_s(), job, step.number, step.tokens),
                *(step.train_s, step.waited_s, remote_waited_s),
            )
        )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
