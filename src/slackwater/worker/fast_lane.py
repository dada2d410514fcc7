"""Whether this worker's weights go over a relay: said in the environment by whoever started it."""

import logging
import os
import platform
import socket

from slackwater.weights.port import WeightStore
from slackwater.weights.relay.lane import FastLane
from slackwater.weights.relay.store import RelayWeightStore
from slackwater.worker.process import address_of

logger = logging.getLogger(__name__)

RELAY_VARIABLE = "SLACKWATER_WEIGHT_RELAY"  # HOST:PORT of `python -m slackwater.weights.relay`
SITE_VARIABLE = "SLACKWATER_SITE"  # the name of the fast network that this machine is on
_MEMORY_BYTES = 64 << 30


def with_fast_lane(durable: WeightStore, worker: str, secret: str) -> WeightStore:
    """The store itself, or with a relay beside it if one is named and answers."""
    where = os.environ.get(RELAY_VARIABLE)
    if not where:
        return durable
    relay = address_of(where)
    try:
        host = _own_address(relay)
    except OSError as error:
        logger.warning("weights go without a relay: %s: %s", where, error)
        return durable
    store = RelayWeightStore(
        relay,
        secret.encode(),
        worker,
        node=platform.node(),
        site=os.environ.get(SITE_VARIABLE, ""),
        host=host,
        max_bytes=_MEMORY_BYTES,
    )
    return FastLane(durable, store)


def _own_address(relay: tuple[str, int]) -> str:
    """The address by which neighbours on the relay's network reach this machine."""
    with socket.create_connection(relay, timeout=10.0) as probe:
        address: str = probe.getsockname()[0]
        return address
