"""A state that goes to another node: the same bits there, and still here if it does not arrive."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from state_bodies import PlainBody, part, summed

from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.model.residency import StateBudgets, Tier
from slackwater.state.device import DeviceTier
from slackwater.state.manager import StateManager
from slackwater.state.migration import MigrationServer, migrate

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


def test_a_state_arrives_whole_and_is_forgotten_where_it_was(here: Here, tmp_path: Path) -> None:
    manager, _, _, sums = here
    other, tier = node(tmp_path / "there", 64 * KB)
    server = MigrationServer(other, "secret")
    migrate(manager, "job", server.address, "secret")
    assert manager.tiers() == {} and other.tiers() == {"job": Tier.HOST}
    body = PlainBody.of(PARTS)
    assert tier.add("job", PARTS, body) is False
    with tier.use("job", timeout_s=30.0):
        assert [summed(tensor) for tensor in body.tensors.values()] == sums
        assert body.steps == 1
    server.close()
    tier.close()
    other.close()


def test_a_node_without_room_or_that_is_not_there_leaves_the_state_where_it_is(
    here: Here, tmp_path: Path
) -> None:
    manager, tier, body, _ = here
    other, small = node(tmp_path / "there", 8 * KB)
    server = MigrationServer(other, "secret")
    with pytest.raises(RefusedError, match=r"host memory.*still here"):
        migrate(manager, "job", server.address, "secret")
    with pytest.raises(RefusedError, match="secret"):
        migrate(manager, "job", server.address, "guess")
    server.close()
    with pytest.raises(UnavailableError, match="still here"):
        migrate(manager, "job", ("127.0.0.1", 9), "secret")
    with tier.use("job", timeout_s=30.0):
        assert body.wrong == []
    small.close()
    other.close()
