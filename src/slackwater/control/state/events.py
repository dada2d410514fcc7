"""Events of a node's residency controller."""

from slackwater.control.message import TimedMessage
from slackwater.model.residency import Tier


class DeploymentRegistered(TimedMessage, frozen=True):
    """A holder (a worker process) registers a deployment, or takes over one without a holder.

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
    """The request of this ticket was given up."""

    ticket: int


class DeploymentFilled(TimedMessage, frozen=True):
    """A state from another node has arrived completely in host memory."""

    deployment: str


class LeaseReleased(TimedMessage, frozen=True):
    """An operation on the deployment has ended."""

    deployment: str


class MoveDone(TimedMessage, frozen=True):
    """A commanded move has ended: the whole state is on that tier."""

    deployment: str
    to: Tier


class MoveFailed(TimedMessage, frozen=True):
    """A commanded move failed: the state is where it was."""

    deployment: str
    to: Tier
    reason: str


class NextHinted(TimedMessage, frozen=True):
    """The deployments that run next, in order; replaces the last hint. A prefetch does not evict
    those in `holding`, whose jobs have a permit.
    """

    deployments: tuple[str, ...]
    holding: tuple[str, ...] = ()


class HolderGone(TimedMessage, frozen=True):
    """A worker process has ended, with its states on the device."""

    holder: str


class ReadingBegan(TimedMessage, frozen=True):
    """A checkpoint or a transfer to another node reads the image on the host."""

    deployment: str


class ReadingEnded(TimedMessage, frozen=True):
    """The reading has ended or was given up."""

    deployment: str


class DeploymentForgotten(TimedMessage, frozen=True):
    """The deployment's state is not needed any more, on any tier."""

    deployment: str


# Events that only change a record.
NotedEvent = WaitGivenUp | DeploymentFilled | LeaseReleased | ReadingBegan | ReadingEnded
DeploymentEvent = DeploymentRegistered | DeploymentForgotten | HolderGone
TierEvent = ResidencyAsked | EvictionAsked | MoveDone | MoveFailed | NextHinted
StateEvent = DeploymentEvent | TierEvent | NotedEvent
