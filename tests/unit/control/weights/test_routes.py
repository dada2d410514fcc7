"""By what way and from whom versions come: the weight director with relays, in a small made-up
fleet.
"""

import random
from collections import deque
from typing import Any

import pytest

from slackwater.control.rollout.events import InstanceJoined, VersionRecalled
from slackwater.control.rollout.facts import InstanceReleased
from slackwater.control.weights import commands as do
from slackwater.control.weights import events as on
from slackwater.control.weights.director import WeightDirector
from slackwater.model.ids import InstanceId, JobId, NodeId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.payload import Payload

JOB = JobId("job")
WHOLE, DELTA = 1_000_000, 10_000


class Fleet:
    """Relays that do what they are told when asked to; engines that hold what a real one would."""

    def __init__(self) -> None:
        self.director = WeightDirector()
        self.have: dict[str, set[Payload]] = {}
        self.bringing: dict[tuple[str, Payload], str] = {}
        self.copies: dict[str, list[str]] = {}
        self.node_of: dict[str, str] = {}
        self.pulling: dict[tuple[str, str], do.PullVersion] = {}
        self.crossings: list[Payload] = []
        self.sites: dict[str, str] = {}
        self.from_store = 0

    def tell(self, event: on.WeightEvent) -> None:
        commands = deque(self.director.handle(event))
        while commands:
            match command := commands.popleft():
                case do.FetchPayload(node, version, base, source):
                    payload = Payload(version, base)
                    assert node != source and payload not in self.have[node]
                    on_its_way = (source, payload) in self.bringing
                    assert payload in self.have[source] or on_its_way, "nothing is there to take"
                    self.bringing[node, payload] = source
                    if self.sites[node] != self.sites[source]:
                        self.crossings.append(payload)
                case do.DropPayload(node, version, base):
                    self.have[node].discard(Payload(version, base))
                    self.bringing.pop((node, Payload(version, base)), None)
                case do.PullVersion(instance, version):
                    self.pulling[instance, version] = command
                case VersionRecalled(_, instance, version):
                    commands += self.director.handle(on.VersionFreed(0.0, instance, version))
                case _:
                    pass
        self.director.check_integrity()

    def relay(self, name: str, site: str) -> None:
        self.have[name], self.sites[name] = set(), site
        for key in [key for key in self.bringing if name in (key[0], self.bringing[key])]:
            del self.bringing[key]
        self.tell(on.RelayJoined(0.0, NodeId(name), site))

    def engine(self, name: str, node: str, **fields: Any) -> None:
        self.copies[name], self.node_of[name] = [], node
        where = InstanceSpec(
            *(InstanceId(name), InstanceKind.DEDICATED, 4, 1000, 4000), node=NodeId(node), **fields
        )
        self.tell(InstanceJoined(0.0, where))

    def publish(self, number: int, *, delta: bool = True, sampled: bool = True) -> None:
        version, base = f"v{number}", f"v{number - 1}"
        sizes = {"": WHOLE} | ({base: DELTA} if delta and number > 1 else {})
        self.have["t"] |= {Payload(version, each) for each in sizes}
        self.tell(on.PayloadsStocked(0.0, NodeId("t"), version, tuple(sizes.items())))
        self.tell(on.WeightsPublished(0.0, JOB, version, line="model", sampled=sampled))

    def arrive(self, node: str, payload: Payload) -> None:
        """What a node brings is all there; its source must have had it, or be getting it."""
        source = self.bringing[node, payload]
        assert payload in self.have[source] or (source, payload) in self.bringing
        del self.bringing[node, payload]
        self.have[node].add(payload)
        self.tell(on.PayloadArrived(0.0, NodeId(node), payload.version, payload.base))

    def flow(self) -> None:
        """Everything under way arrives, whoever has all of it first; who takes from one that gave
        it up breaks off.
        """
        while self.bringing:
            ripe = [key for key, source in self.bringing.items() if key[1] in self.have[source]]
            if ripe:
                self.arrive(*ripe[0])
            else:
                self.break_off(*next(iter(self.bringing)))

    def break_off(self, node: str, payload: Payload) -> None:
        source = NodeId(self.bringing.pop((node, payload)))
        self.tell(on.PayloadFailed(0.0, NodeId(node), payload.version, payload.base, source, "cut"))

    def finish(self, instance: str, version: str) -> None:
        """An engine follows the way that it was told; where it cannot it takes the version from the
        store.
        """
        command = self.pulling.pop((instance, version))
        here, copies = self.have[self.node_of[instance]], self.copies[instance]
        base = command.way[0].base if command.way else ""
        usable = bool(command.way) and all(payload in here for payload in command.way)
        usable = usable and (not base or base in copies)
        if usable:
            links = [*command.way[1:], Payload("", version)]
            steps = zip(command.way, links, strict=True)
            assert all(payload.version == following.base for payload, following in steps)
        else:
            self.from_store += 1
        if base in copies:
            copies.remove(base)
        kept = usable and command.keep
        if kept:
            self.copies[instance] = [*copies, version][-2:]
        self.tell(on.InstanceReady(0.0, InstanceId(instance), version, kept))

    def finish_all(self) -> None:
        for instance, version in list(self.pulling):
            self.finish(instance, version)

    def need(self, version: str, turns: int) -> None:
        self.tell(on.VersionNeeded(0.0, JOB, "", version, turns))


