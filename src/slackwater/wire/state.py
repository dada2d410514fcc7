"""Messages between a worker and its state manager. Images are passed as file descriptors."""

from typing import Any, Literal

from slackwater.model.residency import Registration, StoredPart, Tier
from slackwater.wire.frames import Message


class HolderHello(Message, frozen=True):
    """The first message of a worker; `device` identifies its device on the node."""

    holder: str
    secret: str
    device: str = ""


class StateRequest(Message, frozen=True, kw_only=True):
    """A request that a `StateAnswer` with the same number answers."""

    ask: int = 0


class RegisterState(StateRequest, frozen=True):
    deployment: str
    parts: list[StoredPart]
    warm: bool


class EnsureState(StateRequest, frozen=True):
    deployment: str
    tier: Tier
    lease: bool
    timeout_s: float


class EvictState(StateRequest, frozen=True):
    deployment: str
    tier: Tier
    timeout_s: float


class NoteState(StateRequest, frozen=True):
    deployment: str
    what: Literal["release", "forget", "forget_when_unused", "forget_abandoned"]


class FindSurvivor(StateRequest, frozen=True, tag="SurvivorAsked"):
    """Find a state without a worker, with this prefix and `after` < seq <= `at_most`."""

    prefix: str
    after: int
    at_most: int


class StateMoveEnded(Message, frozen=True):
    """The result of a `StateMoveOrder`."""

    number: int
    about: dict[str, Any] | None
    failed: str | None


class StateAnswer(Message, frozen=True):
    """The answer to one request: done, or the error and its kind."""

    ask: int
    error: str | None = None
    kind: str = ""
    registration: Registration | None = None
    survivor: str | None = None


class StateMoveOrder(Message, frozen=True):
    """Load or save a deployment. `images` are names, sizes and whether the descriptor comes with
    this message, in order.

    `arriving`: the deployment's own image is still arriving; `ImageArrived` with the same number
    reports progress. `fills`: images that receive the frozen parts, which no image has yet, once
    the deployment is loaded.
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
    """`reached` bytes of the image of a move have arrived; `failed` if no more will."""

    number: int
    reached: int
    failed: str | None


class FreeDevice(Message, frozen=True):
    """The deployment was dropped: free its device memory."""

    deployment: str


class DropImage(Message, frozen=True):
    """The host image is dropped: unmap it."""

    image: str


StateCall = RegisterState | EnsureState | EvictState | NoteState | FindSurvivor
FromHolder = HolderHello | StateCall | StateMoveEnded
ToHolder = StateAnswer | StateMoveOrder | ImageArrived | FreeDevice | DropImage
