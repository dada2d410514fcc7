"""The weight port over a relay, alone and beside a durable store."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from relay_stage import SECRET
from torch import Tensor

from slackwater.model.errors import NotFoundError
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.weights.relay.lane import FastLane
from slackwater.weights.relay.server import RelayServer
from slackwater.weights.relay.shelf import Shelf
from slackwater.weights.relay.store import RelayWeightStore
from slackwater.weights.relay.tracker import Tracker
from slackwater.worker.fast_lane import RELAY_VARIABLE, with_fast_lane


@pytest.fixture(name="server")
def a_server() -> Iterator[RelayServer]:
    server = RelayServer(Shelf(64 << 20), SECRET, Tracker("trainer", "train"))
    yield server
    server.close()


@pytest.fixture(name="stack")
def a_stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def store(
    server: RelayServer, stack: ExitStack, name: str, within_s: float = 60.0
) -> RelayWeightStore:
    made = RelayWeightStore(
        server.address, SECRET, name, node=name, bucket_bytes=1 << 16, pull_within_s=within_s
    )
    stack.callback(made.close)
    return made


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(300, 400, generator=generator).to(torch.bfloat16),
        "b": torch.randn(7, generator=generator),
        "empty": torch.empty(0, 3),
        "steps": torch.tensor([[seed]]),
        "small": torch.randn(50, generator=generator).to(torch.float8_e4m3fn),
    }


def durable_tensors(seed: int) -> dict[str, Tensor]:
    """Of types that the durable store takes."""
    return {name: tensor for name, tensor in tensors(seed).items() if name != "small"}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and torch.equal(
            one[name].reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)
        )
        for name in one
    )


def test_publishing_returns_at_once_and_a_pull_waits_for_it(
    server: RelayServer, stack: ExitStack
) -> None:
    sender, receiver = store(server, stack, "sender"), store(server, stack, "receiver")
    weights = tensors(1)
    sender.publish("v1", weights, {"lora": None})
    weights["w"].zero_()  # the trainer goes on; what was published stays
    assert same(receiver.pull("v1"), tensors(1))
    header = receiver.manifest("v1")
    assert header.meta == {"lora": None}
    assert header.shapes["w"] == (300, 400)
    assert receiver.versions() == ("v1",)


def test_older_wholes_go_and_the_chain_stays(server: RelayServer, stack: ExitStack) -> None:
    sender, receiver = store(server, stack, "sender"), store(server, stack, "receiver")
    weights = tensors(1)
    for number in range(4):
        weights["w"][number] += 1
        sender.publish(f"v{number}", weights, {})
        if number == 0:
            receiver.pull("v0")
    sender.flush()
    assert same(receiver.pull("v3"), weights)
    sizes = {manifest.version: set(manifest.sizes) for manifest in server.shelf.manifests()}
    assert sizes == {"v1": {"v0"}, "v2": {"v1"}, "v3": {"", "v2"}}


def test_retaining_drops_what_is_not_named(server: RelayServer, stack: ExitStack) -> None:
    sender = store(server, stack, "sender")
    for number in range(3):
        sender.publish(f"v{number}", tensors(number), {})
    sender.flush()
    assert "v2" in sender.versions()
    sender.retain({"v2"})
    assert sender.versions() == ("v2",)
    sender.retain(())
    assert server.shelf.used_bytes == 0


def test_beside_a_durable_store_the_relay_carries_and_the_store_decides(
    server: RelayServer, stack: ExitStack, tmp_path: Path
) -> None:
    sender = FastLane(DirectoryWeightStore(tmp_path), store(server, stack, "sender"))
    receiver = FastLane(DirectoryWeightStore(tmp_path), store(server, stack, "receiver"), 0.2)
    sender.publish("v1", durable_tensors(1), {"lora": None})
    sender.flush()
    assert same(receiver.pull("v1"), durable_tensors(1))
    assert (receiver.pulled_over_relay, receiver.pulled_from_durable) == (1, 0)
    DirectoryWeightStore(tmp_path).publish("v2", durable_tensors(2), {})
    assert same(receiver.pull("v2"), durable_tensors(2))
    assert receiver.pulled_from_durable == 1
    with pytest.raises(NotFoundError):
        receiver.pull("v9")
    assert sender.versions() == ("v1", "v2")
    assert sender.retain({"v2"}) == ("v1",)


def test_a_worker_uses_the_relay_that_its_environment_names_if_it_answers(
    server: RelayServer, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable = DirectoryWeightStore(tmp_path)
    assert with_fast_lane(durable, "worker", SECRET.decode()) is durable
    host, port = server.address
    monkeypatch.setenv(RELAY_VARIABLE, f"{host}:{port}")
    lane = with_fast_lane(durable, "worker", SECRET.decode())
    assert isinstance(lane, FastLane)
    stack.callback(lane.close)
    lane.publish("v1", durable_tensors(1), {})
    lane.flush()
    assert [manifest.version for manifest in server.shelf.manifests()] == ["v1"]
    server.close()
    assert with_fast_lane(durable, "other", SECRET.decode()) is durable


def test_without_its_relay_a_durable_store_goes_on_alone(
    server: RelayServer, stack: ExitStack, tmp_path: Path
) -> None:
    lane = FastLane(DirectoryWeightStore(tmp_path), store(server, stack, "one"))
    server.close()
    lane.publish("v1", durable_tensors(1), {})
    assert same(lane.pull("v1"), durable_tensors(1))
    assert lane.pulled_from_durable == 1
