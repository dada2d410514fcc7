"""Whether this worker's weights go over a relay: said in the environment by whoever started it."""

import os
import platform
import socket

from slackwater.model.errors import UnavailableError
from slackwater.weights.port import WeightStore
from slackwater.weights.relay.lane import FastLane
from slackwater.weights.relay.store import RelayWeightStore
from slackwater.worker.process import address_of

RELAY_VARIABLE = "SLACKWATER_WEIGHT_RELAY"  # HOST:PORT of `python -m slackwater.weights.relay`
SITE_VARIABLE = "SLACKWATER_SITE"  # the name of the fast network that this machine is on
_MEMORY_BYTES = 64 << 30


def with_fast_lane(durable: WeightStore, worker: str, secret: str) -> WeightStore:
    """The store itself, or with a relay beside it if one is named."""
    where = os.environ.get(RELAY_VARIABLE)
    if not where:
        return durable
    relay = address_of(where)
    store = RelayWeightStore(
        relay,
        secret.encode(),
        worker,
        node=platform.node(),
        site=os.environ.get(SITE_VARIABLE, ""),
        host=_own_address(relay),
        max_bytes=_MEMORY_BYTES,
    )
    return FastLane(durable, store)


def _own_address(relay: tuple[str, int]) -> str:
    """The address by which neighbours on the relay's network reach this machine."""
    try:
        with socket.create_connection(relay, timeout=10.0) as probe:
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise UnavailableError(f"relay {relay[0]}:{relay[1]}: {error}") from None
