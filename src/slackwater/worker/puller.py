"""Pulls versions in a thread beside the decode loop; they become visible between two steps."""

import os
import queue
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from slackwater.engine.engine import Engine
from slackwater.engine.versions import WeightSlot
from slackwater.model.errors import SlackwaterError
from slackwater.model.payload import Payload
from slackwater.nets.lora import LoraSpec
from slackwater.wire import messages
from slackwater.worker.weight_lane import WeightLane, lora_of

_NICENESS = 19  # hardly any of a core that a step wants too, all of one that is idle


@dataclass(frozen=True, slots=True)
class _Wanted:
    version: str
    way: tuple[Payload, ...]
    keep: bool


@dataclass(frozen=True, slots=True)
class _Arrived:
    """The tensors are in host memory."""

    version: str
    tensors: Mapping[str, Tensor]
    lora: LoraSpec | None
    kept: bool


@dataclass(frozen=True, slots=True)
class _Filling:
    """Whole weights have a place in the engine, not to be seen yet."""

    version: str
    tensors: Mapping[str, Tensor]
    room: WeightSlot
    kept: bool


@dataclass(frozen=True, slots=True)
class _Filled:
    version: str
    room: WeightSlot
    kept: bool


@dataclass(frozen=True, slots=True)
class _Failed:
    version: str
    error: Exception
    room: WeightSlot | None = None


class VersionPuller:
    """Pulls versions into an engine; call every method from the thread that steps it.

    `fileno()` becomes readable when `settle()` has work, so a loop may wait on it.
    """

    def __init__(self, engine: Engine, lane: WeightLane) -> None:
        self._engine = engine
        self._lane = lane
        self._to_do: queue.SimpleQueue[_Wanted | _Filling | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Arrived | _Filled | _Failed] = queue.SimpleQueue()
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
        self._to_do.put(_Wanted(version, tuple(way), keep))
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
            match self._done.get():
                case _Arrived(version, tensors, None, kept):
                    try:
                        room = self._engine.versions.begin()
                    except SlackwaterError as error:
                        said.append(self._failed(version, error))
                    else:
                        self._to_do.put(_Filling(version, tensors, room, kept))
                case _Arrived(version, tensors, lora, kept):
                    try:
                        self._engine.versions.put(version, tensors, lora=lora)
                    except SlackwaterError as error:
                        said.append(self._failed(version, error))
                    else:
                        said.append(self._ready(version, kept))
                case _Filled(version, room, kept):
                    self._engine.versions.finish(version, room)
                    said.append(self._ready(version, kept))
                case _Failed(version, error, failed_room):
                    if failed_room is not None:
                        self._engine.versions.give_up(failed_room)
                    if not isinstance(error, SlackwaterError | OSError):
                        raise error
                    said.append(self._failed(version, error))
        return said

    def close(self) -> None:
        """End the thread, after the pull that it is in."""
        self._to_do.put(None)
        self._thread.join()
        self._bell.close()
        self._button.close()

    def _ready(self, version: str, kept: bool) -> messages.VersionReady:
        if self._pulling.pop(version):
            self._engine.versions.drop(version)
        return messages.VersionReady(version, kept)

    def _failed(self, version: str, error: Exception) -> messages.VersionFailed:
        self._pulling.pop(version)
        return messages.VersionFailed(version, str(error))

    def _work(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own: steps come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (what := self._to_do.get()) is not None:
            self._done.put(self._result(what))
            self._button.send(b"!")

    def _result(self, what: _Wanted | _Filling) -> _Arrived | _Filled | _Failed:
        room = what.room if isinstance(what, _Filling) else None
        try:
            if isinstance(what, _Filling):
                self._engine.versions.fill(what.room, what.tensors)
                return _Filled(what.version, what.room, what.kept)
            taken = self._lane.take(what.version, what.way, keep=what.keep)
            return _Arrived(what.version, taken.tensors, lora_of(taken.meta), taken.kept)
        except Exception as error:  # noqa: BLE001  (the thread's edge: the loop decides what it means)
            return _Failed(what.version, error, room)
