"""The weight director: who pulls what, what makes room, and what may go."""

import random
from typing import Any

import pytest

from slackwater.control.rollout.events import (
    InstanceFaulted,
    InstanceJoined,
    VersionOffered,
    VersionRecalled,
)
from slackwater.control.rollout.facts import InstanceReleased
from slackwater.control.weights import commands as do
from slackwater.control.weights import events as on
from slackwater.control.weights.director import WeightDirector
from slackwater.model.ids import InstanceId, JobId
from slackwater.model.instance import InstanceKind, InstanceSpec

JOB = JobId("job")


def spec(name: str, **fields: Any) -> InstanceSpec:
    return InstanceSpec(InstanceId(name), InstanceKind.SPOT, 4, 1000, 4000, **fields)


class Stage:
    """A director whose manager has nothing running: it frees at once what is recalled."""

    def __init__(self) -> None:
        self.director = WeightDirector()
        self.busy: set[tuple[str, str]] = set()

    def tell(self, event: on.WeightEvent) -> list[do.WeightCommand]:
        commands = list(self.director.handle(event))
        self.director.check_integrity()
        for command in list(commands):
            match command:
                case VersionRecalled(_, instance, version) if (instance, version) not in self.busy:
                    commands += self.tell(on.VersionFreed(0.0, instance, version))
                case _:
                    pass
        return commands

    def join(self, name: str, **fields: Any) -> list[do.WeightCommand]:
        return self.tell(InstanceJoined(0.0, spec(name, **fields)))

    def publish(
        self, version: str, job: JobId | None = JOB, **fields: Any
    ) -> list[do.WeightCommand]:
        return self.tell(on.WeightsPublished(0.0, job, version, **fields))

    def need(self, version: str, turns: int, **fields: Any) -> list[do.WeightCommand]:
        return self.tell(on.VersionNeeded(0.0, JOB, "", version, turns, **fields))

    def ready(self, name: str, version: str) -> list[do.WeightCommand]:
        return self.tell(on.InstanceReady(0.0, InstanceId(name), version))


def pulls(commands: list[do.WeightCommand]) -> list[tuple[str, str]]:
    return [(c.instance, c.version) for c in commands if isinstance(c, do.PullVersion)]


def drops(commands: list[do.WeightCommand]) -> list[tuple[str, str]]:
    return [(c.instance, c.version) for c in commands if isinstance(c, do.DropVersion)]


def test_nothing_is_pulled_until_a_turn_asks_for_it() -> None:
    stage = Stage()
    stage.join("a")
    assert pulls(stage.publish("v1")) == []
    assert pulls(stage.need("v1", 1)) == [("a", "v1")]


def test_as_many_instances_pull_as_the_turns_can_use_each_once() -> None:
    stage = Stage()
    for name in "abc":
        stage.join(name)
    stage.publish("v1")
    assert pulls(stage.need("v1", 1)) == [("a", "v1")]
    assert pulls(stage.need("v1", 4)) == [("b", "v1")]
    assert pulls(stage.need("v1", 64)) == [("c", "v1")]
    assert pulls(stage.need("v1", 128)) == []


def test_who_holds_a_models_last_version_pulls_the_next_one_at_once() -> None:
    stage = Stage()
    stage.join("a")
    stage.join("b")
    stage.publish("v1", line="m")
    stage.need("v1", 1)
    stage.ready("a", "v1")
    stage.need("v1", 0)
    assert pulls(stage.publish("v2", line="m")) == [("a", "v2")]
    assert pulls(stage.publish("other", line="n")) == []


def test_a_base_models_own_weights_go_to_its_instances_and_to_no_others() -> None:
    stage = Stage()
    stage.join("a", base_model="x")
    stage.join("b", base_model="y")
    assert pulls(stage.publish("base:x", None, base_model="x")) == [("a", "base:x")]
    assert pulls(stage.join("c", base_model="x")) == [("c", "base:x")]


def test_an_instance_lent_to_one_job_does_not_pull_anothers_versions() -> None:
    stage = Stage()
    stage.join("a", job=JobId("other"))
    stage.publish("v1")
    assert pulls(stage.need("v1", 1)) == []


def test_adapters_and_whole_weights_do_not_push_each_other_out() -> None:
    stage = Stage()
    stage.join("a", max_versions=1, max_adapters=8)
    stage.publish("whole", line="w")
    stage.need("whole", 1)
    stage.ready("a", "whole")
    stage.need("whole", 0)
    for number in range(8):
        stage.publish(f"adapter{number}", line=f"m{number}", adapter=True)
        stage.need(f"adapter{number}", 1)
        assert drops(stage.ready("a", f"adapter{number}")) == []
        stage.need(f"adapter{number}", 0)
    assert len(stage.director.usable(InstanceId("a"))) == 9


