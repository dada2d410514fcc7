"""Relays of nodes: stocked by a publisher, brought from node to node as told, pulled from by workers of the node."""

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from relay_stage import SECRET
from torch import Tensor

from slackwater.model.cargo import Cargo
from slackwater.model.errors import NotFoundError
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.weights.relay.host_copy import host_version
from slackwater.weights.relay.manifest import Manifest
from slackwater.weights.relay.node_relay import Brought, NodeRelay
from slackwater.weights.relay.stocker import Stocker
from slackwater.worker.weight_lane import WeightLane

DEADLINE_S = 120.0


class Node:
    """A node's relay, and what it said."""

    def __init__(self, stack: ExitStack, name: str, secret: bytes = SECRET) -> None:
        self.said: queue.Queue[Brought] = queue.Queue()
        self.name = name
        self.relay = NodeRelay(
            *(secret, name, "127.0.0.1", 64 << 20), tell=self.said.put, timeout_s=10.0
        )
        stack.callback(self.relay.close)

    def bring(self, cargo: Cargo, source: "Node") -> Brought:
        self.relay.bring(cargo, source.name, source.relay.address)
        return self.said.get(timeout=DEADLINE_S)

    def stocker(self) -> Stocker:
        return Stocker(self.relay.address, SECRET, bucket_bytes=1 << 16)


@pytest.fixture(name="stack")
def a_stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def tensors(seed: int, changed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {
        "w": torch.randn(300, 400, generator=generator).to(torch.bfloat16),
        "b": torch.randn(7, generator=generator),
        "empty": torch.empty(0, 3),
    }
    found["w"].view(-1)[:changed] += 1
    return found


def stocked(stocker: Stocker, version: str, content: dict[str, Tensor]) -> Manifest:
    return stocker.stock("model", host_version(version, content, {"lora": None}))


def lane(stack: ExitStack, node: Node, folder: Path, within_s: float = 5.0) -> WeightLane:
    made = WeightLane(
        DirectoryWeightStore(folder),
        node.relay.address,
        secret=SECRET,
        worker="engine",
        node=node.name,
        within_s=within_s,
    )
    stack.callback(made.close)
    return made


def same(one: "dict[str, Tensor]", other: "dict[str, Tensor]") -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8))
        for name in one
        if one[name].numel()
    )


def test_a_version_goes_from_node_to_node_and_its_delta_changes_the_copy_that_a_worker_kept(
    stack: ExitStack, tmp_path: Path
) -> None:
    trainer, rollout = Node(stack, "trainer"), Node(stack, "rollout")
    stocker, engine = trainer.stocker(), lane(stack, rollout, tmp_path)
    stocked(stocker, "v1", tensors(1))
    assert rollout.bring(Cargo("v1"), trainer).error == ""
    first = engine.take("v1", [Cargo("v1")], keep=True)
    assert first.kept and same(dict(first.tensors), tensors(1))
    manifest = stocked(stocker, "v2", tensors(1, changed=40))
    assert manifest.bytes_of("v1") < manifest.bytes_of("") / 50
    assert rollout.bring(Cargo("v2", "v1"), trainer).error == ""
    second = engine.take("v2", [Cargo("v2", "v1")], keep=True)
    assert second.kept and same(dict(second.tensors), tensors(1, changed=40))
    assert same(dict(first.tensors), tensors(1)), "what was given out is changed"
    assert engine.pulled_over_relay == 2
    rollout.relay.drop(Cargo("v1"))
    rollout.relay.drop(Cargo("v2", "v1"))
    assert rollout.relay.shelf.used_bytes == 0 and not rollout.relay.shelf.manifests()


def test_a_worker_may_ask_before_the_cargo_is_on_its_way(stack: ExitStack, tmp_path: Path) -> None:
    trainer, rollout = Node(stack, "trainer"), Node(stack, "rollout")
    stocked(trainer.stocker(), "v1", tensors(1))
    engine = lane(stack, rollout, tmp_path)
    later = threading.Timer(
        0.2, rollout.relay.bring, (Cargo("v1"), "trainer", trainer.relay.address)
    )
    later.start()
    assert same(dict(engine.take("v1", [Cargo("v1")]).tensors), tensors(1))
    later.join()


def test_what_the_relay_cannot_give_comes_from_the_store(stack: ExitStack, tmp_path: Path) -> None:
    node = Node(stack, "node")
    engine = lane(stack, node, tmp_path)
    DirectoryWeightStore(tmp_path).publish("v2", tensors(2), {"lora": None})
    taken = engine.take("v2", [Cargo("v2", "never-held")], keep=True)
    assert not taken.kept and same(dict(taken.tensors), tensors(2))
    assert (engine.pulled_over_relay, engine.pulled_from_store) == (0, 1)
    with pytest.raises(NotFoundError, match="v3"):
        engine.take("v3")


def test_a_source_that_is_gone_or_falls_silent_is_named_and_another_goes_on(
    stack: ExitStack, tmp_path: Path
) -> None:
    trainer, rollout, gone = (Node(stack, name) for name in ("trainer", "rollout", "gone"))
    stocked(trainer.stocker(), "v1", tensors(1))
    gone.relay.close()
    broke = rollout.bring(Cargo("v1"), gone)
    assert broke.error and (broke.cargo, broke.source) == (Cargo("v1"), "gone")
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    rollout.relay.bring(Cargo("v1"), "silent", silent.getsockname()[:2])
    assert rollout.bring(Cargo("v1"), trainer) == Brought(Cargo("v1"), "trainer")
    assert rollout.said.empty(), "a bringing that was called off was told of"
    engine = lane(stack, rollout, tmp_path)
    assert same(dict(engine.take("v1", [Cargo("v1")]).tensors), tensors(1))


def test_a_cargo_that_is_given_up_leaves_nobody_waiting(stack: ExitStack, tmp_path: Path) -> None:
    rollout = Node(stack, "rollout")
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    DirectoryWeightStore(tmp_path).publish("v1", tensors(1), {"lora": None})
    engine = lane(stack, rollout, tmp_path, within_s=10_000.0)
    rollout.relay.bring(Cargo("v1"), "silent", silent.getsockname()[:2])
    later = threading.Timer(0.2, rollout.relay.drop, (Cargo("v1"),))
    later.start()
    assert same(dict(engine.take("v1", [Cargo("v1")]).tensors), tensors(1))
    assert engine.pulled_from_store == 1
    later.join()


def test_a_relay_with_another_secret_gives_nothing(stack: ExitStack) -> None:
    trainer, stranger = Node(stack, "trainer"), Node(stack, "stranger", b"another")
    stocked(trainer.stocker(), "v1", tensors(1))
    assert "secret" in stranger.bring(Cargo("v1"), trainer).error
