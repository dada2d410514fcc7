"""Relays of nodes: stocked by a publisher, brought from node to node as told, pulled from by
workers of the node.
"""

import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from relay_stage import SECRET
from torch import Tensor

from slackwater.model.errors import NotFoundError, RefusedError, UnavailableError
from slackwater.model.payload import Payload
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.weights.relay import peers
from slackwater.weights.relay.bucket_store import BucketKey
from slackwater.weights.relay.client import RelayClient
from slackwater.weights.relay.host_copy import host_version
from slackwater.weights.relay.manifest import Manifest
from slackwater.weights.relay.node_relay import FetchOutcome, NodeRelay
from slackwater.weights.relay.peers import RelayPeer
from slackwater.weights.relay.publisher import RelayPublisher
from slackwater.worker.puller import WeightLane

DEADLINE_S = 120.0


class Node:
    """A node's relay, and what it said."""

    def __init__(self, stack: ExitStack, name: str) -> None:
        self.said: queue.Queue[FetchOutcome] = queue.Queue()
        self.name = name
        self.relay = NodeRelay(
            SECRET, name, "127.0.0.1", 64 << 20, tell=self.said.put, timeout_s=60.0
        )
        stack.callback(self.relay.close)

    def bring(self, payload: Payload, source: "Node") -> FetchOutcome:
        source.relay.offer(payload, self.relay.certificate)
        return self.bring_unoffered(payload, source, source.relay.certificate)

    def bring_unoffered(self, payload: Payload, source: "Node", certificate: str) -> FetchOutcome:
        self.relay.fetch(payload, source.name, source.relay.peer_address, certificate)
        return self.said.get(timeout=DEADLINE_S)

    def dial(self, source: "Node") -> RelayClient:
        """As a node that does what it likes."""
        peer = RelayPeer(self.relay._identity, source.relay.certificate)
        return RelayClient(source.relay.peer_address, peer, 20.0)

    def stocker(self) -> RelayPublisher:
        return RelayPublisher(self.relay.address, SECRET, bucket_bytes=1 << 16)


