"""What sandbox workers are told, and what they answer."""

from typing import Literal, TypeAlias

import msgspec

from slackwater.wire.frames import Message

Stream: TypeAlias = Literal["stdout", "stderr"]


class HeldEnvironment(msgspec.Struct, frozen=True):
    """An environment that a worker has kept from before."""

    environment: str
    job: str
    memory_mib: int


class SandboxFacts(msgspec.Struct, frozen=True):
    """What a sandbox worker brings: its node's cores by NUMA node, memory for environments, what it
    chose and why. Only one that `isolates` runs actions of tenants who do not trust each other."""

    node: str
    cores: list[list[int]]
    memory_mib: int
    backend: str
    isolates: bool = False
    said: list[str] = msgspec.field(default_factory=list)
    environments: list[HeldEnvironment] = msgspec.field(default_factory=list)


class ActionLimits(msgspec.Struct, frozen=True):
    """What one action may use at most; see `sandbox.limits`."""

    wall_s: float
    output_bytes: int
    memory_bytes: int
    processes: int
    disk_bytes: int
    network: bool


class RunAction(Message, frozen=True):
    """Run a command on these cores; without an environment, in a fresh one that goes with it."""

    attempt: int
    command: list[str]
    cores: list[int]
    limits: ActionLimits
    environment: str | None = None
    variables: dict[str, str] = msgspec.field(default_factory=dict)
    stdin: bytes = b""
    stream: bool = False


class StopAction(Message, frozen=True):
    """Kill what an attempt started; its `ActionOver` comes as usual."""

    attempt: int
    reason: str


class OpenEnvironment(Message, frozen=True):
    """Make an environment, empty or out of a snapshot, with these files in it."""

    environment: str
    job: str
    memory_mib: int
    snapshot: str | None = None
    files: dict[str, bytes] = msgspec.field(default_factory=dict)


class CloseEnvironment(Message, frozen=True):
    """Remove an environment with everything in it; no answer comes."""

    environment: str


class KeepSnapshot(Message, frozen=True):
    """Keep what an environment has now under a name, if it is not larger than `most_bytes`."""

    request: int
    environment: str
    name: str
    most_bytes: int | None = None


class ActionPrinted(Message, frozen=True):
    """A piece of what an attempt wrote."""

    attempt: int
    stream: Stream
    data: bytes


class ActionOver(Message, frozen=True):
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
    """An environment could not be made."""

    environment: str
    reason: str


class SnapshotKept(Message, frozen=True):
    """A snapshot was kept, or why not."""

    request: int
    error: str | None
    size_bytes: int = 0


ToSandbox: TypeAlias = RunAction | StopAction | OpenEnvironment | CloseEnvironment | KeepSnapshot
FromSandbox: TypeAlias = (
    ActionPrinted | ActionOver | EnvironmentReady | EnvironmentFailed | SnapshotKept
)
