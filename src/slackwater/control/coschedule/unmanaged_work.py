"""Open work of jobs that the co-scheduler does not manage (yet): after a restart of the control
plane, turns and operations are there before their job is placed.
"""

from dataclasses import dataclass, field

from slackwater.model.ids import JobId, RequestId


@dataclass(slots=True)
class OpenWork:
    """Turns by sequence number, and operations that need a permit."""

    turns: set[int] = field(default_factory=set)
    ops: set[RequestId] = field(default_factory=set)


class UnmanagedWork:
    """Open work by job, as long as there is any."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, OpenWork] = {}

    def open_turn(self, job: JobId, sequence: int) -> None:
        self._jobs.setdefault(job, OpenWork()).turns.add(sequence)

    def open_op(self, job: JobId, request: RequestId) -> None:
        self._jobs.setdefault(job, OpenWork()).ops.add(request)

    def close_turn(self, job: JobId, sequence: int) -> None:
        if (work := self._jobs.get(job)) is not None:
            work.turns.discard(sequence)
            self.put(job, work)

    def close_op(self, job: JobId, request: RequestId) -> None:
        if (work := self._jobs.get(job)) is not None:
            work.ops.discard(request)
            self.put(job, work)

    def pop(self, job: JobId) -> OpenWork:
        """The open work of a job that is managed from now on."""
        return self._jobs.pop(job, OpenWork())

    def put(self, job: JobId, work: OpenWork) -> None:
        """Keep the open work of a job that is no longer managed."""
        self._jobs[job] = work
        if not (work.turns or work.ops):
            del self._jobs[job]
