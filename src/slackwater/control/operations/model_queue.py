"""One model's queue of operations: what comes next, what a replay needs, and the poison rule.

Operations run in the order of `seq`. A rejected number is used up. A missing number is given up
after a while and counts as a rejected forward_backward, since it may have been one.

**Poison.** A rejected, failed or given-up forward_backward spoils the accumulated gradients: the
next optim_step fails instead of using incomplete gradients, which are then dropped, and later
operations run as usual. A load_weights replaces what was accumulated, and so cleans it.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from slackwater.model.ids import NOBODY, JobId, ModelId, TenantId, WorkerId
from slackwater.model.operation import Operation, OperationRecord, OpKind, OpStatus


class Residency(StrEnum):
    """Whether the trainer has the state that the log starts from."""

    ABSENT = "absent"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One step of a replay: an operation, or (not `ran`) gradients dropped in its place."""

    operation: Operation
    ran: bool


@dataclass(frozen=True, slots=True)
class StateTransfer:
    """The state is sent to the node of another trainer."""

    ticket: int
    to: WorkerId


@dataclass(slots=True)
class ModelQueue:
    """The mutable state of one model; only the controller touches it."""

    model: ModelId
    owner: TenantId = NOBODY
    job: JobId | None = None
    next_seq: int = 0
    watched_seq: int | None = None  # the missing number whose clock runs
    waiting: dict[int, Operation] = field(default_factory=dict)
    refused: dict[int, tuple[Operation, str]] = field(default_factory=dict)
    poison: str | None = None
    log: list[LogEntry] = field(default_factory=list)
    applied: int = 0  # entries of the log whose effect the trainer has
    saved_seq: int | None = None
    log_cost_s: float = 0.0
    snapshot_cost_s: float = 0.0
    worker: WorkerId | None = None
    residency: Residency = Residency.ABSENT
    move: StateTransfer | None = None  # under way: nothing else is done with the state
    attempts: int = 0
    failed_restores: int = 0
    furthest_applied: int = 0  # of this log, by any trainer: progress resets `failed_restores`
    aside: dict[int, Operation] = field(default_factory=dict)  # publishes that are being written

    def head(self) -> Operation | None:
        """The operation whose turn it is, if it is here."""
        return self.waiting.get(self.next_seq)

    def has_gap(self) -> bool:
        """Later operations wait for a number that has not come."""
        return bool(self.waiting) and self.next_seq not in self.waiting

    def has_work(self) -> bool:
        """Whether something could run on a free trainer. A load waits for detached publishes, which
        must be replayed if their trainer was lost.
        """
        head = self.head()
        if self.aside and self.applied < len(self.log):
            return True
        return head is not None and not (head.kind is OpKind.LOAD and self.aside)

    def knows(self, seq: int) -> bool:
        """The number is used up, waiting or refused."""
        return seq < self.next_seq or seq in self.waiting or seq in self.refused

    def skip_refused(self) -> None:
        """Move past numbers that were refused at the door."""
        while self.next_seq in self.refused:
            operation, reason = self.refused.pop(self.next_seq)
            self._over(operation, ran=False, why=f"was rejected: {reason}")

    def give_up_gap(self) -> None:
        """Use up the missing numbers before the first operation that has arrived."""
        first = min(self.waiting)
        for seq in sorted(seq for seq in self.refused if seq < first):
            self._pass_over(seq)
            self.skip_refused()
        self._pass_over(first)

    def _pass_over(self, seq: int) -> None:
        """Use up the numbers before `seq`, none of which came."""
        if self.next_seq < seq:
            self._spoil(self.next_seq, "never arrived")
            self.next_seq = seq

    def finish_head(self) -> None:
        """The head ran and had its effect."""
        self._over(self.waiting.pop(self.next_seq), ran=True, why="")
        self.skip_refused()

    def set_head_aside(self) -> Operation:
        """The trainer is free with its copy; until that is written, a replay publishes it again."""
        operation = self.waiting.pop(self.next_seq)
        self.next_seq = operation.seq + 1
        self.attempts = 0
        self.aside[operation.seq] = operation
        self.log.append(LogEntry(operation, ran=True))
        self.applied += 1
        return operation

    def finish_aside(self, operation: Operation) -> None:
        """What was set aside is written, or given up: a replay needs it no more."""
        del self.aside[operation.seq]
        place = next(i for i, entry in enumerate(self.log) if entry.operation.seq == operation.seq)
        del self.log[place]
        self.applied -= place < self.applied
        self.furthest_applied -= place < self.furthest_applied

    def fail_head(self, why: str) -> Operation:
        """The head is over and had no effect."""
        operation = self.waiting.pop(self.next_seq)
        self._over(operation, ran=False, why=f"failed: {why}")
        self.skip_refused()
        return operation

    def _over(self, operation: Operation, *, ran: bool, why: str) -> None:
        self.next_seq = operation.seq + 1
        self.attempts = 0
        if operation.kind is OpKind.OPTIM_STEP:
            self.poison = None
            self.log.append(LogEntry(operation, ran))
            self.applied += ran
        elif ran and operation.kind.changes_state:
            if operation.kind is OpKind.LOAD:
                self.poison = None
            self.log.append(LogEntry(operation, ran))
            self.applied += 1
        elif operation.kind is OpKind.FORWARD_BACKWARD:
            self._spoil(operation.seq, why)

    def _spoil(self, seq: int, why: str) -> None:
        if self.poison is None:
            self.poison = f"forward_backward seq {seq} {why}"

    def saved(self, seq: int) -> None:
        """The state after `seq` is durable: the log begins after it."""
        dropped = sum(entry.operation.seq <= seq for entry in self.log)
        del self.log[:dropped]
        self.applied = max(self.applied - dropped, 0)
        self.furthest_applied = self.applied
        self.saved_seq = seq
        self.log_cost_s = 0.0

    def usable_state(self) -> int:
        """The last operation that a state found elsewhere may have; -1 with unwritten publishes."""
        return -1 if self.aside else self.next_seq - 1

    def caught_up(self, reached: int) -> None:
        """The trainer has the effects of all operations up to `reached`."""
        self.applied = sum(entry.operation.seq <= reached for entry in self.log)

    def lose_state(self) -> None:
        """The trainer no longer has this model."""
        self.worker = None
        self.move = None
        self.residency = Residency.ABSENT
        self.applied = 0

    def adopt(self, saved_seq: int | None, records: tuple[OperationRecord, ...]) -> None:
        """Take over from the durable log; a hole before a number that ran was given up.

        A failed number behind a hole may have been rejected before the missing one, which is
        awaited.
        """
        self.saved_seq = saved_seq
        self.next_seq = 0 if saved_seq is None else saved_seq + 1
        ran = [r.operation.seq for r in records if r.status is OpStatus.DONE]
        for record in sorted(records, key=lambda record: record.operation.seq):
            operation = record.operation
            self.job = operation.job or self.job
            if record.status is OpStatus.WAITING and operation.seq < max(ran, default=-1):
                self._pass_over(operation.seq)  # later ones ran: it was set aside
                self.waiting[operation.seq] = operation
                self.set_head_aside()
            elif record.status is OpStatus.WAITING:
                self.waiting[operation.seq] = operation
            elif self.waiting or self.next_seq < operation.seq > max(ran, default=-1):
                self.refused[operation.seq] = (operation, "before the service was restarted")
            else:
                self._pass_over(operation.seq)
                done = record.status is OpStatus.DONE
                self._over(operation, ran=done, why="failed before the service was restarted")
        self.applied = 0

    def check_integrity(self) -> None:
        """Raise AssertionError if the queue is inconsistent."""
        assert all(seq >= self.next_seq for seq in self.waiting), "an operation was passed over"
        assert not set(self.waiting) & set(self.refused)
        assert self.applied <= len(self.log)
        seqs = [entry.operation.seq for entry in self.log]
        assert seqs == sorted(set(seqs)), "the log is out of order"
        assert self.saved_seq is None or all(seq > self.saved_seq for seq in seqs)
        assert self.move is None or self.worker is not None, "a state moves from nowhere"
        assert self.worker is not None or self.applied == 0
        assert self.aside.keys() <= set(seqs), "a publish that no replay would make again"
        assert self.next_seq not in self.refused, "a refused number blocks the line"
        watched = not self.has_gap() or self.watched_seq == self.next_seq
        assert watched, "nobody watches for a missing number"
