"""A trainer waits for its own copy; stocking and writing go on beside it."""

import queue
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slackwater.model.errors import RefusedError
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.weights.relay.node_relay import NodeRelay
from slackwater.weights.relay.publisher import RelayPublisher
from slackwater.wire import messages
from slackwater.worker.publishing import Publication, VersionPublisher

DEADLINE_S = 120.0
SECRET = b"of this fleet"


class GatedStore(DirectoryWeightStore):
    """A real store whose writing waits for a gate, as on a slow disk."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()

    def publish(
        self,
        version: str,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        durable: bool = True,
    ) -> None:
        assert self.gate.wait(DEADLINE_S)
        super().publish(version, tensors, meta, durable=durable)


def failed(op: int, error: Exception) -> messages.OpFailed:
    return messages.OpFailed(op, str(error), "user", state_lost=False)


def publication(
    op: int, model: str, version: str, weights: dict[str, torch.Tensor], *, stock: bool = True
) -> Publication:
    return Publication(op, model, version, weights, {"lora": None}, durable=False, stock=stock)


def test_the_copy_is_all_that_publishing_waits_for(tmp_path: Path) -> None:
    said: queue.Queue[messages.Message] = queue.Queue()
    store = GatedStore(tmp_path)
    plan_publishing = VersionPublisher(store, said.put, failed)
    weights = {"w": torch.ones(8)}
    plan_publishing.begin(publication(1, "model", "v1", weights))
    assert isinstance(said.get(timeout=DEADLINE_S), messages.PublishDetached)
    weights["w"].add_(1)  # the trainer goes on
    assert said.empty() and not store.versions()
    store.gate.set()
    done = said.get(timeout=DEADLINE_S)
    assert isinstance(done, messages.OpDone) and done.op == 1
    assert torch.equal(store.pull("v1")["w"], torch.ones(8))
    plan_publishing.close()


def test_what_cannot_be_written_is_said_of_its_operation_alone(tmp_path: Path) -> None:
    said: queue.Queue[messages.Message] = queue.Queue()
    store = GatedStore(tmp_path)
    store.gate.set()
    plan_publishing = VersionPublisher(store, said.put, failed)
    for op, value in ((1, 1.0), (2, 2.0)):
        weights = {"w": torch.full((8,), value)}
        plan_publishing.begin(publication(op, "model", "v1", weights))
    plan_publishing.close()
    told = [message for message in said.queue if not isinstance(message, messages.PublishDetached)]
    assert isinstance(told[0], messages.OpDone) and isinstance(told[1], messages.OpFailed)
    assert told[1].op == 2 and "other weights" in told[1].error
    with pytest.raises(RefusedError):
        store.publish("v1", {"w": torch.zeros(8)}, {})


def test_a_version_is_on_the_relay_before_it_is_said_to_be_written(tmp_path: Path) -> None:
    said: queue.Queue[messages.Message] = queue.Queue()
    store = GatedStore(tmp_path)
    store.gate.set()
    with ExitStack() as stack:
        relay = NodeRelay(SECRET, "node", "127.0.0.1", 64 << 20, tell=lambda _: None)
        stack.callback(relay.close)
        plan_publishing = VersionPublisher(
            store, said.put, failed, stocker=RelayPublisher(relay.address, SECRET), node="node"
        )
        weights = {"w": torch.ones(300_000)}
        for op in (1, 2):
            plan_publishing.begin(publication(op, "model", f"v{op}", weights))
            weights["w"][:10] += 1
        small = {"w": torch.ones(3)}
        plan_publishing.begin(publication(3, "small", "s1", small))
        plan_publishing.close()
        kinds = [
            (type(m).__name__, getattr(m, "op", getattr(m, "version", None)))
            for m in said.queue
            if not isinstance(m, messages.PublishDetached)
        ]
        assert kinds == [
            ("VersionStocked", "v1"),
            ("OpDone", 1),
            ("VersionStocked", "v2"),
            ("OpDone", 2),
            ("OpDone", 3),  # too small to be worth a relay
        ]
        stocked = [m for m in said.queue if isinstance(m, messages.VersionStocked)]
        assert stocked[0].sizes == {"": 1_200_000}
        assert stocked[1].sizes["v1"] < 10_000 and stocked[1].node == "node"


def test_a_version_that_no_other_node_can_want_is_left_to_the_store(tmp_path: Path) -> None:
    said: queue.Queue[messages.Message] = queue.Queue()
    with ExitStack() as stack:
        relay = NodeRelay(SECRET, "node", "127.0.0.1", 64 << 20, tell=lambda _: None)
        stack.callback(relay.close)
        stocker = RelayPublisher(relay.address, SECRET)
        store = DirectoryWeightStore(tmp_path)
        plan_publishing = VersionPublisher(store, said.put, failed, stocker=stocker, node="node")
        weights = {"w": torch.ones(300_000)}
        plan_publishing.begin(publication(1, "model", "v1", weights, stock=False))
        plan_publishing.close()
        assert not relay.store.payloads()
    assert not any(isinstance(message, messages.VersionStocked) for message in said.queue)
    assert torch.equal(store.pull("v1")["w"], weights["w"])
