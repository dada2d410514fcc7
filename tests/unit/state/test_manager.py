"""The state manager in one process: whatever moves are made, every byte is what it was."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from state_bodies import PlainBody, hint_next, part, tiers_of

from harness.residency_checks import check_residency
from slackwater.model.errors import ConfigError, RefusedError, UnavailableError
from slackwater.model.residency import PartRole, StateBudgets, StoredPart, Tier
from slackwater.state.device import DeviceTier
from slackwater.state.disk import DiskTier
from slackwater.state.image import HostImage
from slackwater.state.manager import StateManager

KB = 1024


class Node:
    """A manager and one holder, whose deployments are made by name."""

    def __init__(self, folder: Path, budgets: StateBudgets) -> None:
        self.manager = StateManager(budgets, folder)
        self.device = DeviceTier(self.manager, "w", budgets.device_bytes)
        self.manager.attach("w", self.device)
        self.bodies: dict[str, PlainBody] = {}

    def add(self, name: str, parts: list[StoredPart], *, warm: bool = True) -> PlainBody:
        body = PlainBody.of(parts)
        self.device.add(name, parts, body, warm=warm)
        self.bodies[name] = body
        return body

    def close(self) -> None:
        self.device.close()
        self.manager.close()


def standard_parts(name: str, elements: int = 3 * KB) -> list[StoredPart]:
    return [
        part(name, "a", elements),
        part(name, "b", 77),
        part(name, "a", elements, "moment1"),
        part(name, "a", elements, "gradient", PartRole.SCRATCH),
        part(name, "base", 5 * KB, "frozen", PartRole.FROZEN),
    ]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "disk", StateBudgets(130 * KB, 160 * KB, 1 << 20))
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(8))
def test_no_byte_differs_after_any_sequence_of_moves(tmp_path: Path, seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    node = Node(tmp_path, StateBudgets(130 * KB, 160 * KB, 1 << 20))
    names = "abcd"
    for name in names:
        node.add(name, standard_parts(name, draw.choice([KB, 4 * KB])), warm=name == "a")
    for _ in range(60):
        name = draw.choice(names)
        match draw.randrange(4):
            case 0:
                node.device.evict(name, draw.choice([Tier.HOST, Tier.DISK]))
            case 1:
                hint_next(node.manager, draw.sample(names, 2))
            case _:
                with node.device.use(name, timeout_s=30.0):
                    node.bodies[name].change(generator)
        with node.manager.lock:
            check_residency(node.manager.controller)
    for name in names:
        with node.device.use(name, timeout_s=30.0):
            pass
    assert [body.wrong for body in node.bodies.values()] == [[]] * len(names)
    assert all(node.bodies[name].steps > 0 for name in names)
    node.close()


def test_frozen_parts_are_stored_once_and_never_written_back(node: Node) -> None:
    body = node.add("a", standard_parts("a"))
    with node.device.use("a"):
        body.change(torch.Generator().manual_seed(0))
    node.device.evict("a")
    base = node.manager.catalogue.entries["a"].brings
    assert base is not None
    node.manager.image(base).data[0] ^= 1  # were it written back, this would go
    with node.device.use("a"):
        pass
    node.device.evict("a")
    assert len(body.wrong) == 1 and "frozen" in body.wrong[0]


def adapter(name: str, elements: int = 3 * KB) -> list[StoredPart]:
    """Over a base that all of them share."""
    base = part("", "base", 20 * KB, "frozen", PartRole.FROZEN, model="base")
    return [part(name, "a", elements), part(name, "a", elements, "moment1"), base]


@pytest.mark.parametrize("seed", range(6))
def test_adapters_over_one_base_keep_their_bytes_whoever_leaves_or_dies(
    tmp_path: Path, seed: int
) -> None:
    """The host holds the base and two of them: what is asked for pushes out what others need."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    node = Node(tmp_path, StateBudgets(130 * KB, 130 * KB, 1 << 20))
    made = 0

    def add(slot: int) -> str:
        nonlocal made
        made += 1
        name = f"{slot}.{made}"
        node.add(name, adapter(name), warm=False)
        return name

    names = [add(slot) for slot in range(4)]
    for _ in range(60):
        slot = draw.randrange(4)
        match draw.randrange(6):
            case 0:
                node.device.evict(names[slot], draw.choice([Tier.HOST, Tier.DISK]))
            case 1:
                hint_next(node.manager, draw.sample(names, 2))
            case 2:
                node.manager.forget_when_unused(names[slot])
                names[slot] = add(slot)
            case _:
                with node.device.use(names[slot], timeout_s=30.0):
                    node.bodies[names[slot]].change(generator)
        with node.manager.lock:
            check_residency(node.manager.controller)
    for name in names:
        with node.device.use(name, timeout_s=30.0):
            pass
    assert all(not body.wrong for body in node.bodies.values())
    for name in names:
        node.manager.forget_when_unused(name)
    assert (
        node.manager.controller.bytes_in_use(Tier.HOST)
        == node.manager.controller.bytes_in_use(Tier.DISK)
        == 0
    )
    assert node.manager.catalogue.image_bytes("frozen-1") == 0
    node.close()


