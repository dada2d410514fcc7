"""Several sender processes that each hold slices, and receivers under another layout: a version is
there when all of it is.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sharded_model import HEAD_DIM, SECRET, SENDERS, SHAPES, whole_model

from slackwater.model.errors import NotFoundError
from slackwater.weights.plan.layout import Layout
from slackwater.weights.plan.shard_map import ShardMap
from slackwater.weights.plan.transfer import bytes_by_receiver, fetches, publishing
from slackwater.weights.relay.client import Address, RelayClient
from slackwater.weights.relay.sharded import pull_slices

DEADLINE_S = 60.0
RECEIVERS = Layout(tp=4, pp=2, fused=True)
SENDER = """
import json, sys
import numpy as np
sys.path.insert(0, sys.argv[3])
from sharded_model import SECRET, SENDERS, SHAPES, HEAD_DIM, whole_model
from slackwater.weights.plan.shard_map import ShardMap
from slackwater.weights.plan.transfer import publishing
from slackwater.weights.relay.client import RelayClient
from slackwater.weights.relay.sharded import publish_part

rank, address = int(sys.argv[1]), tuple(json.loads(sys.argv[2]))
model = whole_model()
mine = [each for each in publishing(ShardMap(SHAPES, HEAD_DIM, SENDERS), 256) if each.rank == rank]
slices = {
    each: model[each.tensor][each.box.within(type(each.box).whole(SHAPES[each.tensor]))]
    for each in mine
}
with RelayClient(address, SECRET.encode()) as client:
    print("ready", flush=True)
    sys.stdin.readline()
    publish_part(client, "v1", rank, SENDERS.ranks, slices, "F32", bucket_bytes=1 << 14)
    print("sealed", flush=True)
"""


@pytest.fixture
def relay() -> Iterator[Address]:
    process = subprocess.Popen(
        [sys.executable, "-m", "slackwater.weights.relay", "--memory-gb", "0.1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"SLACKWATER_WORKER_SECRET": SECRET},
    )
    assert process.stdout is not None and process.stdin is not None
    address = json.loads(process.stdout.readline())
    yield address["host"], address["port"]
    process.stdin.close()
    assert process.wait(DEADLINE_S) == 0
    process.stdout.close()


class Sender:
    def __init__(self, rank: int, relay: Address) -> None:
        here = str(Path(__file__).parent)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SENDER, str(rank), json.dumps(relay), here],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> "Sender":
        assert self._said() == "ready"
        return self

    def publish(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        assert self._said() == "sealed"

    def close(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(DEADLINE_S)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def _said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def test_receivers_get_exactly_their_slices_once_the_last_rank_has_published(
    relay: Address,
) -> None:
    model = whole_model()
    published = publishing(ShardMap(SHAPES, HEAD_DIM, SENDERS), 256)
    receivers = ShardMap(SHAPES, HEAD_DIM, RECEIVERS)
    ranks = SENDERS.ranks
    senders = [Sender(rank, relay) for rank in range(ranks)]
    try:
        for sender in senders:
            sender.ready()
        for sender in senders[:-1]:
            sender.publish()
        missing = pytest.raises(NotFoundError, match="v1#4of4")
        with RelayClient(relay, SECRET.encode()) as client, missing:
            pull_slices(client, "v1", ranks, published, receivers.rank(0), "float32")
        senders[-1].close(signal.SIGKILL)  # it dies before it has published
        senders[-1] = Sender(ranks - 1, relay).ready()
        senders[-1].publish()
        plans = {r: fetches(published, receivers.rank(r)) for r in range(RECEIVERS.ranks)}
        wanted = bytes_by_receiver(plans, 4)
        for rank, plan in plans.items():
            shards = receivers.rank(rank)
            with RelayClient(relay, SECRET.encode()) as client:
                local, came = pull_slices(client, "v1", ranks, published, shards, "float32", 10.0)
            assert came == wanted[rank] and len(plan) >= len(shards.pieces)
            for piece in shards.pieces:
                lead = len(piece.at) - len(piece.box.shape)
                inner = zip(piece.at[lead:], piece.box.shape, strict=True)
                there: tuple[int | slice, ...] = piece.at[:lead]
                there += tuple(slice(a, a + n) for a, n in inner)
                held = local[piece.local][there]
                index = tuple(map(slice, piece.box.start, piece.box.stop))
                assert np.array_equal(held, model[piece.tensor][index])
    finally:
        for sender in senders:
            sender.close()
