"""Messages for the ranks of a deployment: rank 0 talks to the control plane and forwards.

Every rank receives the same messages in the same order. When idle, rank 0 forwards empty messages
at intervals, so that a dead or frozen rank is noticed within the deadline. The rank that notices
ends its process, which ends all others.
"""

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from slackwater.model.errors import NotFoundError, SlackwaterError
from slackwater.nets.ranks import Ranks, exchange, exit_at_once, fail_together
from slackwater.wire import messages
from slackwater.wire.frames import FrameDecoder
from slackwater.worker.connection import Connection, HasFileno

logger = logging.getLogger(__name__)

_BEAT_S = 2.0
_SOON_S = 0.02  # while parts of a version are being written


class RankLink:
    """One rank's source of messages; `connection` is rank 0's to the control plane.

    A version is published when every rank has written its part: `begin_version` registers what rank
    0 does then; the writing thread calls `report`.
    """

    def __init__(self, ranks: Ranks, connection: Connection | None) -> None:
        self._ranks, self._connection = ranks, connection
        self._lock = threading.Lock()
        self._written: dict[int, str] = {}  # this rank's parts by operation; an error, or empty
        self._finish: dict[int, Callable[[], None]] = {}
        self._parts: dict[int, list[str]] = {}

    def receive(self, timeout_s: float | None, *wakers: HasFileno) -> Sequence[messages.ToWorker]:
        """New messages, maybe none; the same on every rank."""
        with fail_together():
            return self._receive(timeout_s, wakers)
        raise AssertionError("a failed rank has left")

    def _receive(
        self, timeout_s: float | None, wakers: Sequence[HasFileno]
    ) -> Sequence[messages.ToWorker]:
        received: Sequence[messages.ToWorker] = ()
        if self._connection is not None:
            beat_s = _SOON_S if self._finish else _BEAT_S
            wait_s = beat_s if timeout_s is None else min(beat_s, timeout_s)
            received = self._connection.receive(wait_s, *wakers)
            self._ranks.broadcast(b"".join(map(messages.encode, received)))
        else:
            frames = FrameDecoder().feed(self._ranks.broadcast(None))
            received = [messages.decode_to_worker(frame.body) for frame in frames]
        # A broadcast alone does not show a frozen rank: its socket buffer accepts it.
        self._ranks.wait_for_all()
        if self._finish:
            self._count_parts()
        return received

    def send(self, *frames: bytes) -> None:
        """Send to the control plane; only rank 0 does."""
        if self._connection is not None:
            self._connection.send(*frames)

    def begin_version(self, op: int, finish: Callable[[], None]) -> None:
        """Register a version; rank 0 calls `finish` when every rank has written its part."""
        self._finish[op] = finish
        self._parts[op] = []

    def report(self, message: messages.Message) -> None:
        """Record the outcome of this rank's part; called from the writing thread."""
        if isinstance(message, messages.OpDone | messages.OpFailed):
            with self._lock:
                error = message.error if isinstance(message, messages.OpFailed) else ""
                self._written[message.op] = error
        elif isinstance(message, messages.PublishDetached):
            self.send(messages.encode(message))

    @contextlib.contextmanager
    def share_folder(
        self, open_folder: Callable[[], contextlib.AbstractContextManager[Path]]
    ) -> Iterator[Path]:
        """A folder that rank 0 opens for all ranks and closes when all are done with it."""
        ranks = self._ranks
        if not ranks.leads:
            text = json.loads(ranks.broadcast(None))
            if "error" in text:
                raise NotFoundError(text["error"])
            yield Path(text["folder"])
            ranks.wait_for_all()
            return
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(open_folder())
            except (SlackwaterError, OSError) as error:
                ranks.broadcast(json.dumps({"error": str(error)}).encode())
                raise
            ranks.broadcast(json.dumps({"folder": str(folder)}).encode())
            yield folder
            ranks.wait_for_all()

    def agree(self, outcome: int) -> None:
        """End the deployment unless every rank had the same outcome, since their states differ."""
        with fail_together():
            if self._ranks.max_over_ranks(outcome) == -self._ranks.max_over_ranks(-outcome):
                return
        logger.error("leaving: an operation ended differently on another rank")
        exit_at_once()

    def _count_parts(self) -> None:
        with self._lock:
            local_parts, self._written = self._written, {}
        for text in exchange(json.dumps(local_parts).encode()):
            for op, error in json.loads(text).items():
                self._parts[int(op)].append(error)
        complete = [
            op for op, parts in self._parts.items() if len(parts) == self._ranks.layout.ranks
        ]
        for op in complete:
            errors = [error for error in self._parts.pop(op) if error]
            finish = self._finish.pop(op)
            if self._connection is None:
                continue
            try:
                if not errors:
                    finish()
            except (SlackwaterError, OSError) as error:
                errors = [str(error)]
            outcome: messages.Message = messages.OpDone(op, 0.0)
            if errors:
                outcome = messages.OpFailed(op, errors[0], "server", state_lost=False)
            self.send(messages.encode(outcome))
