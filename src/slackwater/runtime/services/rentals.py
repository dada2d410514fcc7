"""Rented nodes: executes the rental controller's decisions with the providers' commands.

Rentals are saved to disk, so that a control plane knows after a crash what it must release.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from slackwater.control.coschedule.commands import RentNodes, ReturnNodes
from slackwater.control.rental import (
    InstancesLimited,
    NodeOffered,
    NodesNeeded,
    NodeWithdrawn,
    RentalAdopted,
    RentalCommand,
    RentalController,
    RentalTerms,
)
from slackwater.control.rollout.commands import LimitInstances
from slackwater.model.errors import ConfigError, SlackwaterError
from slackwater.model.folder import write_whole
from slackwater.model.ids import NodeId
from slackwater.runtime.launch.fleet_file import FleetFile
from slackwater.runtime.launch.rental_provider import RentalProvider
from slackwater.runtime.live_driver import FleetDriver, live_driver, loop_time
from slackwater.runtime.net.background import wait_until_set

logger = logging.getLogger(__name__)

_RETRY_S = 60.0  # until a node that could not be rented is offered again
_JOINS_WITHIN_S = 900.0
_REJOINS_WITHIN_S = 60.0
_LEAVES_WITHIN_S = 30.0


class _StoredRental(msgspec.Struct):
    node: str
    machine: str
    since_unix_s: float


class _StoredRentals(msgspec.Struct):
    rentals: list[_StoredRental] = []
    spent: dict[str, float] = {}


@dataclass(slots=True)
class _Rental:
    provider: RentalProvider
    since_unix_s: float
    machine: str | None = None
    is_here: bool = False
    returned: bool = False
    retry_s: float = 0.0
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class RentalService:
    """All rented nodes of a fleet."""

    def __init__(
        self,
        file: FleetFile,
        folder: Path,
        fleet: FleetDriver,
        fleet_nodes: Mapping[NodeId, str],
        *,
        join_token: Callable[[NodeId, str], str],
        leave: Callable[[NodeId, float], None],
        count_other_engines: Callable[[tuple[NodeId, ...]], int],
    ) -> None:
        """`fleet_nodes` names the fleet's node behind each of the co-scheduler's. `join_token` gets
        a node and its pool; `leave` moves the turns off a node within a time and ends its agent;
        `count_other_engines` counts the remote engines that are not on these nodes.
        """
        self._providers = {provider.pool: provider for provider in file.providers}
        self._folder, self._fleet_nodes = folder, fleet_nodes
        self._join_token, self._leave = join_token, leave
        self._count_other_engines = count_other_engines
        stored = self._read()
        self._stored = {NodeId(each.node): each for each in stored.rentals}
        terms = {
            name: RentalTerms(
                file.pool(name).price_per_h,
                provider.budget,
                file.pool(name).engines or 1,
                provider.idle_s,
            )
            for name, provider in self._providers.items()
        }
        self._listed = [
            (NodeId(node.name), node.pool) for node in file.nodes if node.pool in self._providers
        ]
        self._controller = RentalController(terms, stored.spent)
        self._driver = live_driver(self._controller)
        self._driver.register(self._execute, (RentNodes, ReturnNodes))
        self._rentals: dict[NodeId, _Rental] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._needed: set[NodeId] = set()
        self._closed = False
        if self._providers:
            fleet.register(self._report_limit, (LimitInstances,))
            fleet.register(self._report_placement, (RentNodes, ReturnNodes))

    def start(self) -> None:
        """Offer every node, and adopt what was rented before."""
        offered = list(self._listed)
        for pool, provider in self._providers.items():
            offered += [(node, pool) for node in provider.node_names]
        for node, pool in offered:
            self._driver.feed(NodeOffered(loop_time(), node, pool))
            if (stored := self._stored.pop(node, None)) is not None:
                rental = _Rental(self._providers[pool], stored.since_unix_s, stored.machine)
                self._rentals[node] = rental
                age_s = max(time.time() - stored.since_unix_s, 0.0)  # the clock may be set back
                since_s = loop_time() - age_s
                self._driver.feed(RentalAdopted(loop_time(), node, since_s))
                self._watch(node, rental, _JOINS_WITHIN_S)

    def gauges(self) -> dict[str, float]:
        """How many nodes are rented, and the cost of all rentals so far."""
        if not self._providers:
            return {}
        now_s = loop_time()
        cost = sum(self._controller.cost_of(pool, now_s) for pool in self._providers)
        return {"rented_nodes": len(self._controller.rented), "rental_cost": cost}

    # ---- events ----
    def record_join(self, node: NodeId) -> None:
        if (rental := self._rentals.get(node)) is not None:
            rental.is_here = True

    def record_loss(self, node: NodeId) -> None:
        """Its agent is gone; the node is released unless it comes back soon."""
        if (rental := self._rentals.get(node)) is not None:
            rental.is_here = False
            rental.gone.set()
            self._watch(node, rental, _REJOINS_WITHIN_S)

    def _watch(self, node: NodeId, rental: _Rental, within_s: float) -> None:
        asyncio.get_running_loop().call_later(within_s, self._give_up, node, rental)

    def _give_up(self, node: NodeId, rental: _Rental) -> None:
        if self._rentals.get(node) is rental and not rental.is_here and not rental.returned:
            logger.warning("rented node is not here node=%s machine=%s", node, rental.machine)
            self._begin_release(node, _RETRY_S)

    def _report_limit(self, command: LimitInstances) -> None:
        others = self._count_other_engines(self._controller.rented)
        self._driver.feed(InstancesLimited(loop_time(), command.job, command.most, others))

    def _report_placement(self, command: RentNodes | ReturnNodes) -> None:
        """Report which nodes the co-scheduler needs for jobs."""
        nodes = {NodeId(self._fleet_nodes.get(place, place)) for place in command.nodes}
        if isinstance(command, RentNodes):
            self._needed |= nodes
        else:
            self._needed -= nodes
        self._driver.feed(NodesNeeded(loop_time(), tuple(sorted(self._needed))))

    # ---- commands ----
    def _execute(self, command: RentalCommand) -> None:
        if self._closed:
            return
        match command:
            case RentNodes(nodes):
                for node in nodes:
                    self._spawn(self._rent(node))
            case ReturnNodes(nodes):
                for node in nodes:
                    self._begin_release(node)
            case _:
                raise AssertionError(command)

    async def _rent(self, node: NodeId) -> None:
        pool = next((pool for name, pool in self._listed if name == node), None)
        provider = self._providers[pool or str(node).rpartition("-rented-")[0]]
        rental = self._rentals[node] = _Rental(provider, time.time())
        token_file = self._folder / f"{node}.token"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(token_file, self._join_token(node, provider.pool) + "\n")
            rental.machine = await provider.rent_node(node, token_file)
        except (SlackwaterError, OSError) as error:
            logger.warning("node not rented node=%s error=%s", node, error)
            self._driver.feed(NodeWithdrawn(loop_time(), node))
            self._forget(node, rental, _RETRY_S)
            return
        logger.info("node rented node=%s machine=%s", node, rental.machine)
        self._save()
        self._watch(node, rental, _JOINS_WITHIN_S)
        if rental.returned:  # while the command ran
            self._spawn(self._release(node, rental))

    def _begin_release(self, node: NodeId, retry_s: float = 0.0) -> None:
        """Release a node, which can be rented again `retry_s` after its machine has ended."""
        if (rental := self._rentals.get(node)) is None or rental.returned:
            return
        rental.returned, rental.retry_s = True, retry_s
        self._driver.feed(NodeWithdrawn(loop_time(), node))
        if rental.machine is not None:
            self._spawn(self._release(node, rental))

    async def _release(self, node: NodeId, rental: _Rental) -> None:
        """Move its turns, end its agent, and release the machine."""
        assert rental.machine is not None
        if rental.is_here:
            rental.gone.clear()
            self._leave(node, _LEAVES_WITHIN_S)
            if not await wait_until_set(rental.gone, _LEAVES_WITHIN_S + 10):
                logger.warning("node stayed node=%s", node)
        await self._end(node, rental)

    async def _end(self, node: NodeId, rental: _Rental) -> None:
        machine = rental.machine
        if machine is None:
            return
        try:
            await rental.provider.release_node(node, machine)
            logger.info("node released node=%s machine=%s", node, machine)
        except SlackwaterError as error:
            # It may still cost money: an operator must look.
            logger.error("node not released node=%s machine=%s error=%s", node, machine, error)
        self._forget(node, rental, rental.retry_s)
        self._save()

    def _forget(self, node: NodeId, rental: _Rental, retry_s: float) -> None:
        del self._rentals[node]

        def offer() -> None:
            if not self._closed:
                self._driver.feed(NodeOffered(loop_time(), node, rental.provider.pool))

        asyncio.get_running_loop().call_later(retry_s, offer)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Release every rented node: agents end with the service."""
        self._closed = True
        self._driver.close()
        for node, rental in self._rentals.items():
            rental.gone.set()
            self._driver.feed(NodeWithdrawn(loop_time(), node))
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(self._end(*each) for each in list(self._rentals.items())))

    # ---- on disk ----
    def _save(self) -> None:
        if not self._providers:
            return
        rentals = [
            _StoredRental(str(node), rental.machine, rental.since_unix_s)
            for node, rental in self._rentals.items()
            if rental.machine is not None
        ]
        stored = _StoredRentals(rentals, self._controller.ended_cost)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(self._file, msgspec.json.encode(stored).decode())

    @property
    def _file(self) -> Path:
        return self._folder / "rentals.json"

    def _read(self) -> _StoredRentals:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=_StoredRentals)
        except FileNotFoundError:
            return _StoredRentals()
        except (OSError, msgspec.DecodeError) as error:
            fix = f"cannot be read ({error}); release its machines, then remove it"
            raise ConfigError.of("rentals", str(self._file), fix) from None