@pytest.fixture(name="stack")
def a_stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(name="hasty")
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for an offer, nor for a proof."""
    monkeypatch.setattr(peers, "_OFFERED_WITHIN_S", 0.3)
    monkeypatch.setattr(peers, "STRANGER_S", 5.0)


def tensors(seed: int, changed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {
        "w": torch.randn(300, 400, generator=generator).to(torch.bfloat16),
        "b": torch.randn(7, generator=generator),
        "empty": torch.empty(0, 3),
    }
    found["w"].view(-1)[:changed] += 1
    return found


def stocked(stocker: RelayPublisher, version: str, content: dict[str, Tensor]) -> Manifest:
    return stocker.stock("model", host_version(version, content, {"lora": None}))


def lane(stack: ExitStack, node: Node, folder: Path, within_s: float = DEADLINE_S) -> WeightLane:
    made = WeightLane(
        DirectoryWeightStore(folder),
        node.relay.address,
        secret=SECRET,
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
    assert rollout.bring(Payload("v1"), trainer).error == ""
    first = engine.take("v1", [Payload("v1")], keep=True)
    assert first.kept and same(dict(first.tensors), tensors(1))
    manifest = stocked(stocker, "v2", tensors(1, changed=40))
    assert manifest.bytes_of("v1") < manifest.bytes_of("") / 50
    assert rollout.bring(Payload("v2", "v1"), trainer).error == ""
    second = engine.take("v2", [Payload("v2", "v1")], keep=True)
    assert second.kept and same(dict(second.tensors), tensors(1, changed=40))
    assert same(dict(first.tensors), tensors(1)), "what was given out is changed"
    assert engine.pulled_over_relay == 2
    rollout.relay.drop(Payload("v1"))
    rollout.relay.drop(Payload("v2", "v1"))
    until_s = time.monotonic() + DEADLINE_S
    while rollout.relay.store.used_bytes and time.monotonic() < until_s:
        time.sleep(0.01)  # the thread that sent the last bucket has yet to close it
    assert rollout.relay.store.used_bytes == 0 and not rollout.relay.store.manifests()


def test_dense_deltas_are_tried_seldom_on_a_fast_network_and_sparse_ones_always_made(
    stack: ExitStack,
) -> None:
    node = Node(stack, "trainer")

    def with_delta(
        name: str, versions: list[dict[str, Tensor]], *, dense_deltas: bool
    ) -> list[int]:
        stocker = RelayPublisher(node.relay.address, SECRET, dense_deltas=dense_deltas)
        made = [stocked(stocker, f"{name}{n}", content) for n, content in enumerate(versions)]
        return [n for n, manifest in enumerate(made) if len(manifest.sizes) == 2]

    dense, sparse = [tensors(n) for n in range(18)], [tensors(0, changed=n) for n in range(1, 5)]
    assert with_delta("dense", dense, dense_deltas=False) == [1, 17]
    assert with_delta("sparse", sparse, dense_deltas=False) == [1, 2, 3]
    assert with_delta("anyway", dense[:4], dense_deltas=True) == [1, 2, 3]


def test_a_worker_may_ask_before_the_payload_is_on_its_way(
    stack: ExitStack, tmp_path: Path
) -> None:
    trainer, rollout = Node(stack, "trainer"), Node(stack, "rollout")
    stocked(trainer.stocker(), "v1", tensors(1))
    engine = lane(stack, rollout, tmp_path)
    later = threading.Timer(
        0.2,
        rollout.relay.fetch,
        (Payload("v1"), "trainer", trainer.relay.peer_address, trainer.relay.certificate),
    )
    trainer.relay.offer(Payload("v1"), rollout.relay.certificate)
    later.start()
    assert same(dict(engine.take("v1", [Payload("v1")]).tensors), tensors(1))
    later.join()


def test_what_the_relay_cannot_give_comes_from_the_store(stack: ExitStack, tmp_path: Path) -> None:
    node = Node(stack, "node")
    engine = lane(stack, node, tmp_path)
    DirectoryWeightStore(tmp_path).publish("v2", tensors(2), {"lora": None})
    taken = engine.take("v2", [Payload("v2", "never-held")], keep=True)
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
    broke = rollout.bring(Payload("v1"), gone)
    assert broke.error and (broke.payload, broke.source) == (Payload("v1"), "gone")
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    rollout.relay.fetch(
        Payload("v1"), "silent", silent.getsockname()[:2], rollout.relay.certificate
    )
    assert rollout.bring(Payload("v1"), trainer) == FetchOutcome(Payload("v1"), "trainer")
    assert rollout.said.empty(), "a bringing that was called off was told of"
    engine = lane(stack, rollout, tmp_path)
    assert same(dict(engine.take("v1", [Payload("v1")]).tensors), tensors(1))


def test_a_payload_that_is_given_up_leaves_nobody_waiting(stack: ExitStack, tmp_path: Path) -> None:
    rollout = Node(stack, "rollout")
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    DirectoryWeightStore(tmp_path).publish("v1", tensors(1), {"lora": None})
    engine = lane(stack, rollout, tmp_path, within_s=10_000.0)
    rollout.relay.fetch(
        Payload("v1"), "silent", silent.getsockname()[:2], rollout.relay.certificate
    )
    later = threading.Timer(0.2, rollout.relay.drop, (Payload("v1"),))
    later.start()
    assert same(dict(engine.take("v1", [Payload("v1")]).tensors), tensors(1))
    assert engine.pulled_from_store == 1
    later.join()


def test_a_node_to_which_nothing_is_offered_gets_nothing(stack: ExitStack, hasty: None) -> None:
    trainer, stranger = Node(stack, "trainer"), Node(stack, "stranger")
    stocked(trainer.stocker(), "v1", tensors(1))
    certificate = trainer.relay.certificate
    assert stranger.bring_unoffered(Payload("v1"), trainer, certificate).error
    assert stranger.relay.store.payloads() == ()
    # Nor does one that shows no certificate, or one that only knows the secret of the node's own
    # processes.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    plain = socket.create_connection(trainer.relay.peer_address, timeout=60)
    with pytest.raises(OSError), context.wrap_socket(plain) as nobody:
        assert nobody.recv(1) == b""
        raise ConnectionResetError
    with pytest.raises(UnavailableError):
        RelayClient(trainer.relay.peer_address, SECRET, 20.0)
    assert stranger.bring(Payload("v1"), trainer).error == ""  # once it is offered


def test_a_relay_that_is_not_the_one_meant_is_given_no_trust(stack: ExitStack) -> None:
    trainer, impostor, rollout = (Node(stack, name) for name in ("trainer", "impostor", "rollout"))
    stocked(impostor.stocker(), "v1", tensors(2))
    impostor.relay.offer(Payload("v1"), rollout.relay.certificate)
    broke = rollout.bring_unoffered(Payload("v1"), impostor, trainer.relay.certificate)
    assert "is not the one meant" in broke.error
    assert rollout.relay.store.payloads() == ()


def test_a_node_reads_what_it_is_offered_and_changes_nothing(stack: ExitStack, hasty: None) -> None:
    trainer, rollout = Node(stack, "trainer"), Node(stack, "rollout")
    for number in (1, 2):
        stocked(trainer.stocker(), f"v{number}", tensors(number))
    trainer.relay.offer(Payload("v1"), rollout.relay.certificate)
    with rollout.dial(trainer) as client:
        manifest = client.manifest("v1")
        for forbidden in (
            lambda: client.manifest("v2"),
            lambda: client.get(BucketKey(Payload("v2"), 0), [memoryview(bytearray(8))]),
            lambda: client.drop(Payload("v1")),
            lambda: client.seal(manifest),
            lambda: client.put(BucketKey(Payload("v9"), 0), 8, 1, [memoryview(bytes(8))]),
            client.versions,
        ):
            with pytest.raises(RefusedError, match=r"not offered|may not do that"):
                forbidden()
        assert client.manifest("v1") == manifest
    assert {payload.version for payload in trainer.relay.store.payloads()} == {"v1", "v2"}
    trainer.relay.drop(Payload("v1"))
    with pytest.raises(UnavailableError):
        rollout.dial(trainer)
