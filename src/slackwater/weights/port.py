"""The port between those who publish weights and those who pull them.

A version is immutable: it becomes visible when all of it is there, and the same name never means
other weights. What travels behind the port (whole versions, exact deltas, a relay) is the
implementation's matter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from slackwater.tensors.header import TensorHeader


class WeightStore(Protocol):
    """Where versions live."""

    def publish(
        self,
        version: str,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        durable: bool = True,
    ) -> None:
        """Make the version visible, whole. Publishing the same again is nothing; other bytes are
        refused.

        Without `durable` it is visible sooner, and may be lost if the machine loses its power soon
        after.
        """
        ...

    def pull(self, version: str, device: str = "cpu") -> dict[str, Tensor]:
        """The version's tensors, exactly as published; NotFoundError or ConfigError leave nothing
        behind.
        """
        ...

    def manifest(self, version: str) -> TensorHeader:
        """The version's shapes, checksums and `meta`, without its tensors."""
        ...

    def versions(self) -> tuple[str, ...]:
        """Every visible version, by name."""
        ...

    def retain(self, keep: Collection[str]) -> tuple[str, ...]:
        """Drop every version not named; returns those dropped. A pull under way is not
        disturbed.
        """
        ...
