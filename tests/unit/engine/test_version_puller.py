"""Versions are pulled beside the decode loop."""

import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_engine
from torch import Tensor

from slackwater.engine.engine import Engine
from slackwater.engine.request import GenerationRequest
from slackwater.model.sampling import Sampling
from slackwater.nets.loading import net_tensors
from slackwater.nets.lora import LoraAdapter, LoraSpec, lora_meta
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.wire import messages
from slackwater.worker.puller import VersionPuller, WeightLane

DEADLINE_S = 60.0


class GatedStore(DirectoryWeightStore):
    """A real store whose pulls wait for a gate, as behind a slow link."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()

    def pull(self, version: str, device: str = "cpu") -> dict[str, Tensor]:
        assert self.gate.wait(DEADLINE_S)
        return super().pull(version, device)


@pytest.fixture
def store(tmp_path: Path) -> GatedStore:
    store = GatedStore(tmp_path)
    tensors = net_tensors(tiny_engine.net(seed=7))
    store.publish("v1", tensors, lora_meta(None))
    store.publish("v2", tensors, lora_meta(None))
    return store


@pytest.fixture
def engine() -> Engine:
    return tiny_engine.engine(max_full_versions=2, base_version="base")


@pytest.fixture
def puller(engine: Engine, store: GatedStore) -> Iterator[VersionPuller]:
    puller = VersionPuller(engine, WeightLane(store))
    yield puller
    store.gate.set()
    puller.close()


def outcome(
    puller: VersionPuller, meanwhile: Callable[[], object] = lambda: None
) -> messages.VersionReady | messages.VersionFailed:
    """The next thing that a pull came to."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        meanwhile()
        select.select([puller], [], [], 0.05)
        if said := puller.advance():
            assert len(said) == 1
            return said[0]
    raise AssertionError("the pull came to nothing")


def request(number: int, version: str) -> GenerationRequest:
    params = Sampling(max_tokens=40, temperature=1.0, seed=number)
    return GenerationRequest(number, tiny_engine.prompt(1, 6), params, version)


def tokens(engine: Engine, number: int, version: str) -> list[int]:
    engine.add(request(number, version))
    made: list[int] = []
    while engine.busy:
        made += engine.step().tokens.tolist()
    return made


def test_steps_go_on_while_a_version_is_on_its_way(
    engine: Engine, store: GatedStore, puller: VersionPuller
) -> None:
    assert puller.request("v1") is None
    assert len(tokens(engine, 1, "base")) == 40
    assert "v1" not in engine.versions.names()
    store.gate.set()
    engine.add(request(2, "base"))
    assert outcome(puller, engine.step) == messages.VersionReady("v1")
    while engine.busy:
        engine.step()
    fresh = tiny_engine.engine(seed=7, base_version="v1")
    assert tokens(engine, 3, "v1") == tokens(fresh, 3, "v1")


def test_a_version_that_is_held_is_ready_at_once(engine: Engine, puller: VersionPuller) -> None:
    assert puller.request("base") == messages.VersionReady("base")


def test_a_pull_that_fails_leaves_what_was_there(
    engine: Engine, store: GatedStore, puller: VersionPuller
) -> None:
    store.gate.set()
    puller.request("v9")
    failed = outcome(puller)
    assert isinstance(failed, messages.VersionFailed) and "v9" in failed.error
    assert engine.versions.names() == ("base",)


def test_without_room_the_pull_fails_and_room_serves_the_next(
    engine: Engine, store: GatedStore, puller: VersionPuller
) -> None:
    store.gate.set()
    puller.request("v1")
    assert outcome(puller) == messages.VersionReady("v1")
    puller.request("v2")
    failed = outcome(puller)
    assert isinstance(failed, messages.VersionFailed) and "max_full_versions" in failed.error
    engine.versions.drop("v1")
    puller.request("v2")
    assert outcome(puller) == messages.VersionReady("v2")


def test_weights_of_another_shape_are_refused_and_their_place_is_given_back(
    engine: Engine, store: GatedStore, puller: VersionPuller
) -> None:
    store.gate.set()
    tensors = net_tensors(tiny_engine.net(seed=7))
    store.publish("cut", {n: t[:1] for n, t in tensors.items()}, lora_meta(None))
    for _ in range(3):
        puller.request("cut")
        assert isinstance(outcome(puller), messages.VersionFailed)
    puller.request("v1")
    assert outcome(puller) == messages.VersionReady("v1")


def test_a_version_dropped_on_its_way_is_ready_and_then_gone(
    engine: Engine, store: GatedStore, puller: VersionPuller
) -> None:
    puller.request("v1")
    assert puller.drop_later("v1")
    assert not puller.drop_later("base")
    store.gate.set()
    assert outcome(puller) == messages.VersionReady("v1")
    assert engine.versions.names() == ("base",)


def test_adapters_travel_as_adapters(
    engine: Engine, store: GatedStore, puller: VersionPuller
) -> None:
    spec = LoraSpec(4, seed=1)
    adapter = LoraAdapter.create(spec, tiny_engine.CONFIG)
    store.publish("a1", adapter.tensors, lora_meta(spec))
    store.gate.set()
    puller.request("a1")
    assert outcome(puller) == messages.VersionReady("a1")
    assert len(tokens(engine, 1, "a1")) == 40
