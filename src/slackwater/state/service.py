"""The state manager on a Unix socket. When a connection ends, its holder is removed."""

import hmac
import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from slackwater.model.errors import SlackwaterError, UnavailableError, describe
from slackwater.state.frames import Frames, close_all, socket_address
from slackwater.state.manager import StateManager
from slackwater.state.port import HolderMove, MoveOutcome
from slackwater.wire import state as messages

logger = logging.getLogger(__name__)
_DECODER = msgspec.msgpack.Decoder(messages.FromHolder)


class RemoteHolder:
    """A worker behind a connection. Each image's descriptor is sent once."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._sent: dict[str, int] = {}
        self._moves: dict[int, Callable[[MoveOutcome], None]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def begin(self, move: HolderMove, ended: Callable[[MoveOutcome], None]) -> None:
        with self._lock:
            number = next(self._numbers)
            self._moves[number] = ended
            images, descriptors = [], []
            for name, image in move.images.items():
                fresh = self._sent.get(name) != image.descriptor
                images.append((name, image.bytes, fresh))
                if fresh:
                    self._sent[name] = image.descriptor
                    descriptors.append(image.descriptor)
            order = messages.StateMoveOrder(
                number,
                move.deployment,
                move.to,
                move.blank,
                images,
                dict(move.about),
                arriving=move.arrival is not None,
                fills=move.fills,
            )
            self._tell(order, descriptors)
        if move.arrival is not None:
            move.arrival.listen(
                lambda reached, why: self._tell(messages.ImageArrived(number, reached, why))
            )

    def free(self, deployment: str) -> None:
        self._tell(messages.FreeDevice(deployment))

    def drop_image(self, image: str) -> None:
        with self._lock:
            if self._sent.pop(image, None) is not None:
                self._tell(messages.DropImage(image))

    def finish_move(self, message: messages.StateMoveEnded) -> None:
        with self._lock:
            ended = self._moves.pop(message.number, None)
        if ended is not None:
            ended(MoveOutcome(message.about, message.failed))

    def _tell(self, message: messages.ToHolder, descriptors: list[int] | None = None) -> None:
        try:
            self._frames.send(message, descriptors)
        except SlackwaterError:
            logger.info("a holder has gone")  # `StateServer` removes it when its connection ends


class StateServer:
    """Listens on a socket file or an abstract `@NAME`; accepts processes that know the secret."""

    def __init__(self, manager: StateManager, path: Path | str, secret: str) -> None:
        self.path = str(path)
        self._manager = manager
        self._secret = secret
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            self._listener.bind(socket_address(self.path))
        finally:
            os.umask(before)
        self._listener.listen(16)
        self._open: set[Frames] = set()
        self._numbers = itertools.count(1)
        threading.Thread(target=self._accept, daemon=True, name="state-server").start()

    def close(self) -> None:
        self._listener.close()
        if not self.path.startswith("@"):
            Path(self.path).unlink(missing_ok=True)
        for frames in list(self._open):
            frames.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            frames = Frames(connection)
            self._open.add(frames)
            threading.Thread(target=self._serve, args=(frames,), daemon=True).start()

    def _serve(self, frames: Frames) -> None:
        holder: RemoteHolder | None = None
        name = ""
        try:
            first = frames.receive(_DECODER)
            if first is None or not isinstance(first[0], messages.HolderHello):
                return
            if not hmac.compare_digest(first[0].secret, self._secret):
                logger.warning("a process without the secret was refused")
                return
            # A worker that reconnects gets a new name, so that the end of its old connection does
            # not detach it.
            name, holder = f"{first[0].holder}#{next(self._numbers)}", RemoteHolder(frames)
            self._manager.attach(name, holder, first[0].device)
            while (got := frames.receive(_DECODER)) is not None:
                message, descriptors = got
                close_all(descriptors)
                if isinstance(message, messages.StateMoveEnded):
                    holder.finish_move(message)
                elif isinstance(message, messages.StateRequest):
                    # A request may wait for long, so each has its own thread.
                    threading.Thread(
                        target=self._answer, args=(frames, name, message), daemon=True
                    ).start()
        finally:
            self._open.discard(frames)
            frames.close()
            if holder is not None:
                self._manager.remove_holder(name)

    def _answer(self, frames: Frames, holder: str, message: messages.StateRequest) -> None:
        try:
            answer = self._do(message.ask, holder, message)
        except Exception as error:
            kind = type(error) if isinstance(error, SlackwaterError) else UnavailableError
            if kind is not type(error):
                logger.exception("state manager")
            answer = messages.StateAnswer(message.ask, describe(error), kind.__name__)
        try:
            frames.send(answer)
        except SlackwaterError:
            logger.info("holder %s has gone", holder)

    def _do(self, ask: int, holder: str, message: messages.StateRequest) -> messages.StateAnswer:
        manager = self._manager
        match message:
            case messages.RegisterState(deployment, parts, warm):
                made = manager.register(deployment, holder, parts, warm=warm)
                return messages.StateAnswer(ask, registration=made)
            case messages.EnsureState(deployment, tier, lease, timeout_s):
                manager.ensure(deployment, tier, lease=lease, timeout_s=timeout_s)
            case messages.EvictState(deployment, tier, timeout_s):
                manager.evict(deployment, tier, timeout_s=timeout_s)
            case messages.FindSurvivor(prefix, after, at_most):
                return messages.StateAnswer(ask, survivor=manager.survivor(prefix, after, at_most))
            case messages.NoteState(deployment, what):
                getattr(manager, what)(deployment)
        return messages.StateAnswer(ask)
