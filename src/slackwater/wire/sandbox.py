"""Messages to and from sandbox workers."""

from typing import Literal, TypeAlias

import msgspec

from slackwater.wire.frames import Message

Stream: TypeAlias = Literal["stdout", "stderr"]


class HeldEnvironment(msgspec.Struct, frozen=True):
    """An environment that a worker still has from before it reconnected."""

    environment: str
    job: str
    memory_mib: int


class SandboxFacts(msgspec.Struct, frozen=True):
    """A sandbox worker's resources: cores by NUMA node, memory for environments; its backend and
    the reasons for it (`said`). Only one that `isolates` runs actions of tenants who do
    not trust each other.
    """

    node: str
    cores: list[list[int]]
    memory_mib: int
    backend: str
    isolates: bool = False
    said: list[str] = msgspec.field(default_factory=list)
    environments: list[HeldEnvironment] = msgspec.field(default_factory=list)


class ActionLimits(msgspec.Struct, frozen=True):
    """Limits of one action; see `sandbox.limits`."""

    wall_s: float
    output_bytes: int
    memory_bytes: int
    processes: int
    disk_bytes: int
    network: bool


class RunAction(Message, frozen=True):
    """Run a command on these cores; without an environment, in a temporary one."""

    attempt: int
    command: list[str]
    cores: list[int]
    limits: ActionLimits
    environment: str | None = None
    variables: dict[str, str] = msgspec.field(default_factory=dict)
    stdin: bytes = b""
    stream: bool = False


class StopAction(Message, frozen=True):
    """Kill the processes of an attempt; its `ActionFinished` follows."""

    attempt: int
    reason: str


class OpenEnvironment(Message, frozen=True):
    """Create an environment, empty or from a snapshot, with these files."""

    environment: str
    job: str
    memory_mib: int
    snapshot: str | None = None
    files: dict[str, bytes] = msgspec.field(default_factory=dict)


class CloseEnvironment(Message, frozen=True):
    """Remove an environment with all its contents; there is no answer."""

    environment: str


class KeepSnapshot(Message, frozen=True):
    """Take a snapshot of an environment, unless it is larger than `most_bytes`."""

    request: int
    environment: str
    name: str
    most_bytes: int | None = None


class ActionPrinted(Message, frozen=True):
    """A piece of an attempt's output."""

    attempt: int
    stream: Stream
    data: bytes


class ActionFinished(Message, frozen=True, tag="ActionOver"):
    """All processes of an attempt are gone; `end` is a `sandbox.reports.End`."""

    attempt: int
    end: str
    status: int
    reason: str
    launch_s: float
    run_s: float
    cpu_s: float
    max_rss_bytes: int


class EnvironmentReady(Message, frozen=True):
    """An environment can be used."""

    environment: str


class EnvironmentFailed(Message, frozen=True):
    """An environment could not be created."""

    environment: str
    reason: str


class SnapshotKept(Message, frozen=True):
    """The result of `KeepSnapshot`."""

    request: int
    error: str | None
    size_bytes: int = 0


ToSandbox: TypeAlias = RunAction | StopAction | OpenEnvironment | CloseEnvironment | KeepSnapshot
FromSandbox: TypeAlias = (
    ActionPrinted | ActionFinished | EnvironmentReady | EnvironmentFailed | SnapshotKept
)
