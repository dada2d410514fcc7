"""What a worker and its node's state manager ask of each other, in process or over a socket."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from slackwater.model.residency import Tier
from slackwater.state.image import HostImage, ImageArrivalProgress

# Counters and the like, that belong to a state and are no tensors ("meta"). "empty_kinds" are kinds
# that are all zeros, and are neither copied nor stored until they are not. "seq" is the last
# operation whose effect is in it.
About = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """How a holder's move ended: `about` of a saved state, or why it `failed`."""

    about: About | None = None
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class HolderMove:
    """Load from the images (zeros if `blank`) or save to them, and report the outcome.

    `arrival`: the deployment's own image is still coming from disk, and is loaded as it comes.
    `fills`: empty images of frozen parts that are filled once the owner is bound.
    """

    deployment: str
    to: Tier
    blank: bool
    images: Mapping[str, HostImage]
    about: About
    arrival: ImageArrivalProgress | None = None
    fills: frozenset[str] = frozenset()


class DeviceHolder(Protocol):
    """A worker's part of the device."""

    def begin(self, move: HolderMove, ended: Callable[[MoveOutcome], None]) -> None:
        """Start a move and return; `ended` is called from any thread."""

    def free(self, deployment: str) -> None:
        """The deployment was forgotten while on the device: its memory may go."""

    def drop_image(self, image: str) -> None:
        """A host image is about to go: unmap it."""
