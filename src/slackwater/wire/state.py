"""Messages between a worker and its state manager; images travel beside, as descriptors."""

from typing import Any

import msgspec

from slackwater.wire.frames import Message


class PartFacts(msgspec.Struct, frozen=True, array_like=True):
    """One part of a deployment: its key, its type, its role."""

    job: str
    model: str
    parameter: str
    kind: str
    start: int
    stop: int
    dtype: str
    element_bytes: int
    role: str
    shape: list[int]


class StretchFacts(msgspec.Struct, frozen=True, array_like=True):
    """Where a run of bytes is on the device and in a host image."""

    image: str
    on_device: int
    on_host: int
    bytes: int
    writes: bool
    kind: str


class HolderHello(Message, frozen=True):
    """The first message of a worker; `device` tells its device from the node's others."""

    holder: str
    secret: str
    device: str = ""


class RegisterState(Message, frozen=True):
    ask: int
    deployment: str
    parts: list[PartFacts]
    warm: bool


class EnsureState(Message, frozen=True):
    ask: int
    deployment: str
    tier: int
    lease: bool
    timeout_s: float


class EvictState(Message, frozen=True):
    ask: int
    deployment: str
    tier: int
    timeout_s: float


class MaterializeState(Message, frozen=True):
    """Write a checkpoint, or weights, to a file of this node."""

    ask: int
    deployment: str
    path: str
    kinds: list[str] | None


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
    blank: bool = False
    stretches: tuple[StretchFacts, ...] = ()
    device_bytes: int = 0
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
    to: int
    blank: bool
    images: list[tuple[str, int, bool]]
    about: dict[str, Any]
    arriving: bool = False
    fills: tuple[str, ...] = ()


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
    | MaterializeState
    | NoteState
    | SurvivorAsked
    | StateMoveEnded
)
ToHolder = StateAnswer | StateMoveOrder | ImageArrived | FreeDevice | DropImage