@pytest.fixture
def fleet() -> Fleet:
    """A trainer's node, and two sites with three nodes each, an engine on every one."""
    fleet = Fleet()
    fleet.relay("t", "train")
    for site in ("east", "west"):
        for number in range(3):
            fleet.relay(f"{site}{number}", site)
            fleet.engine(f"e-{site}{number}", f"{site}{number}")
    return fleet


def test_a_newcomer_takes_the_whole_and_a_holder_the_delta(fleet: Fleet) -> None:
    fleet.publish(1)
    fleet.need("v1", 100)
    assert {each.way for each in fleet.pulling.values()} == {(Payload("v1"),)}
    fleet.flow()
    fleet.finish_all()
    fleet.publish(2)
    assert {each.way for each in fleet.pulling.values()} == {(Payload("v2", "v1"),)}
    fleet.flow()
    fleet.finish_all()
    assert fleet.from_store == 0 and set(map(tuple, fleet.copies.values())) == {("v2",)}
    found, engines = fleet.director.gauges(), len(fleet.copies)
    assert found["pulled_bytes"] == engines * (WHOLE + DELTA)
    assert found["pulled_whole_bytes"] == engines * 2 * WHOLE


def test_one_copy_crosses_into_each_site_and_neighbours_pass_it_on(fleet: Fleet) -> None:
    fleet.publish(1)
    fleet.need("v1", 100)
    routes = fleet.director.routes
    moving = {(source, node) for _, source, node, _ in routes.under_way()}
    assert moving == {(source, node) for (node, _), source in fleet.bringing.items()}
    assert sum(routes.crosses(*pair) for pair in moving) == 2
    fleet.flow()
    assert routes.under_way() == []
    assert fleet.crossings == [Payload("v1"), Payload("v1")]
    assert all(Payload("v1") in have for have in fleet.have.values())


def test_a_holder_two_versions_behind_follows_the_chain(fleet: Fleet) -> None:
    fleet.publish(1)
    fleet.need("v1", 100)
    fleet.flow()
    fleet.finish_all()
    fleet.publish(2, sampled=False)
    fleet.publish(3, sampled=False)
    fleet.need("v3", 100)
    assert {each.way for each in fleet.pulling.values()} == {
        (Payload("v2", "v1"), Payload("v3", "v2"))
    }
    fleet.flow()
    fleet.finish_all()
    assert fleet.from_store == 0


