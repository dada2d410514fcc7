"""Commands of the residency controller to the node's state manager."""

from slackwater.control.message import Message
from slackwater.model.residency import Tier


class Admit(Message, frozen=True):
    """The deployment is known. `blank`: it has no content yet, and comes to the device as zeros."""

    deployment: str
    blank: bool


class Refuse(Message, frozen=True):
    """The deployment cannot be kept on this node; nothing was changed."""

    deployment: str
    reason: str


class MoveTier(Message, frozen=True):
    """Copy the state to the next tier (nothing if `blank`); answered by MoveDone or MoveFailed.

    `follows`: it goes on behind the move to the host as the bytes arrive, and ends later.
    """

    deployment: str
    to: Tier
    blank: bool = False
    follows: bool = False


class FreeTier(Message, frozen=True):
    """The copy on this tier is not needed any more."""

    deployment: str
    tier: Tier


class Drop(Message, frozen=True):
    """The image is not known any more, on any tier: whatever is left of it goes."""

    deployment: str


class AnswerTicket(Message, frozen=True):
    """What was asked under the ticket has been done, or cannot be and why."""

    ticket: int
    refused: str | None = None


class ReportFallback(Message, frozen=True):
    """The holder died with the newest state; the image that was last offloaded is the state now."""

    deployment: str


class ReportStateLost(Message, frozen=True):
    """The holder died and nothing was offloaded: the deployment restarts from its checkpoint."""

    deployment: str


StateCommand = (
    Admit | Refuse | MoveTier | FreeTier | Drop | AnswerTicket | ReportFallback | ReportStateLost
)
