"""A sandbox worker on a supervisor of its own, for tests: tell it something and hear what it
answers.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from sandbox_stage import ENDS_WITHIN_S, Stage, a_stage

from slackwater.wire import messages, sandbox
from slackwater.wire.frames import FrameDecoder
from slackwater.worker.connection import Connection
from slackwater.worker.sandbox_worker import SandboxWorker

LIMITS = sandbox.ActionLimits(
    wall_s=120.0,
    output_bytes=1 << 16,
    memory_bytes=1 << 30,
    processes=64,
    disk_bytes=1 << 30,
    network=False,
)
Answer = TypeVar("Answer", bound=messages.Message)


class Wire:
    """The worker's end of a connection: frames go through the real encoding, both ways."""

    heartbeat_every_s = 0.05

    def __init__(self) -> None:
        self._decoder = FrameDecoder()
        self._told: deque[messages.ToWorker] = deque()
        self.answers: list[messages.FromWorker] = []

    def tell(self, message: Any) -> None:
        self._told.append(message)

    def receive(self, timeout_s: float) -> Sequence[messages.ToWorker]:
        return [self._told.popleft()] if self._told else []

    def send(self, *frames: bytes) -> None:
        for frame in self._decoder.feed(b"".join(frames)):
            self.answers.append(messages.decode_from_worker(frame.body))


class WorkerStage:
    """Tells a worker things, and lets it go on until it has answered."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.wire = Wire()
        self.worker = SandboxWorker(cast(Connection, self.wire), stage.supervisor)
        self._attempt = 0

    def tell(self, message: Any) -> None:
        """Have one message executed."""
        self.wire.tell(message)
        assert self.worker.step()

    def answer(self, kind: type[Answer], is_it: Callable[[Answer], bool]) -> Answer:
        """The first answer of a kind that is meant, now or later."""
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while time.monotonic() < deadline_s:
            for place, said in enumerate(self.wire.answers):
                if isinstance(said, kind) and is_it(said):
                    del self.wire.answers[place]
                    return said
            assert self.worker.step()
        raise AssertionError(f"no {kind.__name__} came")

    def run(self, *command: str, **given: Any) -> tuple[sandbox.ActionFinished, bytes]:
        """What became of one action, and what it printed."""
        attempt = self.next_attempt()
        self.tell(run_action(attempt, list(command), **given))
        over = self.outcome(attempt)
        printed = b"".join(
            said.data
            for said in self.wire.answers
            if isinstance(said, sandbox.ActionPrinted) and said.attempt == attempt
        )
        return over, printed

    def outcome(self, attempt: int) -> sandbox.ActionFinished:
        """How an action ended."""
        return self.answer(sandbox.ActionFinished, lambda said: said.attempt == attempt)

    def refusal(self, environment: str) -> str:
        """Why an environment could not be opened."""
        failed = self.answer(
            sandbox.EnvironmentFailed, lambda said: said.environment == environment
        )
        return failed.reason

    def next_attempt(self) -> int:
        self._attempt += 1
        return self._attempt

    def check_lives(self) -> None:
        """A good action still works."""
        over, printed = self.run("/bin/echo", "fine")
        assert (over.end, over.status, printed) == ("exited", 0, b"fine\n"), over


def run_action(attempt: int, command: list[str], **given: Any) -> sandbox.RunAction:
    cores = [min(os.sched_getaffinity(0))]
    fields: dict[str, Any] = {"command": command, "cores": cores, "limits": LIMITS}
    return sandbox.RunAction(attempt, **(fields | given))


def open_environment(name: Any, **given: Any) -> sandbox.OpenEnvironment:
    return sandbox.OpenEnvironment(environment=name, job="j", memory_mib=1, **given)


@contextmanager
def a_worker() -> Iterator[WorkerStage]:
    with a_stage("process") as stage:
        yield WorkerStage(stage)
