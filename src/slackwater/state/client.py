"""A worker's client of its node's state manager: the same calls and errors, over a socket."""

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec
from msgspec import structs

from slackwater.model import errors
from slackwater.model.errors import SlackwaterError, UnavailableError
from slackwater.model.residency import Registration, StoredPart, Tier
from slackwater.state.frames import Frames, socket_address
from slackwater.state.image import HostImage, ImageArrivalProgress
from slackwater.state.port import DeviceHolder, HolderMove, MoveOutcome
from slackwater.wire import state as messages

SOCKET_VARIABLE = "SLACKWATER_STATE_SOCKET"
_DECODER = msgspec.msgpack.Decoder(messages.ToHolder)
_ANSWER_S = 60.0


class StateClient:
    """Passes the manager's orders to the attached holder."""

    def __init__(self, path: str, name: str, secret: str, device: str = "") -> None:
        self.name = name
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(socket_address(path))
        except OSError as error:
            connection.close()
            raise UnavailableError(f"state manager: {path} does not answer: {error}") from error
        self._frames = Frames(connection)
        self._frames.send(messages.HolderHello(name, secret, device))
        self._holder: DeviceHolder | None = None
        self._asks: dict[int, Future[messages.StateAnswer]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False
        self._images: dict[str, HostImage] = {}
        self._arrivals: dict[int, ImageArrivalProgress] = {}
        threading.Thread(target=self._listen, daemon=True, name="state-client").start()

    def attach(self, holder: DeviceHolder) -> None:
        self._holder = holder

    def register(
        self, deployment: str, holder: str, parts: Sequence[StoredPart], *, warm: bool = True
    ) -> Registration:
        answer = self._ask(messages.RegisterState(deployment, list(parts), warm))
        assert answer.registration is not None
        return answer.registration

    def ensure(
        self, deployment: str, tier: Tier, *, lease: bool = False, timeout_s: float = 600.0
    ) -> None:
        self._ask(messages.EnsureState(deployment, tier, lease, timeout_s), timeout_s)

    def evict(self, deployment: str, tier: Tier = Tier.HOST, *, timeout_s: float = 600.0) -> None:
        self._ask(messages.EvictState(deployment, tier, timeout_s), timeout_s)

    def release(self, deployment: str) -> None:
        self._ask(messages.NoteState(deployment, "release"))

    def forget(self, deployment: str) -> None:
        self._ask(messages.NoteState(deployment, "forget"))

    def forget_when_unused(self, deployment: str) -> None:
        self._ask(messages.NoteState(deployment, "forget_when_unused"))

    def forget_abandoned(self, prefix: str) -> None:
        self._ask(messages.NoteState(prefix, "forget_abandoned"))

    def survivor(self, prefix: str, after: int, at_most: int) -> str | None:
        return self._ask(messages.FindSurvivor(prefix, after, at_most)).survivor

    def close(self) -> None:
        self._frames.close()

    def _ask(self, request: messages.StateRequest, timeout_s: float = 0.0) -> messages.StateAnswer:
        ask = next(self._numbers)
        waiting: Future[messages.StateAnswer] = Future()
        with self._lock:
            if self._closed:
                raise UnavailableError("state manager: the connection has ended")
            self._asks[ask] = waiting
        self._frames.send(structs.replace(request, ask=ask))
        try:
            answer = waiting.result(timeout_s + _ANSWER_S)
        except TimeoutError:
            raise UnavailableError("state manager: no answer in time") from None
        if answer.error is not None:
            found = getattr(errors, answer.kind, UnavailableError)
            kind = found if issubclass(found, SlackwaterError) else UnavailableError
            raise kind(answer.error)
        return answer

    def _listen(self) -> None:
        while (got := self._frames.receive(_DECODER)) is not None:
            message, descriptors = got
            match message:
                case messages.StateAnswer(ask):
                    with self._lock:
                        waiting = self._asks.pop(ask, None)
                    if waiting is not None:
                        waiting.set_result(message)
                case messages.StateMoveOrder():
                    self._order(message, descriptors)
                case messages.ImageArrived(number, reached, why):
                    self._update_arrival(number, reached, why)
                case messages.FreeDevice(deployment):
                    if self._holder is not None:
                        self._holder.free(deployment)
                case messages.DropImage(image):
                    self._drop(image)
        with self._lock:
            self._closed = True
            left, self._asks = list(self._asks.values()), {}
        for arrival in list(self._arrivals.values()):
            arrival.fail("state manager: has gone")
        for waiting in left:
            waiting.set_exception(UnavailableError("state manager: has gone"))

    def _order(self, order: messages.StateMoveOrder, descriptors: list[int]) -> None:
        coming = iter(descriptors)
        for name, size, fresh in order.images:
            if fresh:
                self._images[name] = HostImage(os.dup(fd := next(coming)), size)
                os.close(fd)
        images = {name: self._images[name] for name, _, _ in order.images}
        number = order.number
        arrival = ImageArrivalProgress() if order.arriving else None
        if arrival is not None:
            self._arrivals[number] = arrival

        def on_end(how: MoveOutcome) -> None:
            self._arrivals.pop(number, None)
            about = None if how.about is None else dict(how.about)
            with contextlib.suppress(UnavailableError):  # it has gone, and with it whoever waited
                self._frames.send(messages.StateMoveEnded(number, about, how.failed))

        if self._holder is None:
            on_end(MoveOutcome(failed=f"{self.name} holds no device memory"))
            return
        how = (order.deployment, order.to, order.blank, images, order.about, arrival, order.fills)
        self._holder.begin(HolderMove(*how), on_end)

    def _update_arrival(self, number: int, reached: int, why: str | None) -> None:
        arrival = self._arrivals.get(number)
        if arrival is not None and why is None:
            arrival.reach(reached)
        elif arrival is not None:
            arrival.fail(str(why))

    def _drop(self, name: str) -> None:
        if self._holder is not None:
            self._holder.drop_image(name)
        image = self._images.pop(name, None)
        if image is not None:
            image.close()
