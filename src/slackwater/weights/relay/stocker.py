"""Puts versions on the node's relay, whole and as deltas since the model's last one."""

from collections import OrderedDict

from slackwater.weights.relay.bucket import BUCKET_BYTES, Manifest
from slackwater.weights.relay.client import Address, RelayClient
from slackwater.weights.relay.publisher import HostVersion, publish

_BASES = 4  # models whose last version is kept, to find out what changed


class RelayStocker:
    """For one thread. What it stocked goes when the weight director says so."""

    def __init__(self, relay: Address, secret: bytes, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._relay, self._secret, self._bucket_bytes = relay, secret, bucket_bytes
        self._last: OrderedDict[str, HostVersion] = OrderedDict()

    def stock(self, line: str, new: HostVersion) -> Manifest:
        """Put the next version of the model `line` there; visible when all of it is."""
        base = self._last.pop(line, None)
        with RelayClient(self._relay, self._secret) as client:
            manifest = publish(client, new, base, self._bucket_bytes)
        self._last[line] = new
        while len(self._last) > _BASES:
            self._last.popitem(last=False)
        return manifest
