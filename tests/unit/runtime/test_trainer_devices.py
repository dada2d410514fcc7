"""Who holds the processors that trainers and local engines share: the real manager decides, events
come in any order.
"""

import asyncio
import random
from typing import Any

import pytest

from slackwater.control.devices.messages import GrantDevices
from slackwater.control.fleet.controller import FleetController
from slackwater.control.operations.events import TrainerLost
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.steps import events as of_step
from slackwater.model.ids import JobId, TrajectoryId, TurnId, WorkerId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec
from slackwater.runtime.executors.engines import EngineExecutor
from slackwater.runtime.executors.turn_results import TurnResult
from slackwater.runtime.live_driver import live_driver, loop_time
from slackwater.wire import messages
from slackwater.wire.frames import Frame, FrameDecoder
from slackwater.wire.tokens import TokenColumns, TurnFinished, encode_tokens

BASE, VERSION = "tiny", "base:tiny"
JOBS = (JobId("one"), JobId("other"))  # of one base model


class Floor:
    """A rollout body whose engines answer when they are told to."""

    def __init__(self) -> None:
        settings = RolloutSettings(trainer_patience_s=0.2, watch_every_s=0.02)
        self.controller = FleetController(settings)
        self.runtime = live_driver(self.controller)
        hub: Any = self  # of which only send() is used
        self.rollout = EngineExecutor(self.runtime, hub, release=lambda worker: None)
        self.runtime.register(self._granted, (GrantDevices,))
        self.waiting: dict[WorkerId, asyncio.Future[bool]] = {}
        self.sent: list[tuple[WorkerId, messages.Message]] = []
        self.training: set[WorkerId] = set()
        self.ended = 0

    def send(self, worker: WorkerId, message: messages.Message) -> None:
        self.sent.append((worker, message))

    def engine(self, name: str, kind: Any = "local") -> None:
        facts = messages.EngineFacts(BASE, 8, 1000, 10_000, 4, kind=kind)
        self.rollout.engine_joined(WorkerId(name), facts)

    def say(self, worker: WorkerId, message: messages.Message) -> None:
        self.send_frame(worker, messages.encode(message))

    def send_frame(self, worker: WorkerId, data: bytes) -> None:
        (frame,) = FrameDecoder().feed(data)
        assert isinstance(frame, Frame)
        self.rollout.handle_frame(worker, frame)

    def answer(self) -> None:
        """Engines pull at once, and end one turn each time they are asked."""
        sent, self.sent = self.sent, []
        for worker, message in sent:
            if isinstance(message, messages.PullVersion):
                self.say(worker, messages.VersionReady(message.version))
            elif isinstance(message, messages.Generate):
                ended = TurnFinished(message.request, "stop", 0, VERSION)
                columns = TokenColumns([], [], [], finished=[ended])
                self.send_frame(worker, encode_tokens(columns))

    def submit(self, number: int) -> None:
        name = f"t{number}"
        spec = TurnSpec(
            *(TurnId(name), TrajectoryId(name), JOBS[number % 2], (1, 2), Sampling(max_tokens=4)),
            VERSION,
            base_model=BASE,
        )
        self.rollout.submit(spec, self)

    def append(self, more: Any) -> None: ...

    def stream(self, tokens: Any, logprobs: Any) -> None: ...

    def complete(self, result: TurnResult) -> None:
        self.ended += 1

    def fail(self, error: str) -> None:
        raise AssertionError(error)

    async def train(self, name: str, *, ends_step: bool, job: JobId = JOBS[0]) -> None:
        trainer = WorkerId(name)
        answer = self.waiting[trainer] = asyncio.get_running_loop().create_future()
        self.runtime.feed(of_step.DevicesWanted(loop_time(), trainer))
        self.runtime.feed(of_step.DevicesAsked(loop_time(), trainer, job))
        if await answer:
            self.training.add(trainer)
            self.check()
            await asyncio.sleep(0)
            self.training.discard(trainer)
            self.runtime.feed(of_step.DevicesReturned(loop_time(), trainer, 0.01, ends_step))

    def _granted(self, command: GrantDevices) -> None:
        self.waiting.pop(command.trainer).set_result(True)

    def lose(self, trainer: WorkerId) -> None:
        self.waiting.pop(trainer).set_result(False)
        self.runtime.feed(TrainerLost(loop_time(), trainer, "killed"))

    def check(self) -> None:
        self.controller.check_integrity()
        local = [
            record.spec.instance
            for record in self.controller.rollout.state.instances
            if record.is_local
        ]
        assert not (local and self.training), f"{local} and {self.training} at once"


@pytest.mark.parametrize("seed", range(40))
def test_trainers_and_local_engines_never_work_at_once_and_everything_gets_done(seed: int) -> None:
    async def scenario() -> None:
        draw, floor = random.Random(seed), Floor()
        floor.rollout.publish(VERSION, BASE)
        for number in range(draw.randint(1, 2)):
            floor.engine(f"local-{number}")
        if draw.random() < 0.5:
            floor.engine("remote", "spot")
        trainings: list[asyncio.Task[None]] = []
        turns = 0
        for _ in range(60):
            match draw.choice(("turns", "train", "answer", "answer", "lose", "pause")):
                case "turns":
                    for _ in range(draw.randint(1, 4)):
                        floor.submit(turns)
                        turns += 1
                case "train":
                    name = f"trainer-{len(trainings)}"
                    ends = draw.random() < 0.5
                    working = floor.train(name, ends_step=ends, job=draw.choice(JOBS))
                    trainings.append(asyncio.create_task(working))
                case "answer":
                    floor.answer()
                case "lose" if draw.random() < 0.3:
                    floor.rollout.engine_lost(WorkerId("local-0"), "killed")
                    floor.engine("local-0")
                case _:
                    await asyncio.sleep(0.001)
            await asyncio.sleep(0)
            floor.check()
        deadline_s = asyncio.get_running_loop().time() + 120
        while floor.ended < turns or not all(task.done() for task in trainings):
            assert asyncio.get_running_loop().time() < deadline_s, (floor.ended, turns)
            floor.answer()
            floor.check()
            await asyncio.sleep(0.002)
        for task in trainings:
            task.result()
        floor.runtime.close()

    asyncio.run(scenario())


def test_a_trainer_that_is_lost_while_it_waits_does_not_keep_local_engines_away() -> None:
    async def scenario() -> None:
        floor = Floor()
        floor.rollout.publish(VERSION, BASE)
        floor.engine("local-0")
        floor.submit(0)
        waiting = asyncio.create_task(floor.train("trainer-0", ends_step=False))
        await asyncio.sleep(0)
        floor.lose(WorkerId("trainer-0"))
        while floor.ended < 1:
            floor.answer()
            await asyncio.sleep(0)
        await asyncio.wait_for(waiting, 60)
        floor.submit(1)
        floor.answer()
        floor.answer()
        assert floor.ended == 2
        floor.runtime.close()

    asyncio.run(scenario())
