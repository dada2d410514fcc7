"""The port between publishers and pullers of weights.

A version is immutable: it becomes visible when complete, and a name never changes its meaning. The
transport (whole versions, exact deltas, a relay) is up to the implementation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from slackwater.tensors.header import TensorHeader
    from slackwater.weights.plan.shard_map import RankShards


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
        """Publish a version atomically; idempotent, other bytes under the same name are refused.

        Without `durable` it is visible sooner but may be lost in a power failure.
        """

    def pull(self, version: str, device: str = "cpu") -> dict[str, Tensor]:
        """The version's tensors, exactly as published; errors leave nothing behind."""

    def pull_slices(self, version: str, receiver: RankShards) -> tuple[dict[str, Tensor], int]:
        """What one rank of an engine holds of the version, and the bytes that were read for it."""

    def manifest(self, version: str) -> TensorHeader:
        """The version's shapes, checksums and `meta`, without its tensors."""

    def versions(self) -> tuple[str, ...]:
        """Every visible version, by name."""

    def retain(self, keep: Collection[str]) -> tuple[str, ...]:
        """Drop all other versions and return them; pulls in progress are not disturbed."""
