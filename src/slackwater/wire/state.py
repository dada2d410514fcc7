"""Messages between a worker and its state manager; images travel beside, as descriptors."""

from typing import Any

from slackwater.model.residency import Registration, StoredPart, Tier
from slackwater.wire.frames import Message


class HolderHello(Message, frozen=True):
    """The first message of a worker; `device` tells its device from the node's others."""

    holder: str
    secret: str
    device: str = ""


class RegisterState(Message, frozen=True):
    ask: int
    deployment: str
    parts: list[StoredPart]
    warm: bool


class EnsureState(Message, frozen=True):
    ask: int
    deployment: str
    tier: Tier
    lease: bool
    timeout_s: float


class EvictState(Message, frozen=True):
    ask: int
    deployment: str
    tier: Tier
    timeout_s: float


class NoteState(Message, frozen=True):
    """`what`: release, forget, forget_when_unused or forget_abandoned."""

    ask: int
    deployment: str
    what: str


class SurvivorAsked(Message, frozen=True):
    """Which state without a worker, with that prefix and `after` < seq <= `at_most`?"""

    ask: int
    prefix: str
    after: int
    at_most: int


class StateMoveEnded(Message, frozen=True):
    """How a move that was ordered ended."""

    number: int
    about: dict[str, Any] | None
    failed: str | None


class StateAnswer(Message, frozen=True):
    """To one ask: done, or the error and its kind."""

    ask: int
    error: str | None = None
    kind: str = ""
    registration: Registration | None = None
    survivor: str | None = None


class StateMoveOrder(Message, frozen=True):
    """Load or save a deployment. `images` are names, sizes and whether the descriptor comes with
    this message, in order.

    `arriving`: the deployment's own image is still coming; ImageArrived with the same number says
    how far. `fills`: images that get the frozen parts, which are in none yet, once the deployment
    is loaded.
    """

    number: int
    deployment: str
    to: Tier
    blank: bool
    images: list[tuple[str, int, bool]]
    about: dict[str, Any]
    arriving: bool = False
    fills: frozenset[str] = frozenset()


class ImageArrived(Message, frozen=True):
    """So many bytes of the image that a move waits for are there; or why the rest will not come."""

    number: int
    reached: int
    failed: str | None


class FreeDevice(Message, frozen=True):
    """The deployment was forgotten: its device memory may go."""

    deployment: str


class DropImage(Message, frozen=True):
    """The host image goes: unmap it."""

    image: str


FromHolder = (
    HolderHello
    | RegisterState
    | EnsureState
    | EvictState
    | NoteState
    | SurvivorAsked
    | StateMoveEnded
)
ToHolder = StateAnswer | StateMoveOrder | ImageArrived | FreeDevice | DropImage