def test_a_base_outlives_the_worker_that_brought_it(tmp_path: Path) -> None:
    """The first adapter is lost with its worker; the other one never notices."""
    node = Node(tmp_path, StateBudgets(230 * KB, 160 * KB, 1 << 20))
    tier = DeviceTier(node.manager, "doomed", 130 * KB)
    node.manager.attach("doomed", tier)
    tier.add("a", adapter("a"), PlainBody.of(adapter("a")), warm=False)
    with tier.use("a"):
        pass
    body = node.add("b", adapter("b"), warm=False)
    with node.device.use("b"):
        body.change(torch.Generator())
    node.device.evict("b")
    node.manager.remove_holder("doomed")
    assert tiers_of(node.manager) == {"b": Tier.HOST}
    with node.device.use("b", timeout_s=30.0):
        assert body.wrong == []
    tier.close()
    node.close()


def test_an_adapter_and_its_base_that_cannot_come_up_together_are_refused(tmp_path: Path) -> None:
    node = Node(tmp_path, StateBudgets(130 * KB, 100 * KB, 1 << 20))
    with pytest.raises(RefusedError, match=r"106496 bytes of host memory.* 102400 of 102400"):
        node.add("a", adapter("a"), warm=False)
    assert tiers_of(node.manager) == {} and node.manager.catalogue.image_bytes("frozen-1") == 0
    node.add("b", adapter("b", 2 * KB), warm=False)  # what fits is still taken
    with node.device.use("b", timeout_s=30.0):
        pass
    node.close()


def test_replicas_of_one_state_are_stored_once(node: Node) -> None:
    parts = [part("job", "w", 4 * KB)]
    first, second = node.add("job@0", parts), node.add("job@1", parts)
    entries = node.manager.catalogue.entries
    assert entries["job@0"].stored.bytes == 16 * KB and entries["job@1"].stored.bytes == 0
    generator = torch.Generator()
    for body, name in ((first, "job@0"), (second, "job@1")):
        with node.device.use(name):
            body.change(generator.manual_seed(1))
    for name in ("job@0", "job@1"):
        node.device.evict(name)
    with node.device.use("job@1"), node.device.use("job@0"):
        assert first.wrong == second.wrong == []
    with pytest.raises(RefusedError, match="shared by job@1"):
        node.manager.forget("job@0")


def test_a_state_that_cannot_stay_warm_is_refused_with_the_numbers(node: Node) -> None:
    node.add("a", [part("a", "w", 30 * KB)])
    with pytest.raises(RefusedError, match="122880 bytes of host memory to stay warm"):
        node.add("b", [part("b", "w", 30 * KB)])
    node.add("c", [part("c", "w", 9 * KB)])  # what fits is still taken


def test_a_full_disk_is_a_clear_error_and_loses_nothing(node: Node) -> None:
    body = node.add("a", standard_parts("a"), warm=False)
    with node.device.use("a"):
        body.change(torch.Generator())
    node.manager.disk.folder.rmdir()  # nothing can be written there now
    with pytest.raises(RefusedError):
        node.device.evict("a", Tier.DISK)
    assert tiers_of(node.manager)["a"] is Tier.HOST
    with node.device.use("a"):
        assert body.wrong == []