def test_what_a_newer_version_supersedes_makes_room_first() -> None:
    stage = Stage()
    stage.join("a", max_versions=2)
    for version, line in (("old", "m"), ("other", "n"), ("new", "m")):
        stage.publish(version, line=line)
        if version == "new":
            break
        stage.need(version, 1)
        stage.ready("a", version)
        stage.need(version, 0)
    assert drops(stage.ready("a", "new")) == [("a", "old")]


def test_a_version_in_use_is_recalled_and_dropped_only_when_it_is_free() -> None:
    stage = Stage()
    stage.join("a", max_versions=1)
    stage.publish("v1")
    stage.need("v1", 1)
    stage.ready("a", "v1")
    stage.busy.add(("a", "v1"))
    stage.need("v1", 0)
    stage.publish("v2")
    commands = stage.ready("a", "v2")
    assert drops(commands) == [] and VersionRecalled(0.0, InstanceId("a"), "v1") in commands
    freed = stage.tell(on.VersionFreed(0.0, InstanceId("a"), "v1"))
    assert drops(freed) == [("a", "v1")]


def test_a_recalled_version_that_is_needed_again_before_it_is_free_is_offered_again() -> None:
    stage = Stage()
    stage.join("a", max_versions=1)
    stage.publish("v1")
    stage.need("v1", 1)
    stage.ready("a", "v1")
    stage.busy.add(("a", "v1"))
    stage.need("v1", 0)
    stage.publish("v2")
    stage.ready("a", "v2")
    assert VersionOffered(0.0, InstanceId("a"), "v1") in stage.need("v1", 1)


def test_a_retired_version_is_deleted_when_no_turn_asks_and_no_instance_holds_it() -> None:
    stage = Stage()
    stage.join("a")
    stage.publish("v1")
    stage.need("v1", 1)
    assert stage.tell(on.WeightsRetired(0.0, "v1")) == []
    stage.ready("a", "v1")
    assert do.DeleteVersion("v1") in stage.need("v1", 0)


def test_a_version_that_turns_wait_for_and_all_holders_are_full_goes_to_one_more() -> None:
    stage = Stage()
    for name in "ab":
        stage.join(name)
    stage.publish("v1")
    stage.need("v1", 1)
    stage.ready("a", "v1")
    assert pulls(stage.need("v1", 1, waiting=True)) == [("b", "v1")]
    assert pulls(stage.need("v1", 1, waiting=True)) == []


def test_a_resting_engine_forgets_what_it_pulled_but_not_its_base() -> None:
    stage = Stage()
    stage.publish("base", None)
    stage.join("a")
    stage.ready("a", "base")
    stage.publish("v1")
    stage.need("v1", 1)
    commands = stage.tell(InstanceReleased(0.0, InstanceId("a"), rests=True))
    assert drops(commands) == [("a", "v1")]


def test_a_version_that_nobody_asked_for_is_blamed_on_who_brings_it() -> None:
    stage = Stage()
    stage.join("a")
    (blame,) = stage.ready("a", "v9")
    assert isinstance(blame, InstanceFaulted) and "v9" in blame.what


