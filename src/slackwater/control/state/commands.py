"""Commands of the residency controller to the node's state manager."""

from slackwater.control.message import Message
from slackwater.model.residency import Tier


class Admit(Message, frozen=True):
    """The deployment is registered. `blank`: it has no content yet, so the device gets zeros."""

    deployment: str
    blank: bool


class Refuse(Message, frozen=True):
    """The deployment cannot be kept on this node; nothing was changed."""

    deployment: str
    reason: str


class MoveTier(Message, frozen=True):
    """Copy the state to the next tier (nothing if `blank`); answered by MoveDone or MoveFailed.

    `follows`: it starts while the move to the host still runs, copies bytes as they arrive, and
    ends after it.
    """

    deployment: str
    to: Tier
    blank: bool = False
    follows: bool = False


class FreeTier(Message, frozen=True):
    """Free the copy on this tier."""

    deployment: str
    tier: Tier


class Drop(Message, frozen=True):
    """Forget the image, and remove what is left of it on every tier."""

    deployment: str


class AnswerTicket(Message, frozen=True):
    """The request of this ticket is done; `refused` says why it cannot be."""

    ticket: int
    refused: str | None = None


class ReportFallback(Message, frozen=True):
    """The holder died with the newest state: the last offloaded image is the state now."""

    deployment: str


class ReportStateLost(Message, frozen=True):
    """The holder died and nothing was offloaded: the deployment restarts from its checkpoint."""

    deployment: str


StateCommand = (
    Admit | Refuse | MoveTier | FreeTier | Drop | AnswerTicket | ReportFallback | ReportStateLost
)
