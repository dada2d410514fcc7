"""What jobs that take no part have open: after a restart of the control plane turns and operations
are there before their job is placed.
"""

from dataclasses import dataclass, field

from slackwater.control.coschedule import phase_events as on
from slackwater.control.operations.facts import OpOver
from slackwater.model.ids import JobId, RequestId
from slackwater.model.operation import Operation


@dataclass(slots=True)
class OpenWork:
    """Turns, by their sequence numbers, and operations that need a permit."""

    turns: set[int] = field(default_factory=set)
    ops: set[RequestId] = field(default_factory=set)


class UnmanagedWork:
    """Open work by job; of a job without any nothing is kept."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, OpenWork] = {}

    def turn_opened(self, job: JobId, sequence: int) -> None:
        self._of(job).turns.add(sequence)

    def turn_closed(self, job: JobId, sequence: int) -> None:
        if (work := self._jobs.get(job)) is not None:
            work.turns.discard(sequence)
            self._tidy(job, work)

    def op_queued(self, operation: Operation) -> None:
        if operation.kind.needs_permit:
            self._of(operation.job).ops.add(operation.request)

    def heard(self, event: on.OfJob) -> None:
        match event:
            case OpOver(_, job, request) if (work := self._jobs.get(job)) is not None:
                work.ops.discard(request)
                self._tidy(job, work)
            case _:
                pass

    def taken(self, job: JobId) -> OpenWork:
        """The job takes part from now on."""
        return self._jobs.pop(job, OpenWork())

    def given(self, job: JobId, work: OpenWork) -> None:
        """The job takes no part any more, whatever it has open."""
        self._jobs[job] = work
        self._tidy(job, work)

    def _of(self, job: JobId) -> OpenWork:
        return self._jobs.setdefault(job, OpenWork())

    def _tidy(self, job: JobId, work: OpenWork) -> None:
        if not (work.turns or work.ops):
            del self._jobs[job]
