"""Owners of turns share the instances: nobody's turns keep another's waiting."""

import random

from fleet_driver import FleetDriver, dispatches

from slackwater.control.rollout.events import OwnersNamed
from slackwater.model.ids import InstanceId, TenantId

LOUD, QUIET = TenantId("loud"), TenantId("quiet")


def shared_fleet(**settings: object) -> FleetDriver:
    driver = FleetDriver(**settings)
    driver.happen(OwnersNamed(0.0, (LOUD, QUIET)))
    return driver


def running(driver: FleetDriver, owner: TenantId) -> int:
    return sum(record.owners[owner] for record in driver.manager.state.instances)


def test_one_owner_leaves_room_for_the_first_turns_of_another() -> None:
    driver = shared_fleet(kept_for_others=0.25)
    driver.join("a", max_running=8)
    for number in range(20):
        driver.submit(f"loud {number}", owner=LOUD)
    assert running(driver, LOUD) == 6
    for number in range(3):
        driver.submit(f"quiet {number}", owner=QUIET)
    assert running(driver, QUIET) == 2


def test_an_owner_that_is_alone_has_everything() -> None:
    driver = FleetDriver(kept_for_others=0.25)
    driver.happen(OwnersNamed(0.0, (LOUD,)))
    driver.join("a", max_running=8)
    for number in range(20):
        driver.submit(f"loud {number}", owner=LOUD)
    assert running(driver, LOUD) == 8


def test_memory_is_kept_for_others_too() -> None:
    driver = shared_fleet(kept_for_others=0.25)
    driver.join("a", max_running=100, kv_tokens=1000)
    for number in range(20):
        driver.submit(f"loud {number}", owner=LOUD, prompt=[1] * 100)
    assert running(driver, LOUD) * 100 <= 750
    assert dispatches(driver.submit("quiet", owner=QUIET, prompt=[2] * 100))


def test_room_that_becomes_free_goes_to_the_owner_that_has_least() -> None:
    driver = FleetDriver(kept_for_others=0.0)
    driver.join("a", max_running=4)
    sent = [
        dispatch
        for number in range(10)
        for dispatch in dispatches(driver.submit(f"loud {number}", owner=LOUD))
    ]
    for number in range(3):
        driver.submit(f"quiet {number}", owner=QUIET)
    owners = []
    for attempt in [dispatch.attempt for dispatch in sent]:
        driver.tokens("a", attempt, [7])
        (next_one,) = dispatches(driver.end("a", attempt, 1))
        owners.append(next_one.turn.split()[0])
    assert owners == ["quiet", "quiet", "loud", "loud"]  # two each from there on


def test_a_warm_cache_does_not_let_an_owner_pass_another_that_has_less() -> None:
    driver = shared_fleet(kept_for_others=0.0)
    driver.join("a", max_running=2)
    first, second = (
        dispatches(driver.submit(f"loud {n}", owner=LOUD, trajectory=f"c{n}"))[0] for n in (0, 1)
    )
    driver.tokens("a", first.attempt, [7])
    driver.submit("quiet", owner=QUIET)
    driver.submit("loud 2", owner=LOUD, trajectory="c1")  # its prefix is there
    (next_one,) = dispatches(driver.end("a", first.attempt, 1))
    assert next_one.turn == "quiet"
    assert second.turn == "loud 1"


def test_with_any_arrivals_a_quiet_owner_within_its_part_never_waits() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        driver = shared_fleet(kept_for_others=0.25)
        driver.join("a", max_running=8, kv_tokens=100_000)
        live: dict[TenantId, list[tuple[str, int]]] = {LOUD: [], QUIET: []}
        for number in range(300):
            owner = LOUD if chance.random() < 0.8 else QUIET
            sent = []
            if owner is LOUD or len(live[QUIET]) < 2:
                sent = dispatches(driver.submit(f"{owner} {number}", owner=owner))
                assert owner is LOUD or sent, f"seed {seed}: the quiet owner waits"
            someone = live[LOUD] + live[QUIET]
            if someone and chance.random() < 0.7:
                turn, attempt = chance.choice(someone)
                live[TenantId(turn.split()[0])].remove((turn, attempt))
                driver.tokens("a", attempt, [7])
                sent += dispatches(driver.end("a", attempt, 1))
            for dispatch in sent:
                name = TenantId(dispatch.turn.split()[0])
                live[name].append((dispatch.turn, dispatch.attempt))
        assert driver.manager.state.instances.records[InstanceId("a")].load.in_flight <= 8