def test_waiting_for_a_device_that_stays_busy_ends_at_its_deadline(node: Node) -> None:
    node.add("a", [part("a", "w", 18 * KB)]), node.add("b", [part("b", "w", 18 * KB)])
    with (
        node.device.use("a"),
        pytest.raises(UnavailableError, match="b on the device tier"),
        node.device.use("b", timeout_s=0.05),
    ):
        pass
    with node.device.use("b", timeout_s=30.0):
        pass


def test_the_next_state_is_loaded_while_this_one_computes(tmp_path: Path) -> None:
    node = Node(tmp_path, StateBudgets(64 * KB, 64 * KB, 0))
    first = node.add("a", [part("a", "w", 4 * KB)])
    second = node.add("b", [part("b", "w", 4 * KB)])
    bound = threading.Event()
    original = second.bind
    second.bind = lambda tensors, about: (original(tensors, about), bound.set())[0]  # type: ignore[method-assign, func-returns-value]
    with node.device.use("a"):
        hint_next(node.manager, ["b"])
        assert bound.wait(30.0)
        assert first.tensors and second.tensors
    node.close()


def test_a_models_state_is_brought_up_by_the_models_name(tmp_path: Path) -> None:
    node = Node(tmp_path, StateBudgets(64 * KB, 64 * KB, 0))
    for name in ("a@w-1.1", "b@w-1.2", "ab@w-1.3"):
        node.add(name, [part(name, "w", 4 * KB)])
        with node.device.use(name):
            pass
        node.device.evict(name)
    node.manager.prefetch_models(["a", "unknown"])
    node.manager.ensure("a@w-1.1", Tier.DEVICE, timeout_s=30.0)
    moved = node.manager.moved_bytes[Tier.HOST, Tier.DEVICE]
    assert moved == 4 * 16 * KB, "three first uses, and one that was hinted at"
    node.close()


def test_a_state_that_cannot_be_read_is_an_error_and_leaves_room_for_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is spoiled in its last piece: the device has some of it by then."""
    monkeypatch.setattr("slackwater.state.disk.PIECE", 4096)
    for name in "ab":
        body = node.add(name, [part(name, "w", 20 * KB)], warm=False)
        with node.device.use(name):
            body.change(torch.Generator())
    node.device.evict("b")
    node.device.evict("a", Tier.DISK)
    path = node.manager.disk.path("a")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(RefusedError, match="not as written"), node.device.use("a", timeout_s=30.0):
        pass
    with node.device.use("b", timeout_s=30.0):
        pass
    path.write_bytes(whole)
    with node.device.use("a", timeout_s=30.0):
        assert node.bodies["a"].wrong == node.bodies["b"].wrong == []


def test_a_file_that_is_dropped_is_gone_before_the_next_is_written(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path)
    image = HostImage.create("x", 100_000)
    for content in (1, 2):
        image.data[:] = content
        disk.write("x", image.pages, {})
        assert list(tmp_path.iterdir()) == [disk.path("x")]
        disk.drop("x")
        assert not disk.path("x").exists()
        disk.drop("x")  # there is none
    disk.close()
    assert list(tmp_path.iterdir()) == []
    image.close()


def test_what_is_not_as_written_on_disk_is_refused(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path)
    image = HostImage.create("x", 100_000)
    image.data[:] = 7
    disk.write("x/y", image.pages, {"steps": 3})
    again = HostImage.create("x", 100_000)
    assert disk.read("x/y", again.pages) == {"steps": 3}
    assert (again.data == 7).all()
    path = disk.path("x/y")
    spoiled = bytearray(path.read_bytes())
    spoiled[-1] ^= 1
    path.write_bytes(spoiled)
    with pytest.raises(ConfigError, match="not as written"):
        disk.read("x/y", again.pages)
    path.write_bytes(spoiled[:5000])
    with pytest.raises(ConfigError):
        disk.read("x/y", again.pages)
    image.close()
    again.close()
