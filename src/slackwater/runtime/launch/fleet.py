"""The launched fleet: starts agents, follows their nodes, and runs the workers of each node's pool
on the devices that the fleet controller assigns.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slackwater.control.devices.allocator import DeviceAllocator
from slackwater.control.devices.messages import (
    AllocationCommand,
    AssignmentsRestored,
    DeploymentReleased,
    DeploymentsRequested,
    DevicesLost,
    DevicesReported,
    RefuseDeployment,
    StartDeployment,
)
from slackwater.model.device import count_ranks
from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.model.ids import DeploymentId, DeviceId, NodeId, WorkerId
from slackwater.runtime.launch.agents import (
    AgentLauncher,
    AgentPlan,
    JoinAddress,
    LocalAgents,
)
from slackwater.runtime.launch.fleet_file import FleetFile
from slackwater.runtime.launch.launch_plan import LaunchPlan
from slackwater.runtime.launch.node_keys import NodeKeys
from slackwater.runtime.launch.nodes import Nodes
from slackwater.runtime.launch.port import ENGINE, WorkerPlan, WorkerProcess
from slackwater.runtime.launch.supervisor import WorkerSupervisor
from slackwater.runtime.launch.worker_plans import WorkerPlans, deployment_requests
from slackwater.runtime.live_driver import FleetDriver, loop_time
from slackwater.runtime.net.background import wait_until_set
from slackwater.runtime.net.hub import WorkerHub
from slackwater.runtime.store.facts import SavedFact
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.wire import agent as agent_messages
from slackwater.wire import messages
from slackwater.wire.agent import agent_name
from slackwater.wire.certificate import Certificate

if TYPE_CHECKING:
    from slackwater.runtime.net.depot import Depot

logger = logging.getLogger(__name__)


class LaunchedFleet:
    """Nodes and their workers, which connect to `hub`; a depot serves `models` to other disks."""

    def __init__(
        self,
        file: FleetFile,
        state: StateDirectory,
        hub: WorkerHub,
        models: Mapping[str, Path],
        plans: WorkerPlans,
        plan: LaunchPlan,
        keys: NodeKeys,
        *,
        certificate: Certificate | None,
        budgets: Mapping[str, str],
        runtime: FleetDriver,
        allocator: DeviceAllocator,
        assignments: SavedFact,
    ) -> None:
        self.file = file
        self._certificate, self._budgets = certificate, budgets
        self.nodes = Nodes(hub, plan)
        self._plan, self._keys = plan, keys
        self.supervisor = WorkerSupervisor(self.nodes.spawn, adopt=self.nodes.adopt)
        self._state = state
        self._hub = hub
        self._models = models
        self._depot: Depot | None = None
        self._plans = plans
        self._launcher = _launcher(file, state.logs, plans.kind)
        self.returning = ReturningEngines(state.root / "nodes.here", ENGINE)
        self._feed, self._allocator, self._assignments = runtime.feed, allocator, assignments
        self._wanted: dict[DeploymentId, WorkerPlan] = {}
        self._spawning: dict[DeploymentId, asyncio.Future[WorkerPlan]] = {}
        self._spawned: set[WorkerId] = set()
        runtime.register(self._execute, (StartDeployment, RefuseDeployment))

    async def start(self) -> None:
        await self.adopt()
        host, _ = self.file.address()
        if self.needs_depot:
            from slackwater.runtime.net.depot import Depot  # a web server, which few fleets need

            self._depot = Depot(self._state.root, self._models, self._plan)
            context = None if self._certificate is None else self._certificate.context()
            await self._depot.start(host, 0, context, self._state.root / "depot.port")
        join = self.join_address()
        plans = [
            AgentPlan(
                NodeId(node.name),
                *self._places(node.directory, join),
                node.pool,
                node.site,
                node.cores,
                options=self._plans.agent_options(node),
            )
            for node in self.file.nodes
        ]
        self._launcher.start(plans, join)
        self.returning.begin(self._launcher.outlived)

    async def adopt(self) -> None:
        """Restore the device assignments of the last control plane."""
        if before := await self._assignments.read(dict[DeploymentId, tuple[DeviceId, ...]]):
            self._feed(AssignmentsRestored(loop_time(), before))

    @property
    def needs_depot(self) -> bool:
        """Whether any node does not share this machine's disk."""
        has_own_disk = any(node.directory is not None for node in self.file.nodes)
        return has_own_disk or bool(self.file.providers) or self.file.launcher != "local"

    def join_address(self) -> JoinAddress:
        """What an agent needs to join."""
        listened, port = self._hub.address
        host = self.file.advertise or listened
        host = f"[{host}]" if ":" in host else host
        pin = None if self._certificate is None else self._certificate.pin
        scheme = "http" if pin is None else "https"
        depot = f"{scheme}://{host}:{0 if self._depot is None else self._depot.port}"
        return JoinAddress(f"{host}:{port}", depot, self._keys.key, pin, self._budgets)

    def revoke(self, node: str) -> None:
        """Revoke every token of the node, and disconnect it."""
        self._keys.revoke(node)
        self._hub.hang_up(agent_name(node))

    def _places(self, directory: str | None, join: JoinAddress) -> tuple[str, str]:
        """The files option and the log folder of a node of the local launcher."""
        if directory is None:
            return f"folder:{self._state.root}", str(self._state.logs)
        own = Path(directory).expanduser()
        return f"{join.depot}={own / 'files'}", str(own / "logs")

    # ---- for the hub ----
    def agent_joined(self, facts: agent_messages.NodeFacts) -> None:
        """ConfigError if no pool is for the node, RefusedError if another node has its device."""
        pool = self.file.pool_of(facts.node, facts.pool)
        devices = self._plans.usable(facts.devices, pool)
        if (why := self._allocator.conflict(NodeId(facts.node), devices)) is not None:
            raise RefusedError(why)
        node = self.nodes.add(facts, loop_time())
        self.returning.add_node(facts)
        plans = self._plans.plan_node(node, pool, devices)
        self._feed(DevicesReported(loop_time(), node, devices))
        planned = {plan.name for plan in plans}
        self._forget_unplanned(node, planned)
        self.nodes.end_unplanned(node, planned)
        self._request(node, [plan for plan in plans if plan.layout is not None])
        self.supervisor.start(node, [plan for plan in plans if plan.layout is None])

    def handle_agent_message(self, node: NodeId, message: messages.FromWorker) -> None:
        self.nodes.handle_message(node, message)
        if isinstance(message, agent_messages.WorkerEnded | agent_messages.WorkerNotStarted):
            worker = WorkerId(message.worker)
            self.returning.settle_engine(worker)
            if worker in self._spawned:
                self._spawned.remove(worker)
                self._release(worker)
            elif self.supervisor.is_leaving(worker):
                self._release(worker.rpartition(".")[0])

    def agent_leaving(self, node: NodeId) -> tuple[WorkerId, ...]:
        """A node leaves soon: do not restart its workers, which are returned."""
        self.supervisor.leave(node)
        return self.nodes.mark_leaving(node)

    def dismiss(self, node: NodeId) -> None:
        """Tell a node's agent to end its workers and itself."""
        self._hub.send(agent_name(node), messages.Stop())

    def agent_lost(self, node: NodeId) -> None:
        """A node is lost with its workers; they start again when it comes back."""
        self.supervisor.stop(node)
        for worker in self.nodes.workers(node):
            if worker in self._spawned:
                self._spawned.remove(worker)
                self._release(worker)
        self.nodes.remove(node)
        self.returning.remove_node(node)
        self._feed(DevicesLost(loop_time(), node))

    # ---- devices ----
    def _forget_unplanned(self, node: NodeId, planned: set[str]) -> None:
        """Release the devices of deployments that are not planned any more."""
        for deployment, devices in self._allocator.assignments().items():
            if deployment not in planned and devices[0].startswith(f"{node}/"):
                self._feed(DeploymentReleased(loop_time(), deployment))

    def _request(self, node: NodeId, plans: Sequence[WorkerPlan]) -> None:
        """Ask for the devices of deployments; `_execute` starts them."""
        self._wanted |= {DeploymentId(plan.name): plan for plan in plans}
        requests = deployment_requests(node, self._plans.kind, plans)
        self._feed(DeploymentsRequested(loop_time(), requests))

    def _execute(self, command: AllocationCommand) -> None:
        plan = self._wanted.pop(command.deployment)
        waiting = self._spawning.pop(command.deployment, None)
        match command:
            case RefuseDeployment(_, reason):
                logger.error("%s", reason)
                if waiting is None:
                    self.supervisor.refuse(plan, reason)
                else:
                    waiting.set_exception(UnavailableError(reason))
            case StartDeployment(_, devices):
                threads = ("--threads", str(len(devices[0].cores))) if devices[0].cores else ()
                placed = replace(plan, devices=devices, arguments=(*plan.arguments, *threads))
                if waiting is None:
                    self.supervisor.start(devices[0].node, [placed])
                else:
                    waiting.set_result(placed)
        self._save()

    def _release(self, deployment: str) -> None:
        self._feed(DeploymentReleased(loop_time(), DeploymentId(deployment)))
        self._save()

    def _save(self) -> None:
        """Save assignments, which matter only for nodes with several devices."""
        if any(len(self._allocator.devices(node)) > 1 for node in self.nodes.names()):
            self._assignments.save_soon()

    # ---- for the rest of the service ----
    async def spawn(self, plan: WorkerPlan, worker: WorkerId) -> WorkerProcess:
        """Start a worker on the least busy node, with devices if it needs them."""
        if plan.layout is None:
            return await self.nodes.spawn(self.nodes.least_busy(), plan, worker)
        wanted = (self._plans.kind, count_ranks(plan.layout))
        free = [n for n in self.nodes.names() if self._allocator.has_room(n, *wanted)]
        node = self.nodes.least_busy(free)
        shared = len(self._allocator.devices(node)) < 2
        placed = self._spawning[DeploymentId(plan.name)] = (
            asyncio.get_running_loop().create_future()
        )
        self._request(node, [replace(plan, group=str(node) if shared else "")])
        self._spawned.add(worker)
        return await self.nodes.spawn(node, await placed, worker)

    def rows(self) -> list[dict[str, Any]]:
        """One row per connected node, and per listed node that is not connected."""
        rows = [row | self._device_rows(row["node"]) for row in self.nodes.rows(loop_time())]
        here = {row["node"] for row in rows}
        missing = [node for node in self.file.nodes if node.name not in here]
        return [*rows, *({"node": node.name, "pool": node.pool, "workers": []} for node in missing)]

    def nodes_away(self) -> dict[NodeId, int | None]:
        """The listed nodes that are not connected: how often in a row their agent has ended, None
        where the service does not start it.
        """
        here = {NodeId(row["node"]) for row in self.nodes.rows(loop_time())}
        listed = [NodeId(node.name) for node in self.file.nodes]
        return {node: self._launcher.deaths(node) for node in listed if node not in here}

    def _device_rows(self, node: NodeId) -> dict[str, Any]:
        devices = self._allocator.devices(node)
        return {
            "devices": [
                {
                    "device": device.device,
                    "kind": device.kind,
                    "memory_mb": device.memory_mb,
                    "domain": device.domain,
                    "owners": self._allocator.owners(device.device),
                }
                for device in devices
            ]
        }

    def stop_restarts(self) -> None:
        """From now on no agent that ends is started again: the hub will tell them to stop."""
        self._launcher.stop_restarts()

    async def close(self) -> None:
        """Close after the hub has told all workers to stop."""
        await self.supervisor.close()
        await self._launcher.close()
        self.returning.forget()
        if self._depot is not None:
            await self._depot.close()


