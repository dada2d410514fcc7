"""What can happen to a node's states. Plain data, so that a record of it can be replayed."""

from dataclasses import dataclass

from slackwater.model.residency import Tier


@dataclass(frozen=True, slots=True)
class DeploymentRegistered:
    """A holder (a worker process) brings a deployment, or comes back for one whose holder has gone.

    `host_bytes` is what its image on the host or on disk takes, `device_bytes` what it needs to
    run. A `warm` one is never spilled to disk to make room for others: its place on the host is
    reserved for as long as it is known.

    `borrows` are the images that it reads besides its own, with their sizes: another deployment's,
    or one of frozen parts, which no deployment has alone and which goes with the last of them.
    """

    now_s: float
    deployment: str
    holder: str
    device_bytes: int
    host_bytes: int
    warm: bool
    borrows: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ResidencyAsked:
    """Make a deployment at least as warm as `tier`; with `lease` it stays on the device until it is
    released.
    """

    now_s: float
    ticket: int
    deployment: str
    tier: Tier
    lease: bool = False


@dataclass(frozen=True, slots=True)
class EvictionAsked:
    """Make a deployment at most as warm as `tier`, when nothing runs on it any more."""

    now_s: float
    ticket: int
    deployment: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class WaitGivenUp:
    """Whoever waited under the ticket does not any more."""

    now_s: float
    ticket: int


@dataclass(frozen=True, slots=True)
class DeploymentFilled:
    """A state that another node sent is whole in this one's host memory."""

    now_s: float
    deployment: str


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """An operation on the deployment has ended."""

    now_s: float
    deployment: str


@dataclass(frozen=True, slots=True)
class MoveDone:
    """A commanded move has ended; the state is on that tier, whole."""

    now_s: float
    deployment: str
    to: Tier


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """A commanded move could not be made; the state is where it was."""

    now_s: float
    deployment: str
    to: Tier
    reason: str


@dataclass(frozen=True, slots=True)
class NextHinted:
    """The scheduler says what runs next, in order. Replaces the hint before.

    `holding` are in the middle of their jobs' phases: between two of their operations, too, an
    early load does not push them out.
    """

    now_s: float
    deployments: tuple[str, ...]
    holding: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HolderGone:
    """A worker process has ended, with whatever was on its part of the device."""

    now_s: float
    holder: str


@dataclass(frozen=True, slots=True)
class ReadingBegan:
    """A checkpoint or a copy for another node is being made of the image on the host."""

    now_s: float
    deployment: str


@dataclass(frozen=True, slots=True)
class ReadingEnded:
    """It has been made, or given up."""

    now_s: float
    deployment: str


@dataclass(frozen=True, slots=True)
class DeploymentForgotten:
    """Nobody needs the deployment's state any more, on any tier."""

    now_s: float
    deployment: str


StateEvent = (
    DeploymentRegistered
    | ResidencyAsked
    | EvictionAsked
    | WaitGivenUp
    | DeploymentFilled
    | LeaseReleased
    | MoveDone
    | MoveFailed
    | NextHinted
    | HolderGone
    | ReadingBegan
    | ReadingEnded
    | DeploymentForgotten
)
