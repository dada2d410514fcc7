"""How the ranks of a deployment hear what to do: rank 0 talks with the control plane, and forwards.

Every rank takes the same messages in the same order. While nothing comes, rank 0 still forwards an
empty message now and then: a rank that died or froze is noticed within the deadline, and whoever
notices ends its process, which ends the others.
"""

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from slackwater.model.errors import NotFoundError, SlackwaterError
from slackwater.nets.ranks import Ranks, fail_together, leave_at_once
from slackwater.wire import messages
from slackwater.wire.frames import FrameDecoder
from slackwater.worker.connection import Connection, HasFileno

logger = logging.getLogger(__name__)

_BEAT_S = 2.0
_SOON_S = 0.02  # while parts of a version are being written


class RankLink:
    """One rank's source of messages; `connection` is rank 0's to the control plane.

    A version is published when every rank has written its part: `begin_version` says what rank 0
    does then, `report` is what the thread that writes tells.
    """

    def __init__(self, ranks: Ranks, connection: Connection | None) -> None:
        self._ranks, self._connection = ranks, connection
        self._lock = threading.Lock()
        self._written: dict[int, str] = {}  # this rank's parts by operation; an error, or empty
        self._finish: dict[int, Callable[[], None]] = {}
        self._parts: dict[int, list[str]] = {}

    def receive(self, timeout_s: float | None, *wakers: HasFileno) -> Sequence[messages.ToWorker]:
        """What came, maybe nothing; every rank gets the same."""
        with fail_together():
            return self._receive(timeout_s, wakers)
        raise AssertionError("a failed rank has left")

    def _receive(
        self, timeout_s: float | None, wakers: Sequence[HasFileno]
    ) -> Sequence[messages.ToWorker]:
        got: Sequence[messages.ToWorker] = ()
        if self._connection is not None:
            beat_s = _SOON_S if self._finish else _BEAT_S
            wait_s = beat_s if timeout_s is None else min(beat_s, timeout_s)
            got = self._connection.receive(wait_s, *wakers)
            self._ranks.broadcast(b"".join(map(messages.encode, got)))
        else:
            frames = FrameDecoder().feed(self._ranks.broadcast(None))
            got = [messages.decode_to_worker(frame.body) for frame in frames]
        # A broadcast alone may end in a frozen rank's socket buffer.
        self._ranks.wait_for_all()
        if self._finish:
            self._count_parts()
        return got

    def send(self, *frames: bytes) -> None:
        """Rank 0 speaks for all."""
        if self._connection is not None:
            self._connection.send(*frames)

    def begin_version(self, op: int, finish: Callable[[], None]) -> None:
        """Every rank writes its part now; rank 0 calls `finish` when all are written."""
        self._finish[op] = finish
        self._parts[op] = []

    def report(self, message: messages.Message) -> None:
        """What became of this rank's part; called from the thread that writes it."""
        if isinstance(message, messages.OpDone | messages.OpFailed):
            with self._lock:
                error = message.error if isinstance(message, messages.OpFailed) else ""
                self._written[message.op] = error
        elif isinstance(message, messages.PublishDetached):
            self.send(messages.encode(message))

    @contextlib.contextmanager
    def share_folder(
        self, opened: Callable[[], contextlib.AbstractContextManager[Path]]
    ) -> Iterator[Path]:
        """A folder that rank 0 opens, for all ranks; it is closed when all are done with it."""
        ranks = self._ranks
        if not ranks.leads:
            said = json.loads(ranks.broadcast(None))
            if "error" in said:
                raise NotFoundError(said["error"])
            yield Path(said["folder"])
            ranks.wait_for_all()
            return
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(opened())
            except (SlackwaterError, OSError) as error:
                ranks.broadcast(json.dumps({"error": str(error)}).encode())
                raise
            ranks.broadcast(json.dumps({"folder": str(folder)}).encode())
            yield folder
            ranks.wait_for_all()

    def agree(self, outcome: int) -> None:
        """End the deployment unless every rank had the same outcome: their states differ now."""
        with fail_together():
            if self._ranks.largest(outcome) == -self._ranks.largest(-outcome):
                return
        logger.error("leaving: an operation ended differently on another rank")
        leave_at_once()

    def _count_parts(self) -> None:
        with self._lock:
            own, self._written = self._written, {}
        for said in self._ranks.exchange(json.dumps(own).encode()):
            for op, error in json.loads(said).items():
                self._parts[int(op)].append(error)
        whole = [op for op, parts in self._parts.items() if len(parts) == self._ranks.layout.ranks]
        for op in whole:
            errors = [error for error in self._parts.pop(op) if error]
            finish = self._finish.pop(op)
            if self._connection is None:
                continue
            try:
                if not errors:
                    finish()
            except (SlackwaterError, OSError) as error:
                errors = [str(error)]
            done: messages.Message = messages.OpDone(op, 0.0)
            if errors:
                done = messages.OpFailed(op, errors[0], "server", state_lost=False)
            self.send(messages.encode(done))
