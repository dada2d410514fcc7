"""One model's queue of operations, its replay log and the poison rule.

Operations run in the order of `seq`. A rejected operation uses up its number. A missing number is
given up after a timeout and counts as a rejected forward_backward, since it may have been one.

**Poison.** A rejected, failed or given-up forward_backward poisons the accumulated gradients: the
next optim_step fails instead of using incomplete gradients, which are then dropped, and later
operations run as usual. A load_weights replaces the accumulated gradients, and so ends the poison.
"""

from dataclasses import dataclass, field

from slackwater.model.ids import NOBODY, JobId, ModelId, TenantId, WorkerId
from slackwater.model.operation import Operation, OperationRecord, OpKind, OpStatus


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One step of a replay: an operation, or the drop of gradients in its place if not `ran`."""

    operation: Operation
    ran: bool


@dataclass(frozen=True, slots=True)
class StateTransfer:
    """A move of the state to another trainer's node."""

    ticket: int
    to: WorkerId


@dataclass(slots=True)
class ModelQueue:
    """The mutable state of one model; only the controller touches it."""

    model: ModelId
    owner: TenantId = NOBODY
    job: JobId | None = None
    next_seq: int = 0
    watched_seq: int | None = None  # the missing number with a timer
    waiting: dict[int, Operation] = field(default_factory=dict)
    refused: dict[int, tuple[Operation, str]] = field(default_factory=dict)
    poison: str | None = None
    log: list[LogEntry] = field(default_factory=list)
    applied: int = 0  # entries of the log that the trainer has applied
    saved_seq: int | None = None
    log_cost_s: float = 0.0
    snapshot_cost_s: float = 0.0
    worker: WorkerId | None = None
    has_state: bool = False  # the trainer has the state from which the log starts
    move: StateTransfer | None = None  # in progress: the state is not used
    attempts: int = 0
    failed_restores: int = 0
    furthest_applied: int = 0  # by any trainer: progress resets `failed_restores`
    detached: dict[int, Operation] = field(default_factory=dict)  # unwritten publishes

    def head(self) -> Operation | None:
        """The next operation, if it has arrived."""
        return self.waiting.get(self.next_seq)

    def has_gap(self) -> bool:
        """Whether later operations wait for a number that has not arrived."""
        return bool(self.waiting) and self.next_seq not in self.waiting

    def has_work(self) -> bool:
        """Whether something could run on a free trainer. A load waits for detached
        publishes, which a replay must repeat if their trainer is lost.
        """
        head = self.head()
        if self.detached and self.applied < len(self.log):
            return True
        return head is not None and not (head.kind is OpKind.LOAD and self.detached)

    def has_seq(self, seq: int) -> bool:
        """Whether the number is used up, waiting or refused."""
        return seq < self.next_seq or seq in self.waiting or seq in self.refused

    def skip_refused(self) -> None:
        """Move past rejected numbers."""
        while self.next_seq in self.refused:
            operation, reason = self.refused.pop(self.next_seq)
            self._record_end(operation, ran=False, why=f"was rejected: {reason}")

    def give_up_gap(self) -> None:
        """Use up the missing numbers before the first operation that has arrived."""
        first = min(self.waiting)
        for seq in sorted(seq for seq in self.refused if seq < first):
            self._pass_over(seq)
            self.skip_refused()
        self._pass_over(first)

    def _pass_over(self, seq: int) -> None:
        """Use up the numbers before `seq`, which never arrived."""
        if self.next_seq < seq:
            self._poison_gradients(self.next_seq, "never arrived")
            self.next_seq = seq

    def finish_head(self) -> None:
        """The head ran and had its effect."""
        self._record_end(self.waiting.pop(self.next_seq), ran=True, why="")
        self.skip_refused()

    def detach_head(self) -> Operation:
        """Detach the publish at the head: the trainer has its copy and is free. Until the copy is
        written, a replay publishes again.
        """
        operation = self.waiting.pop(self.next_seq)
        self.next_seq = operation.seq + 1
        self.attempts = 0
        self.detached[operation.seq] = operation
        self.log.append(LogEntry(operation, ran=True))
        self.applied += 1
        return operation

    def finish_detached(self, operation: Operation) -> None:
        """A detached publish is written or given up: remove it from the log."""
        del self.detached[operation.seq]
        index = next(i for i, entry in enumerate(self.log) if entry.operation.seq == operation.seq)
        del self.log[index]
        self.applied -= index < self.applied
        self.furthest_applied -= index < self.furthest_applied

    def fail_head(self, why: str) -> Operation:
        """The head failed without an effect."""
        operation = self.waiting.pop(self.next_seq)
        self._record_end(operation, ran=False, why=f"failed: {why}")
        self.skip_refused()
        return operation

    def _record_end(self, operation: Operation, *, ran: bool, why: str) -> None:
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
            self._poison_gradients(operation.seq, why)

    def _poison_gradients(self, seq: int, why: str) -> None:
        if self.poison is None:
            self.poison = f"forward_backward seq {seq} {why}"

    def mark_saved(self, seq: int) -> None:
        """The state after `seq` is saved: the log starts after it."""
        dropped = sum(entry.operation.seq <= seq for entry in self.log)
        del self.log[:dropped]
        self.applied = max(self.applied - dropped, 0)
        self.furthest_applied = self.applied
        self.saved_seq = seq
        self.log_cost_s = 0.0

    def max_usable_seq(self) -> int:
        """The last operation that a state found on a node may have; -1 with unwritten publishes."""
        return -1 if self.detached else self.next_seq - 1

    def mark_applied(self, reached: int) -> None:
        """The trainer has the effects of all operations up to `reached`."""
        self.applied = sum(entry.operation.seq <= reached for entry in self.log)

    def lose_state(self) -> None:
        """No trainer has this model any more."""
        self.worker = None
        self.move = None
        self.has_state = False
        self.applied = 0

    def adopt(self, saved_seq: int | None, records: tuple[OperationRecord, ...]) -> None:
        """Restore the queue from the durable log. A gap before a number that ran was given up.

        A failed number after another gap may have been rejected early: the missing number may still
        arrive.
        """
        self.saved_seq = saved_seq
        self.next_seq = 0 if saved_seq is None else saved_seq + 1
        ran = [r.operation.seq for r in records if r.status is OpStatus.DONE]
        for record in sorted(records, key=lambda record: record.operation.seq):
            operation = record.operation
            self.job = operation.job or self.job
            if record.status is OpStatus.WAITING and operation.seq < max(ran, default=-1):
                self._pass_over(operation.seq)  # later ones ran: it was a detached publish
                self.waiting[operation.seq] = operation
                self.detach_head()
            elif record.status is OpStatus.WAITING:
                self.waiting[operation.seq] = operation
            elif self.waiting or self.next_seq < operation.seq > max(ran, default=-1):
                self.refused[operation.seq] = (operation, "before the service was restarted")
            else:
                self._pass_over(operation.seq)
                done = record.status is OpStatus.DONE
                self._record_end(operation, ran=done, why="failed before the service was restarted")
        self.applied = 0

    def check_integrity(self) -> None:
        """Raise AssertionError if the queue is inconsistent."""
        assert all(seq >= self.next_seq for seq in self.waiting), "an operation was passed over"
        assert not set(self.waiting) & set(self.refused)
        assert self.applied <= len(self.log)
        seqs = [entry.operation.seq for entry in self.log]
        assert seqs == sorted(set(seqs)), "the log is out of order"
        assert self.saved_seq is None or all(seq > self.saved_seq for seq in seqs)
        assert self.move is None or self.worker is not None, "a state moves that no trainer has"
        assert self.worker is not None or self.applied == 0
        assert self.detached.keys() <= set(seqs), "a publish that no replay would make again"
        assert self.next_seq not in self.refused, "a refused number blocks the queue"
        watched = not self.has_gap() or self.watched_seq == self.next_seq
        assert watched, "no timer runs for a missing number"
