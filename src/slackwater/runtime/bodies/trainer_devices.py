"""The devices that trainers share with local engines, live: the step book decides who has them, here somebody waits for them."""

import asyncio
from collections.abc import Callable

from slackwater.control.brain import BrainEvent
from slackwater.control.jobs.events import JobTrained
from slackwater.control.steps import events as on
from slackwater.model.ids import JobId, WorkerId
from slackwater.runtime.bodies.lending import LendingBody


class TrainerDevices:
    """`feed` tells the brain; `granted` is its answer."""

    def __init__(self, feed: Callable[[BrainEvent], None]) -> None:
        self._feed = feed
        self._wanted: set[WorkerId] = set()
        self._waiting: dict[WorkerId, asyncio.Future[bool]] = {}
        self._job: dict[WorkerId, tuple[JobId, float]] = {}
        self.lending: LendingBody | None = None

    def want(self, trainer: WorkerId) -> None:
        """The trainer has work: `take` or `unwant` follows. Until then no local engine starts."""
        self._wanted.add(trainer)
        self._feed(on.DevicesWanted(_now_s(), trainer))

    def unwant(self, trainer: WorkerId) -> None:
        self._wanted.discard(trainer)
        self._feed(on.DevicesUnwanted(_now_s(), trainer))

    async def take(
        self, trainer: WorkerId, job: JobId | None, since_s: float | None = None
    ) -> bool:
        """Hold the devices from the return on, until `done`; False if the trainer is gone by then.

        What is done is on the account of `job`, which has waited since `since_s`.
        """
        if trainer not in self._wanted:
            return False
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[trainer] = answer
        self._feed(on.DevicesAsked(_now_s(), trainer, job))
        got = await answer
        if got and job is not None:
            now_s = _now_s()
            self._job[trainer] = (job, 0.0 if since_s is None else now_s - since_s)
            if self.lending is not None:
                self.lending.trains(job)
        return got

    def granted(self, trainer: WorkerId) -> None:
        """The book's word."""
        self._wanted.discard(trainer)
        self._waiting.pop(trainer).set_result(True)

    def done(self, trainer: WorkerId, elapsed_s: float = 0.0, *, ends_step: bool = False) -> None:
        """The trainer has done what it took the devices for."""
        job, waited_s = self._job.pop(trainer, (None, 0.0))
        if job is not None:
            self._feed(JobTrained(_now_s(), job, elapsed_s, waited_s))
            if ends_step and self.lending is not None:
                self.lending.stepped(job)
        self._feed(on.DevicesReturned(_now_s(), trainer, elapsed_s, ends_step))

    def trainer_lost(self, trainer: WorkerId) -> None:
        self._wanted.discard(trainer)
        self._job.pop(trainer, None)
        waiting = self._waiting.pop(trainer, None)
        if waiting is not None:
            waiting.set_result(False)
        self._feed(on.TrainerGone(_now_s(), trainer))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
