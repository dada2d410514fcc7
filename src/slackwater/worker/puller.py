"""Pulls versions in a thread beside the decode loop; they become visible between two steps."""

import os
import queue
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.engine.engine import Engine
from slackwater.model.errors import SlackwaterError
from slackwater.model.payload import Payload
from slackwater.nets.causal_lm import CausalLM
from slackwater.wire import messages
from slackwater.worker.weight_lane import HostVersionCopy, WeightLane, lora_of

_NICENESS = 19  # little of a core that a step needs, all of an idle one


@dataclass(slots=True)
class _Pull:
    """A version being pulled. `host_copy` is set once it is in host memory. Whole weights then get
    a reserved `net` in the engine, which no request sees yet.
    """

    version: str
    route: tuple[Payload, ...]
    keep: bool
    host_copy: HostVersionCopy | None = None
    net: CausalLM | None = None
    error: Exception | None = None


class VersionPuller:
    """Pulls versions into an engine; call every method from the thread that steps it.

    `fileno()` becomes readable when `advance()` has work, so a loop may wait on it.
    """

    def __init__(self, engine: Engine, lane: WeightLane) -> None:
        self._engine = engine
        self._lane = lane
        self._work_queue: queue.SimpleQueue[_Pull | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Pull] = queue.SimpleQueue()
        self._wake_read, self._wake_write = socket.socketpair()
        self._pulling: dict[str, bool] = {}  # whether to drop the version on arrival
        self._thread = threading.Thread(target=self._work, name="weight puller", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._wake_read.fileno()

    def request(
        self, version: str, route: Sequence[Payload] = (), *, keep: bool = False
    ) -> messages.VersionReady | None:
        """Start to pull a version over a relay route; answers at once if the engine has it."""
        if version in self._pulling:
            self._pulling[version] = False
            return None
        if version in self._engine.versions.names():
            return messages.VersionReady(version)
        self._pulling[version] = False
        self._work_queue.put(_Pull(version, tuple(route), keep))
        return None

    def pulling(self) -> tuple[str, ...]:
        return tuple(self._pulling)

    def drop_later(self, version: str) -> bool:
        """Whether the version is being pulled; if so, drop it on arrival."""
        if version not in self._pulling:
            return False
        self._pulling[version] = True
        return True

    def advance(self) -> list[messages.VersionReady | messages.VersionFailed]:
        """Between two steps: place arrived versions, activate complete ones, report outcomes."""
        outcomes: list[messages.VersionReady | messages.VersionFailed] = []
        while not self._done.empty():
            self._wake_read.recv(1)
            pull = self._done.get()
            try:
                ready = self._advance_pull(pull)
            except (SlackwaterError, OSError) as error:
                del self._pulling[pull.version]
                outcomes.append(messages.VersionFailed(pull.version, str(error)))
            else:
                outcomes += [] if ready is None else [ready]
        return outcomes

    def _advance_pull(self, pull: _Pull) -> messages.VersionReady | None:
        """Give a version in host memory a slot, or activate it; raises the thread's error."""
        versions = self._engine.versions
        if pull.error is not None:
            if pull.net is not None:
                versions.abandon(pull.net)
            raise pull.error
        host_copy = pull.host_copy
        assert host_copy is not None
        if pull.net is not None:
            versions.finish(pull.version, pull.net)
        elif (lora := lora_of(host_copy.meta)) is not None:
            versions.put(pull.version, host_copy.tensors, lora=lora)
        else:
            pull.net = versions.begin()
            self._work_queue.put(pull)
            return None
        pull.host_copy = None  # free it: the thread refers to the pull until its next one
        if self._pulling.pop(pull.version):
            versions.drop(pull.version)
        return messages.VersionReady(pull.version, host_copy.kept)

    def close(self) -> None:
        """End the thread after its current pull."""
        self._work_queue.put(None)
        self._thread.join()
        self._wake_read.close()
        self._wake_write.close()

    def _work(self) -> None:
        if sys.platform == "linux":  # threads have their own priority: steps come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (pull := self._work_queue.get()) is not None:
            try:
                if pull.host_copy is None:
                    pull.host_copy = self._lane.take(pull.version, pull.route, keep=pull.keep)
                else:
                    assert pull.net is not None
                    self._engine.versions.fill(pull.net, pull.host_copy.tensors)
            except Exception as error:  # noqa: BLE001  (the thread's edge: the loop decides what it means)
                pull.error = error
            self._done.put(pull)
            self._wake_write.send(b"!")
