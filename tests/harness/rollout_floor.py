"""A control plane without its HTTP face, for measurements: the service's own hub, rollout body and
manager.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from harness.one_key import OneKey
from slackwater.control.controller import Controller
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetCommand, FleetEvent
from slackwater.control.lending.lender import LendingController
from slackwater.control.rollout.commands import AppendTokens, CompleteTurn
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.model.errors import UnavailableError
from slackwater.model.ids import WorkerId
from slackwater.model.turn import TurnSpec
from slackwater.runtime.executors.engines import EngineExecutor
from slackwater.runtime.executors.serving import Offer, ServingExecutor
from slackwater.runtime.live_driver import live_driver
from slackwater.runtime.net.hub import WorkerHub
from slackwater.wire import messages
from slackwater.wire.frames import Frame

Before = Controller[FleetEvent, FleetCommand]


class RolloutFloor:
    """Takes engines in and has turns generated.

    `record` is given one line per event, if anybody wants it; `before` may put itself before the
    controller.
    """

    def __init__(
        self,
        settings: RolloutSettings | None = None,
        *,
        record: Callable[[bytes], None] | None = None,
        released: Callable[[WorkerId], None] | None = None,
        before: Callable[[FleetController], Before] | None = None,
        lending: LendingController | None = None,
        offers: Mapping[str, Offer] | None = None,
    ) -> None:
        self.secret = secrets.token_hex(16)
        self.controller = FleetController(settings, lending=lending)
        self.manager = self.controller.rollout
        controller: Before = self.controller if before is None else before(self.controller)
        self.hub = WorkerHub(OneKey(self.secret), heartbeat_every_s=0.5)
        self._released = released
        self.runtime = live_driver(controller, record=record)
        self.lending = ServingExecutor(self.runtime, self.hub.send, offers or {})
        self.rollout = EngineExecutor(
            self.runtime,
            self.hub,
            release=self._release,
            lending=None if lending is None else self.lending,
        )
        self._joined = asyncio.Event()
        self.lost: list[tuple[WorkerId, str]] = []

    async def __aenter__(self) -> "RolloutFloor":
        await self.hub.start(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.runtime.close()
        await self.hub.close()

    @property
    def connect(self) -> str:
        """HOST:PORT for workers."""
        host, port = self.hub.address
        return f"{host}:{port}"

    async def until_joined(self, count: int) -> None:
        """Wait until so many engines are connected."""
        while len(self.hub.workers()) < count:
            self._joined.clear()
            await self._joined.wait()

    async def generate(self, spec: TurnSpec) -> CompleteTurn:
        """One turn, from its submission to its end; UnavailableError if it failed."""
        answer = _Answer()
        self.rollout.submit(spec, answer)
        return await answer.future

    # ---- what the hub tells ----
    def worker_joined(self, hello: messages.Hello) -> None:
        assert hello.engine is not None
        self.rollout.engine_joined(WorkerId(hello.worker), hello.engine)
        self._joined.set()

    def handle_frames(self, worker: WorkerId, frames: Sequence[Frame]) -> None:
        for frame in frames:
            self.rollout.handle_frame(worker, frame)

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        self.lost.append((worker, reason))
        self.rollout.engine_lost(worker, reason)

    def _release(self, worker: WorkerId) -> None:
        self.hub.hang_up(worker)
        if self._released is not None:
            self._released(worker)


class _Answer:
    """A turn's listener as a future."""

    def __init__(self) -> None:
        self.future: asyncio.Future[CompleteTurn] = asyncio.get_running_loop().create_future()

    def stream(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Nothing here streams."""

    def append(self, more: AppendTokens) -> None:
        """Only the whole counts here."""

    def complete(self, result: CompleteTurn) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: str) -> None:
        if not self.future.done():
            self.future.set_exception(UnavailableError(error))
