"""A state that goes to another node: the same bits there, and still here if it does not arrive."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from state_bodies import PlainBody, part, summed, tiers_of

from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.model.residency import PartRole, StateBudgets, StoredPart, Tier
from slackwater.state.device import DeviceTier
from slackwater.state.manager import StateManager
from slackwater.state.migration import MigrationServer, migrate
from slackwater.wire.certificate import Certificate

KB = 1024
PARTS = [part("job", "w", 4 * KB), part("job", "w", 4 * KB, "moment1")]


def node(folder: Path, host: int) -> tuple[StateManager, DeviceTier]:
    manager = StateManager(StateBudgets(64 * KB, host, 0), folder)
    tier = DeviceTier(manager, "w", 64 * KB)
    manager.attach("w", tier)
    return manager, tier


@pytest.fixture
def here(tmp_path: Path) -> Iterator[tuple[StateManager, DeviceTier, PlainBody, list[int]]]:
    manager, tier = node(tmp_path / "here", 64 * KB)
    body = PlainBody.of(PARTS)
    tier.add("job", PARTS, body)
    with tier.use("job"):
        body.change(torch.Generator().manual_seed(3))
        sums = [summed(tensor) for tensor in body.tensors.values()]
    yield manager, tier, body, sums
    tier.close()
    manager.close()


Here = tuple[StateManager, DeviceTier, PlainBody, list[int]]


def test_a_state_arrives_whole_and_is_found_by_whoever_goes_on_with_it(
    here: Here, tmp_path: Path
) -> None:
    manager, _, _, sums = here
    other, tier = node(tmp_path / "there", 64 * KB)
    server = MigrationServer(other, {"secret": "job"})
    sent = migrate(manager, "job", server.address, "secret", arrives_as="job@1")
    assert sent == 32 * KB
    assert tiers_of(manager) == {"job": Tier.HOST}
    assert tiers_of(other) == {"job@1": Tier.HOST}
    body = PlainBody.of(PARTS)
    assert tier.add("job@1", PARTS, body) is False
    with tier.use("job@1", timeout_s=30.0):
        assert [summed(tensor) for tensor in body.tensors.values()] == sums
        assert body.steps == 1
    server.close()
    tier.close()
    other.close()


def test_an_encrypted_state_goes_only_to_the_certificate_that_was_named(
    here: Here, tmp_path: Path
) -> None:
    manager = here[0]
    other, tier = node(tmp_path / "there", 64 * KB)
    shown = Certificate.load_or_create(tmp_path)
    server = MigrationServer(other, {"secret": "job"}, context=shown.context())
    with pytest.raises(UnavailableError, match=r"certificate.*still here"):
        migrate(manager, "job", server.address, "secret", arrives_as="job@1", pin="0" * 64)
    assert tiers_of(other) == {}
    migrate(manager, "job", server.address, "secret", arrives_as="job@1", pin=shown.pin)
    assert tiers_of(other) == {"job@1": Tier.HOST}
    server.close()
    tier.close()
    other.close()


def test_a_base_that_the_other_node_has_does_not_travel(tmp_path: Path) -> None:
    def adapter(name: str, deployment: str = "") -> list[StoredPart]:
        return [
            part(name, "a", KB, model=deployment or name),
            part("", "base", 4 * KB, "frozen", PartRole.FROZEN, model="base"),
        ]

    manager, tier = node(tmp_path / "here", 64 * KB)
    other, there = node(tmp_path / "there", 64 * KB)
    for where, name in ((tier, "x"), (tier, "y"), (there, "z")):
        body = PlainBody.of(adapter(name))
        where.add(name, adapter(name), body)
        with where.use(name):
            own, base = body.tensors.values()
            own.fill_(float(ord(name)))
            expected = base.clone()
    server = MigrationServer(other, {name: name for name in "xy"})
    for name in "xy":
        moved = f"{name}@1"
        assert migrate(manager, name, server.address, name, arrives_as=moved) == 4 * KB
        body = PlainBody.of(adapter(name, moved))
        there.add(moved, adapter(name, moved), body)
        with there.use(moved, timeout_s=30.0):
            own, base = body.tensors.values()
            assert set(own.tolist()) == {float(ord(name))} and torch.equal(base, expected)
    server.close()
    for each in (tier, there):
        each.close()
    manager.close()
    other.close()


def test_a_node_without_room_or_that_is_not_there_leaves_the_state_where_it_is(
    here: Here, tmp_path: Path
) -> None:
    manager, tier, body, _ = here
    other, small = node(tmp_path / "there", 8 * KB)
    server = MigrationServer(other, {"secret": "job"})
    with pytest.raises(RefusedError, match=r"host memory.*still here"):
        migrate(manager, "job", server.address, "secret", arrives_as="job@1")
    with pytest.raises(RefusedError, match="secret"):
        migrate(manager, "job", server.address, "guess", arrives_as="job@1")
    assert tiers_of(other) == {}
    server.close()
    with pytest.raises(UnavailableError, match="still here"):
        migrate(manager, "job", ("127.0.0.1", 9), "secret", arrives_as="job@1")
    with tier.use("job", timeout_s=30.0):
        assert body.wrong == []
    small.close()
    other.close()


def test_a_secret_is_for_one_state_of_one_model_and_may_become_known_late(
    here: Here, tmp_path: Path
) -> None:
    manager = here[0]
    other, there = node(tmp_path / "there", 64 * KB)
    expected = {"for another": "other"}
    server = MigrationServer(other, expected)
    later = threading.Timer(0.2, expected.update, ({"for this": "job"},))
    later.start()
    migrate(manager, "job", server.address, "for this", arrives_as="job@moved")
    later.join()
    assert tiers_of(other) == {"job@moved": Tier.HOST}
    with pytest.raises(RefusedError, match="must be the announced state, of other"):
        migrate(manager, "job", server.address, "for another", arrives_as="job@again")
    assert expected == {}
    server.close()
    there.close()
    other.close()
