"""Modules, plans and processes of workers, and events of instances' processes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from slackwater.model.device import Device
from slackwater.model.ids import InstanceId

ENGINE = "slackwater.worker.engine_worker"
ENGINE_SERVER = "slackwater.worker.engine_server.adapter"
COSERVING = "slackwater.worker.coserving_worker"
TRAINER = "slackwater.worker.trainer_worker"
SANDBOX = "slackwater.worker.sandbox_worker"
REWARDS = "slackwater.worker.reward_worker"


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker: `python -m module arguments`. The node's agent adds how to connect and where
    files are.

    With a `layout` it is a deployment: it needs a device with `memory_mb` for each rank, and may
    share devices with deployments of its `group`. `devices` are the assigned ones; with
    `one_process` a single process has them all. It outlives the control plane for `grace_s`, so
    that the next one can adopt it.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    layout: str | None = None
    memory_mb: int = 0
    group: str = ""
    devices: tuple[Device, ...] = ()
    grace_s: float = 0.0
    one_process: bool = False


class WorkerProcess(Protocol):
    """A worker's process, on any node."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def send_signal(self, number: int) -> None: ...

    def kill(self) -> None: ...

    async def wait(self) -> int: ...


@dataclass(frozen=True, slots=True)
class InstanceNoticed:
    """It will be taken away in `leaves_in_s`."""

    instance: InstanceId
    leaves_in_s: float


@dataclass(frozen=True, slots=True)
class InstanceEnded:
    """It has ended, asked or not."""

    instance: InstanceId
    reason: str


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A start failed; it is retried in `retry_in_s`, or never (None)."""

    instance: InstanceId
    error: str
    retry_in_s: float | None


ProviderEvent = InstanceNoticed | InstanceEnded | StartFailed
Tell = Callable[[ProviderEvent], None]
