"""Pulls versions in a thread beside the decode loop; they become visible between two steps."""

import os
import queue
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.engine.engine import Engine
from slackwater.engine.versions import WeightSlot
from slackwater.model.errors import SlackwaterError
from slackwater.model.payload import Payload
from slackwater.wire import messages
from slackwater.worker.weight_lane import HostVersionCopy, WeightLane, lora_of

_NICENESS = 19  # hardly any of a core that a step wants too, all of one that is idle


@dataclass(slots=True)
class _Pull:
    """A version on its way: `taken` once it is in host memory, with `room` once whole weights have
    a place in the engine, which no request sees yet.
    """

    version: str
    way: tuple[Payload, ...]
    keep: bool
    taken: HostVersionCopy | None = None
    room: WeightSlot | None = None
    error: Exception | None = None


class VersionPuller:
    """Pulls versions into an engine; call every method from the thread that steps it.

    `fileno()` becomes readable when `settle()` has work, so a loop may wait on it.
    """

    def __init__(self, engine: Engine, lane: WeightLane) -> None:
        self._engine = engine
        self._lane = lane
        self._to_do: queue.SimpleQueue[_Pull | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Pull] = queue.SimpleQueue()
        self._bell, self._button = socket.socketpair()
        self._pulling: dict[str, bool] = {}  # whether it is to be dropped as soon as it is there
        self._thread = threading.Thread(target=self._work, name="weight puller", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._bell.fileno()

    def ask(
        self, version: str, way: Sequence[Payload] = (), *, keep: bool = False
    ) -> messages.VersionReady | None:
        """Start to pull a version over a relay route; answers at once if it is held already."""
        if version in self._pulling:
            self._pulling[version] = False
            return None
        if version in self._engine.versions.names():
            return messages.VersionReady(version)
        self._pulling[version] = False
        self._to_do.put(_Pull(version, tuple(way), keep))
        return None

    def pulling(self) -> tuple[str, ...]:
        return tuple(self._pulling)

    def drop_later(self, version: str) -> bool:
        """Whether the version is on its way; if so it will be dropped once it is there."""
        if version not in self._pulling:
            return False
        self._pulling[version] = True
        return True

    def settle(self) -> list[messages.VersionReady | messages.VersionFailed]:
        """Between two steps: place arrived versions, activate complete ones, report outcomes."""
        said: list[messages.VersionReady | messages.VersionFailed] = []
        while not self._done.empty():
            self._bell.recv(1)
            pull = self._done.get()
            try:
                ready = self._advance(pull)
            except (SlackwaterError, OSError) as error:
                del self._pulling[pull.version]
                said.append(messages.VersionFailed(pull.version, str(error)))
            else:
                said += [] if ready is None else [ready]
        return said

    def _advance(self, pull: _Pull) -> messages.VersionReady | None:
        """Give a version in host memory its place, or show it; raises what the thread met."""
        versions = self._engine.versions
        if pull.error is not None:
            if pull.room is not None:
                versions.abandon(pull.room)
            raise pull.error
        taken = pull.taken
        assert taken is not None
        if pull.room is not None:
            versions.finish(pull.version, pull.room)
        elif (lora := lora_of(taken.meta)) is not None:
            versions.put(pull.version, taken.tensors, lora=lora)
        else:
            pull.room = versions.begin()
            self._to_do.put(pull)
            return None
        pull.taken = None  # the thread refers to it until its next pull
        if self._pulling.pop(pull.version):
            versions.drop(pull.version)
        return messages.VersionReady(pull.version, taken.kept)

    def close(self) -> None:
        """End the thread, after the pull that it is in."""
        self._to_do.put(None)
        self._thread.join()
        self._bell.close()
        self._button.close()

    def _work(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own: steps come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (pull := self._to_do.get()) is not None:
            try:
                if pull.taken is None:
                    pull.taken = self._lane.take(pull.version, pull.way, keep=pull.keep)
                else:
                    assert pull.room is not None
                    self._engine.versions.fill(pull.room, pull.taken.tensors)
            except Exception as error:  # noqa: BLE001  (the thread's edge: the loop decides what it means)
                pull.error = error
            self._done.put(pull)
            self._button.send(b"!")