class Fleet:
    """Instances that pull, fail and vanish at random; checks what the director may never do."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.director = WeightDirector()
        self.holds: dict[str, set[str]] = {}
        self.pulling: set[tuple[str, str]] = set()
        self.running: dict[tuple[str, str], int] = {}
        self.usable: set[tuple[str, str]] = set()
        self.recalled: set[tuple[str, str]] = set()
        self.turns: dict[str, int] = {}
        self.deleted: set[str] = set()
        self.offers: set[str] = set()
        self.joined = self.published = 0

    def tell(self, event: on.WeightEvent) -> None:
        for command in self.director.handle(event):
            self._do(command)
        self.director.check_integrity()

    def _do(self, command: do.WeightCommand) -> None:
        match command:
            case do.PullVersion(instance, version):
                assert version not in self.deleted, "pulls what is deleted"
                assert version not in self.holds[instance], "pulls what it holds"
                assert (instance, version) not in self.pulling, "pulls twice at once"
                self.pulling.add((instance, version))
            case do.DropVersion(instance, version):
                assert (instance, version) not in self.running, "drops what runs"
                assert (instance, version) not in self.usable, "drops what is offered"
                self.holds[instance].discard(version)
                self.pulling.discard((instance, version))
            case VersionOffered(_, instance, version):
                assert version in self.holds[instance], "offers what is not there"
                self.recalled.discard((instance, version))
                self.usable.add((instance, version))
                self.offers.add(version)
            case VersionRecalled(_, instance, version):
                self.usable.remove((instance, version))
                self.recalled.add((instance, version))
            case do.DeleteVersion(version):
                assert not self.turns.get(version), "deletes what turns ask for"
                assert not any(version in held for held in self.holds.values())
                assert not any(version == name for _, name in self.pulling)
                self.deleted.add(version)
            case InstanceFaulted():
                pass

    def step(self) -> None:
        names = sorted(self.holds)
        match self.rng.choice(("join", "publish", "need", "need", "pull", "pull", "run", "end")):
            case "join" if len(names) < 4:
                self.joined += 1
                self.holds[f"i{self.joined}"] = set()
                limits = {"max_versions": self.rng.randint(1, 3), "max_adapters": 2}
                self.tell(InstanceJoined(0.0, spec(f"i{self.joined}", **limits)))
            case "join" if self.rng.random() < 0.2:
                self._lose(self.rng.choice(names))
            case "publish":
                self._publish()
            case "need":
                live = [f"v{n}" for n in range(max(self.published - 6, 1), self.published + 1)]
                version = self.rng.choice(live)
                if version not in self.deleted:
                    busy = sum(n for (_, v), n in self.running.items() if v == version)
                    self.turns[version] = max(busy, self.rng.choice((0, 0, 1, 2, 9)))
                    waits = self.rng.random() < 0.5 and self.turns[version] > 0
                    self.tell(on.VersionNeeded(0.0, JOB, "", version, self.turns[version], waits))
            case "pull" if self.pulling:
                self._finish_pull(*self.rng.choice(sorted(self.pulling)))
            case "run":
                able = sorted(pair for pair in self.usable if self.turns.get(pair[1]))
                if able:
                    pair = self.rng.choice(able)
                    self.running[pair] = self.running.get(pair, 0) + 1
            case "end" if self.running:
                pair = self.rng.choice(sorted(self.running))
                self.running[pair] -= 1
                if not self.running[pair]:
                    del self.running[pair]
            case _:
                pass
        self._free()

    def _publish(self) -> None:
        self.published += 1
        line = self.rng.choice("mn")
        adapter = self.rng.random() < 0.5
        version = f"v{self.published}"
        self.tell(on.WeightsPublished(0.0, JOB, version, "", line, adapter))
        if self.published > 5 and self.rng.random() < 0.8:
            old = f"v{self.published - 5}"
            if old not in self.deleted:
                self.tell(on.WeightsRetired(0.0, old))

    def _finish_pull(self, instance: str, version: str) -> None:
        self.pulling.discard((instance, version))
        if self.rng.random() < 0.1:
            self.tell(on.PullFailed(0.0, InstanceId(instance), version, "link down"))
        else:
            self.holds[instance].add(version)
            self.tell(on.InstanceReady(0.0, InstanceId(instance), version))

    def _lose(self, instance: str) -> None:
        del self.holds[instance]
        for pairs in (self.pulling, self.usable, self.recalled):
            pairs -= {pair for pair in pairs if pair[0] == instance}
        self.running = {pair: n for pair, n in self.running.items() if pair[0] != instance}
        self.tell(InstanceReleased(0.0, InstanceId(instance)))

    def _free(self) -> None:
        for instance, version in sorted(self.recalled):
            if (instance, version) not in self.running and (instance, version) in self.recalled:
                self.recalled.discard((instance, version))
                self.tell(on.VersionFreed(0.0, InstanceId(instance), version))


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_nothing_is_dropped_in_use_deleted_in_need_or_pulled_twice(
    seed: int,
) -> None:
    fleet = Fleet(seed)
    fleet._publish()
    for _ in range(400):
        fleet.step()
    for version, turns in fleet.turns.items():  # whoever still waits is served in the end
        if not turns or version in fleet.deleted or not fleet.holds:
            continue
        fleet.offers.clear()
        for _ in range(200):
            fleet.tell(on.VersionNeeded(0.0, JOB, "", version, turns, True))
            for pair in sorted(fleet.pulling):
                fleet.pulling.discard(pair)
                fleet.holds[pair[0]].add(pair[1])
                fleet.tell(on.InstanceReady(0.0, InstanceId(pair[0]), pair[1]))
            fleet.running.clear()
            fleet._free()
            if version in fleet.offers or any(name == version for _, name in fleet.usable):
                break
        else:
            raise AssertionError(f"{version} never came")
