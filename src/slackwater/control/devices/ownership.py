"""Device ownership: a trainer's order leaves once the trainer holds its devices.

Local engines share the trainers' devices, so an order waits until the step tracker has granted
them. What a trainer did with them is then on its job's account.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.control.devices.messages import DeviceCommand, DeviceEvent, GrantDevices
from slackwater.control.jobs.events import JobTrained
from slackwater.control.operations import events as of_operation
from slackwater.control.operations.commands import RunOp, StartWork
from slackwater.control.operations.facts import OpOver
from slackwater.control.steps.events import DevicesAsked, DevicesGranted, DevicesReturned
from slackwater.model.ids import JobId, RequestId, WorkerId
from slackwater.model.operation import OpKind


@dataclass(frozen=True, slots=True)
class _Work:
    """What a trainer does with its devices; an optimizer's step `ends_step`."""

    ticket: int
    job: JobId | None
    waited_s: float
    ends_step: bool


class DeviceOwnership:
    """See the module. `check_integrity()` holds after every event."""

    def __init__(self) -> None:
        self._waiting: dict[WorkerId, StartWork] = {}
        self._busy: dict[WorkerId, _Work] = {}
        self._submitted_s: dict[RequestId, float] = {}

    def handle(self, event: DeviceEvent) -> Sequence[DeviceCommand]:
        """Take one event; return what follows, in order."""
        match event:
            case of_operation.OpSubmitted(now_s, operation):
                self._submitted_s[operation.request] = now_s
            case OpOver(_, _, request):
                self._submitted_s.pop(request, None)
            case StartWork(now_s, worker, job):
                self._waiting[worker] = event
                return (DevicesAsked(now_s, worker, job),)
            case DevicesGranted(now_s, trainer):
                return (self._granted(trainer, now_s),)
            case of_operation.TrainerLost(_, worker):
                self._waiting.pop(worker, None)
                self._busy.pop(worker, None)
            case _:
                return self._returned(event)
        return ()

    def holders(self) -> dict[WorkerId, JobId | None]:
        """Trainers that were given an order, and for which job."""
        return {worker: work.job for worker, work in self._busy.items()}

    def _granted(self, trainer: WorkerId, now_s: float) -> DeviceCommand:
        work = self._waiting.pop(trainer, None)
        if work is None:
            return GrantDevices(trainer)
        order = work.order
        since_s, ends_step = now_s, False
        if isinstance(order, RunOp):
            since_s = self._submitted_s.pop(order.operation.request, now_s)
            ends_step = order.operation.kind is OpKind.OPTIM_STEP and not order.replay
        self._busy[trainer] = _Work(order.ticket, work.job, now_s - since_s, ends_step)
        return order

    def _returned(
        self,
        event: of_operation.TicketDetached | of_operation.TicketDone | of_operation.TicketFailed,
    ) -> Sequence[DeviceCommand]:
        """The trainer has done what it held the devices for; other reports are of no order of
        it.
        """
        work = self._busy.get(event.worker)
        if work is None or work.ticket != event.ticket:
            return ()
        del self._busy[event.worker]
        took_s = 0.0 if isinstance(event, of_operation.TicketFailed) else event.elapsed_s
        ends_step = work.ends_step and isinstance(event, of_operation.TicketDone)
        returned = DevicesReturned(event.now_s, event.worker, took_s, ends_step)
        if work.job is None:
            return (returned,)
        done = (work.job, took_s, work.waited_s, ends_step)
        return JobTrained(event.now_s, *done), returned

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        both = self._waiting.keys() & self._busy.keys()
        assert not both, f"{both} have an order and wait for another"
