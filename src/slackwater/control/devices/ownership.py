"""Device ownership: a trainer's order leaves when the step tracker has granted its devices, and the
time for which the trainer has them is charged to its job.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.control.devices.messages import DeviceCommand, DeviceEvent, GrantDevices
from slackwater.control.jobs.events import JobTrained
from slackwater.control.operations.commands import RunOp, StartWork
from slackwater.control.operations.events import (
    OpSubmitted,
    TicketDetached,
    TicketDone,
    TicketFailed,
    TrainerLost,
)
from slackwater.control.operations.facts import OpEnded
from slackwater.control.steps.events import DevicesAsked, DevicesGranted, DevicesReturned
from slackwater.model.ids import JobId, RequestId, WorkerId
from slackwater.model.operation import OpKind


@dataclass(frozen=True, slots=True)
class _RunningWork:
    """What a trainer does with its devices; an optimizer step `ends_step`."""

    ticket: int
    job: JobId | None
    waited_s: float
    ends_step: bool


class DeviceOwnership:
    """Holds a trainer's order back until the trainer has its devices."""

    def __init__(self) -> None:
        self._waiting: dict[WorkerId, StartWork] = {}
        self._running: dict[WorkerId, _RunningWork] = {}
        self._submitted_s: dict[RequestId, float] = {}

    def handle(self, event: DeviceEvent) -> Sequence[DeviceCommand]:
        """Take one event; return what follows, in order."""
        match event:
            case OpSubmitted(now_s, operation):
                self._submitted_s[operation.request] = now_s
            case OpEnded(_, _, request):
                self._submitted_s.pop(request, None)
            case StartWork(now_s, worker, job):
                self._waiting[worker] = event
                return (DevicesAsked(now_s, worker, job),)
            case DevicesGranted(now_s, trainer):
                return (self._start(trainer, now_s),)
            case TrainerLost(_, worker):
                self._waiting.pop(worker, None)
                self._running.pop(worker, None)
            case _:
                return self._finish(event)
        return ()

    def holders(self) -> dict[WorkerId, JobId | None]:
        """The trainers with an order, and the jobs that it is for."""
        return {worker: work.job for worker, work in self._running.items()}

    def _start(self, trainer: WorkerId, now_s: float) -> DeviceCommand:
        work = self._waiting.pop(trainer, None)
        if work is None:
            return GrantDevices(trainer)
        order = work.order
        since_s, ends_step = now_s, False
        if isinstance(order, RunOp):
            since_s = self._submitted_s.pop(order.operation.request, now_s)
            ends_step = order.operation.kind is OpKind.OPTIM_STEP and not order.replay
        running = _RunningWork(order.ticket, work.job, now_s - since_s, ends_step)
        self._running[trainer] = running
        return order

    def _finish(self, event: TicketDetached | TicketDone | TicketFailed) -> Sequence[DeviceCommand]:
        """Return the devices, unless the report is on other work than they were granted for."""
        now_s, work = event.now_s, self._running.get(event.worker)
        if work is None or work.ticket != event.ticket:
            return ()
        del self._running[event.worker]
        elapsed_s = 0.0 if isinstance(event, TicketFailed) else event.elapsed_s
        ends_step = work.ends_step and isinstance(event, TicketDone)
        returned = DevicesReturned(now_s, event.worker, elapsed_s, ends_step)
        if work.job is None:
            return (returned,)
        return JobTrained(now_s, work.job, elapsed_s, work.waited_s, ends_step), returned

    def check_integrity(self) -> None:
        both = self._waiting.keys() & self._running.keys()
        assert not both, f"{both} have an order and wait for another"