def test_a_delta_that_is_no_smaller_than_the_whole_is_left(fleet: Fleet) -> None:
    fleet.publish(1)
    fleet.need("v1", 100)
    fleet.flow()
    fleet.finish_all()
    fleet.have["t"] |= {Payload("v2"), Payload("v2", "v1")}
    fleet.tell(on.PayloadsStocked(0.0, NodeId("t"), "v2", (("", WHOLE), ("v1", WHOLE))))
    fleet.tell(on.WeightsPublished(0.0, JOB, "v2", line="model"))
    assert {each.way for each in fleet.pulling.values()} == {(Payload("v2"),)}


def test_what_no_instance_needs_any_more_is_dropped_everywhere(fleet: Fleet) -> None:
    for number in range(1, 6):
        fleet.publish(number)
        fleet.need(f"v{number}", 100)
        fleet.flow()
        fleet.finish_all()
        fleet.need(f"v{number}", 0)
    held = set().union(*fleet.have.values())
    assert {payload.version for payload in held} == {"v5"}


def test_who_took_from_a_relay_that_is_lost_is_sent_elsewhere(fleet: Fleet) -> None:
    fleet.publish(1)
    fleet.need("v1", 100)
    first = next(node for (node, _), source in fleet.bringing.items() if source == "t")
    fed = [node for (node, _), source in fleet.bringing.items() if source == first]
    assert fed
    fleet.have[first].clear()
    del fleet.bringing[first, Payload("v1")]
    fleet.tell(on.RelayLeft(0.0, NodeId(first)))
    assert all(fleet.bringing[node, Payload("v1")] != first for node in fed)
    fleet.flow()


def test_a_node_without_a_relay_pulls_from_the_store(fleet: Fleet) -> None:
    fleet.engine("far", "no-relay-there")
    fleet.publish(1)
    fleet.need("v1", 100)
    assert fleet.pulling["far", "v1"].way == ()


class Storm(Fleet):
    """Publishes, joins, losses and broken sources at random; what is told must always be
    possible.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.made = self.version = 0
        self.relay("t", "train")

    def join(self) -> None:
        self.made += 1
        self.relay(f"n{self.made}", self.rng.choice(["east", "west", "train"]))
        self.engine(f"e{self.made}", f"n{self.made}")

    def publish_one(self) -> None:
        self.version += 1
        self.publish(self.version, delta=self.rng.random() < 0.8)
        self.need(f"v{self.version}", self.rng.choice([0, 3, 50]))

    def arrive_one(self) -> None:
        ripe = [key for key, source in self.bringing.items() if key[1] in self.have[source]]
        if ripe:
            self.arrive(*self.rng.choice(ripe))

    def break_one(self) -> None:
        if self.bringing:
            self.break_off(*self.rng.choice(list(self.bringing)))

    def lose_one(self) -> None:
        if not self.copies or self.rng.random() < 0.5:
            return
        engine = self.rng.choice(list(self.copies))
        node = self.node_of[engine]
        del self.copies[engine]
        self.pulling = {key: pull for key, pull in self.pulling.items() if key[0] != engine}
        self.bringing = {key: source for key, source in self.bringing.items() if key[0] != node}
        self.have[node] = set()
        self.tell(on.RelayLeft(0.0, NodeId(node)))
        self.tell(InstanceReleased(0.0, InstanceId(engine)))

    def finish_one(self) -> None:
        if self.pulling:
            self.finish(*self.rng.choice(list(self.pulling)))

    def ask(self) -> None:
        if self.version:
            self.need(f"v{self.version}", self.rng.choice([0, 1, 100]))


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_every_engine_ends_at_the_newest_version(seed: int) -> None:
    storm = Storm(seed)
    moves = [storm.join, storm.publish_one, storm.arrive_one, storm.arrive_one, storm.break_one]
    moves += [storm.lose_one, storm.finish_one, storm.ask]
    for _ in range(150):
        storm.rng.choice(moves)()
    storm.version += 1
    newest = f"v{storm.version}"
    for older in range(1, storm.version):
        storm.need(f"v{older}", 0)
    storm.publish(storm.version)
    for _ in range(20):
        storm.need(newest, 1000)
        storm.flow()
        storm.finish_all()
    assert not storm.bringing and not storm.pulling
    assert all(newest in storm.director.usable(InstanceId(name)) for name in storm.copies)