def _launcher(file: FleetFile, logs: Path, kind: str) -> AgentLauncher:
    match file.launcher:
        case "local":
            return LocalAgents(logs)
        case "join":
            return AgentLauncher()
        case "ray":
            from slackwater.runtime.launch.ray_agents import RayAgents

            return RayAgents(file.ray, file.pools[0].name, kind)


class ReturningEngines:
    """The engines that outlived the last control plane; unfinished turns wait until they reconnect.

    They are tracked by node; a file names the connected nodes until the service stops.
    """

    def __init__(self, file: Path, engine_module: str) -> None:
        self._file, self._module = file, engine_module
        self._here: set[NodeId] = set()
        self._nodes: set[NodeId] = set()
        # Read at once: the first agent that joins overwrites the file.
        with contextlib.suppress(OSError):
            self._nodes = {NodeId(line) for line in file.read_text().splitlines()}
        self._begun = False
        self._engines: set[WorkerId] = set()
        self._all = asyncio.Event()

    def begin(self, alive: Set[NodeId] | None) -> None:
        """Expect the nodes of the last control plane, or only those that are `alive` if known."""
        if alive is not None:
            self._nodes &= alive
        self._begun = True
        self._check()

    def add_node(self, facts: agent_messages.NodeFacts) -> None:
        """A node has connected: expect the engines that run on it."""
        orders = (running.order for running in facts.running)
        self._engines |= {WorkerId(each.worker) for each in orders if each.module == self._module}
        self._nodes.discard(NodeId(facts.node))
        self._here.add(NodeId(facts.node))
        self._write()
        self._check()

    def remove_node(self, node: NodeId) -> None:
        self._here.discard(node)
        self._write()

    def settle_engine(self, worker: WorkerId) -> None:
        """An engine has reported its turns, or has ended."""
        self._engines.discard(worker)
        self._check()

    async def wait(self, limit_s: float) -> None:
        """Wait until no engine is expected any more, at most `limit_s`."""
        await wait_until_set(self._all, limit_s)

    def forget(self) -> None:
        """The service stops, and its nodes with it."""
        self._file.unlink(missing_ok=True)

    def _check(self) -> None:
        if self._begun and not self._nodes and not self._engines:
            self._all.set()

    def _write(self) -> None:
        self._file.write_text("\n".join(sorted(self._here)))
