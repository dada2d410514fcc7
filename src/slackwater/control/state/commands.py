"""What the book of states asks of its body."""

from dataclasses import dataclass

from slackwater.model.residency import Tier


@dataclass(frozen=True, slots=True)
class Admit:
    """The deployment is known. `blank`: it has no content yet, and comes to the device as zeros."""

    deployment: str
    blank: bool


@dataclass(frozen=True, slots=True)
class Refuse:
    """The deployment cannot be kept on this node; nothing was changed."""

    deployment: str
    reason: str


@dataclass(frozen=True, slots=True)
class MoveTier:
    """Copy the state to the neighbouring tier; say MoveDone or MoveFailed. `blank`: there is
    nothing to copy yet.

    `follows`: the move to the host is still under way, and this one goes on behind it, as the bytes
    arrive; it is done later than that one.
    """

    deployment: str
    to: Tier
    blank: bool = False
    follows: bool = False


@dataclass(frozen=True, slots=True)
class FreeTier:
    """The copy on this tier is not needed any more."""

    deployment: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class Drop:
    """The image is not known any more, on any tier: whatever is left of it goes."""

    deployment: str


@dataclass(frozen=True, slots=True)
class AnswerTicket:
    """What was asked under the ticket has been done, or cannot be and why."""

    ticket: int
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class ReportFallback:
    """The holder died with the newest state; what was last offloaded is whole and is the
    state now.
    """

    deployment: str


@dataclass(frozen=True, slots=True)
class ReportStateLost:
    """The holder died, and nothing whole was ever offloaded: the deployment begins from its last
    checkpoint.
    """

    deployment: str


StateCommand = (
    Admit | Refuse | MoveTier | FreeTier | Drop | AnswerTicket | ReportFallback | ReportStateLost
)
