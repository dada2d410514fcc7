"""What can happen to a node's states. Plain data, so that a record of it can be replayed."""

from slackwater.control.message import TimedMessage
from slackwater.model.residency import Tier


class DeploymentRegistered(TimedMessage, frozen=True):
    """A holder (a worker process) brings a deployment, or returns for one without a holder.

    `host_bytes` is the size of its image on host or disk, `device_bytes` what it needs to run. A
    `warm` one keeps its place on the host. `borrows` are other images that it reads, with their
    sizes: another deployment's, or one of frozen parts, which goes with its last user. It runs on
    the `device` of its holder; other devices of the node keep what they have.
    """

    deployment: str
    holder: str
    device_bytes: int
    host_bytes: int
    warm: bool
    borrows: tuple[tuple[str, int], ...] = ()
    device: str = ""


class ResidencyAsked(TimedMessage, frozen=True):
    """Make a deployment at least as warm as `tier`; with `lease` it stays until released."""

    ticket: int
    deployment: str
    tier: Tier
    lease: bool = False


class EvictionAsked(TimedMessage, frozen=True):
    """Make a deployment at most as warm as `tier`, when nothing runs on it any more."""

    ticket: int
    deployment: str
    tier: Tier


class WaitGivenUp(TimedMessage, frozen=True):
    """Whoever waited under the ticket does not any more."""

    ticket: int


class DeploymentFilled(TimedMessage, frozen=True):
    """A state that another node sent is whole in this one's host memory."""

    deployment: str


class LeaseReleased(TimedMessage, frozen=True):
    """An operation on the deployment has ended."""

    deployment: str


class MoveDone(TimedMessage, frozen=True):
    """A commanded move has ended; the state is on that tier, whole."""

    deployment: str
    to: Tier


class MoveFailed(TimedMessage, frozen=True):
    """A commanded move could not be made; the state is where it was."""

    deployment: str
    to: Tier
    reason: str


class NextHinted(TimedMessage, frozen=True):
    """The scheduler says what runs next, in order; replaces the last hint. An early load does not
    push out those in `holding`, which are within their jobs' phases.
    """

    deployments: tuple[str, ...]
    holding: tuple[str, ...] = ()


class HolderGone(TimedMessage, frozen=True):
    """A worker process has ended, with whatever was on its part of the device."""

    holder: str


class ReadingBegan(TimedMessage, frozen=True):
    """A checkpoint or a copy for another node is being made of the image on the host."""

    deployment: str


class ReadingEnded(TimedMessage, frozen=True):
    """It has been made, or given up."""

    deployment: str


class DeploymentForgotten(TimedMessage, frozen=True):
    """Nobody needs the deployment's state any more, on any tier."""

    deployment: str


# Those that ask for nothing by themselves.
NotedEvent = WaitGivenUp | DeploymentFilled | LeaseReleased | ReadingBegan | ReadingEnded
DeploymentEvent = DeploymentRegistered | DeploymentForgotten | HolderGone
TierEvent = ResidencyAsked | EvictionAsked | MoveDone | MoveFailed | NextHinted
StateEvent = DeploymentEvent | TierEvent | NotedEvent
