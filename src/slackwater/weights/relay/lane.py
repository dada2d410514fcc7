"""A fast lane beside a durable store: versions are published to both and pulled over the relay, as deltas where that is smaller.

The durable store stays the truth: what it holds exists, and whatever the relay cannot give is pulled from it.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from slackwater.model.errors import SlackwaterError
from slackwater.tensors.header import TensorHeader
from slackwater.weights.port import WeightStore
from slackwater.weights.relay.store import RelayWeightStore

logger = logging.getLogger(__name__)


class FastLane:
    """A weight store over two: `durable` decides, `relay` carries. A pull waits `patience_s` for the relay to show a version."""

    def __init__(
        self, durable: WeightStore, relay: RelayWeightStore, patience_s: float = 2.0
    ) -> None:
        self._durable, self._relay, self._patience_s = durable, relay, patience_s
        self.pulled_over_relay = 0
        self.pulled_from_durable = 0

    def publish(
        self,
        version: str,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        durable: bool = True,
    ) -> None:
        """Publish to both; the relay's part goes on beside the caller, and its failure costs speed alone.

        The durable store comes first: a name that it refuses must not mean other weights on the relay.
        """
        self._durable.publish(version, tensors, meta, durable=durable)
        try:
            self._relay.publish(version, tensors, meta)
        except SlackwaterError as error:
            logger.warning("relay left out version=%s: %s", version, error)

    def pull(self, version: str, device: str = "cpu") -> dict[str, Tensor]:
        """The version's tensors, exactly as published, over the relay if it has them."""
        try:
            if self._relay.shows(version, self._patience_s):
                found = self._relay.pull(version, device)
                self.pulled_over_relay += 1
                return found
        except SlackwaterError as error:
            logger.warning("relay gave no version=%s: %s", version, error)
        self.pulled_from_durable += 1
        return self._durable.pull(version, device)

    def manifest(self, version: str) -> TensorHeader:
        """As the durable store has it."""
        return self._durable.manifest(version)

    def versions(self) -> tuple[str, ...]:
        """Every version that exists."""
        return self._durable.versions()

    def retain(self, keep: Collection[str]) -> tuple[str, ...]:
        """Drop every version not named, from both."""
        try:
            self._relay.retain(keep)
        except SlackwaterError as error:
            logger.warning("relay keeps its versions: %s", error)
        return self._durable.retain(keep)

    def flush(self) -> None:
        """Wait until the relay shows all that was published."""
        self._relay.flush()

    def close(self) -> None:
        """Leave the relay."""
        self._relay.close()
