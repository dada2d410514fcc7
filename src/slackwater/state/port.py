"""The interface between a worker and its node's state manager, in process or over a socket."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from slackwater.model.residency import Tier
from slackwater.state.image import HostImage, ImageArrivalProgress

# A state's data besides tensors. "meta" holds counters. "empty_kinds" are kinds whose tensors are
# all zeros: they are neither copied nor stored. "seq" is the last operation in the state.
About = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """The result of a holder's move: `about` of a saved state, or why it `failed`."""

    about: About | None = None
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class HolderMove:
    """Load from the images (zeros if `blank`) or save to them, and report the outcome.

    `arrival`: the deployment's own image is still being read from disk, and is loaded as it
    arrives. `fills`: empty images of frozen parts, which are filled after the owner is bound.
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

    def begin(self, move: HolderMove, on_end: Callable[[MoveOutcome], None]) -> None:
        """Start a move and return; `on_end` is called from any thread."""

    def free(self, deployment: str) -> None:
        """The deployment was forgotten while on the device: free its memory."""

    def drop_image(self, image: str) -> None:
        """A host image is about to be freed: unmap it."""
