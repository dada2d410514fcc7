"""Rented nodes: nodes that the co-scheduler needs, commands that fail, and what a crash leaves."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

from slackwater.control.coschedule.commands import RentNodes, ReturnNodes
from slackwater.control.fleet.controller import FleetController
from slackwater.control.rollout.commands import LimitInstances
from slackwater.model.ids import JobId, NodeId
from slackwater.runtime.launch.fleet_file import FleetFile, FleetNode, FleetPool
from slackwater.runtime.launch.rental_provider import RentalProvider
from slackwater.runtime.live_driver import FleetDriver, live_driver
from slackwater.runtime.services.rentals import RentalService

PLACE, NODE = NodeId("rollout-0"), NodeId("b")


def fleet_file(
    log: Path, rent: str = "echo {node} $(cat {token_file}) >> LOG; echo id"
) -> FleetFile:
    rent = f"sh -c '{rent.replace('LOG', str(log))}'"
    release = f"sh -c 'echo released {{id}} >> {log}'"
    return FleetFile(
        pools=(FleetPool("mixed", trainers=1), FleetPool("spot", engines=1, price_per_h=1.0)),
        nodes=(FleetNode("a", "mixed"), FleetNode(str(NODE), "spot")),
        providers=(RentalProvider("spot", rent, release, budget=10.0),),
    )


def opened(file: FleetFile, folder: Path, driver: FleetDriver) -> RentalService:
    service = RentalService(
        file,
        folder,
        driver,
        {PLACE: str(NODE)},
        join_token=lambda node, pool: f"token-of-{node}-{pool}",
        leave=lambda node, in_s: None,
        count_other_engines=lambda rented: 0,
    )
    service.start()
    return service


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            if done():
                return
            await asyncio.sleep(0.01)


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def test_a_node_is_rented_while_a_job_is_placed_on_it(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def scenario() -> None:
        driver = live_driver(FleetController())
        service = opened(fleet_file(log), tmp_path / "rentals", driver)
        driver.execute(RentNodes((PLACE, NodeId("train-0"))))
        await until(lambda: lines(log) == ["b token-of-b-spot"])
        await until(lambda: (tmp_path / "rentals" / "rentals.json").exists())
        assert service.gauges()["rented_nodes"] == 1
        driver.execute(ReturnNodes((PLACE,)))
        await until(lambda: len(lines(log)) == 2)
        assert lines(log)[1] == "released id"
        await service.close()

    asyncio.run(scenario())


def test_a_machine_of_a_killed_service_is_released_by_the_next(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def killed() -> None:
        driver = live_driver(FleetController())
        opened(fleet_file(log), tmp_path / "rentals", driver)
        driver.execute(LimitInstances(JobId("job"), 1))
        await until(lambda: (tmp_path / "rentals" / "rentals.json").exists())

    async def next_one() -> None:
        service = opened(fleet_file(log), tmp_path / "rentals", live_driver(FleetController()))
        assert service.gauges()["rented_nodes"] == 1
        await service.close()

    asyncio.run(killed())
    asyncio.run(next_one())
    assert lines(log)[1:] == ["released id"]


def test_a_clock_that_was_set_back_gives_no_budget_back(tmp_path: Path) -> None:
    stored = tmp_path / "rentals" / "rentals.json"

    async def killed() -> None:
        driver = live_driver(FleetController())
        opened(fleet_file(tmp_path / "log"), tmp_path / "rentals", driver)
        driver.execute(LimitInstances(JobId("job"), 1))
        await until(stored.exists)

    async def next_one() -> None:
        file = fleet_file(tmp_path / "log")
        service = opened(file, tmp_path / "rentals", live_driver(FleetController()))
        assert service.gauges()["rental_cost"] >= 0.0
        await service.close()

    asyncio.run(killed())
    text = stored.read_text()
    (since_s,) = re.findall(r'"since_unix_s":\s*([0-9.]+)', text)
    stored.write_text(text.replace(since_s, str(float(since_s) + 7 * 86400)))
    asyncio.run(next_one())


def test_a_node_that_cannot_be_had_costs_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        driver = live_driver(FleetController())
        file = fleet_file(tmp_path / "log", "echo asked >> LOG; exit 1")
        service = opened(file, tmp_path / "rentals", driver)
        driver.execute(LimitInstances(JobId("job"), 1))
        # Every node of the offer is asked for once; none is asked for again at once.
        await until(lambda: len(lines(tmp_path / "log")) == 2)
        await until(lambda: service.gauges()["rented_nodes"] == 0)
        await service.close()
        assert len(lines(tmp_path / "log")) == 2

    asyncio.run(scenario())
