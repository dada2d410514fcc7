"""The live fleet: its agents are brought up, their nodes followed, and every node runs the workers
of its pool.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slackwater.model.ids import NodeId, WorkerId
from slackwater.runtime.launch.agents import (
    AgentLauncher,
    AgentPlan,
    JoinAddress,
    JoiningAgents,
    LocalAgents,
)
from slackwater.runtime.launch.fleet_file import FleetFile, FleetPool
from slackwater.runtime.launch.launch_plan import LaunchPlan
from slackwater.runtime.launch.node_keys import NodeKeys
from slackwater.runtime.launch.nodes import Nodes, agent_name
from slackwater.runtime.launch.port import WorkerPlan, WorkerProcess
from slackwater.runtime.launch.supervisor import WorkerSupervisor
from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.net.hub import WorkerHub
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.wire import agent as says
from slackwater.wire import messages
from slackwater.wire.certificate import Certificate

if TYPE_CHECKING:
    from slackwater.runtime.net.depot import Depot

logger = logging.getLogger(__name__)

# The workers of one node of a pool; the name tells those of different nodes apart.
PlansOf = Callable[[NodeId, FleetPool], Sequence[WorkerPlan]]


class LaunchedFleet:
    """Nodes and their workers. `hub` is where everybody dials in; nodes without our disk get the
    `models`' files from a depot.
    """

    def __init__(
        self,
        file: FleetFile,
        state: StateDirectory,
        hub: WorkerHub,
        models: Mapping[str, Path],
        plans_of: PlansOf,
        plan: LaunchPlan,
        keys: NodeKeys,
        budgets: Mapping[str, str] | None = None,
    ) -> None:
        self.file = file
        self._budgets = tuple((budgets or {}).items())
        self.nodes = Nodes(hub, plan)
        self._plan, self._keys = plan, keys
        self.supervisor = WorkerSupervisor(self.nodes.spawn)
        self._state = state
        self._hub = hub
        self._models = models
        self._depot: Depot | None = None
        self._plans_of = plans_of
        self._launcher = _launcher(file, state.logs)

    async def start(self, certificate: Certificate | None) -> None:
        """Open the depot, and begin to bring agents up."""
        host, _ = self.file.address()
        if self.needs_depot:
            from slackwater.runtime.net.depot import Depot  # a web server, which few fleets need

            self._depot = Depot(self._state.root, self._models, self._plan)
            await self._depot.start(host, 0, None if certificate is None else certificate.context())
        join = self.join_address(certificate)
        plans = [
            AgentPlan(
                *(NodeId(node.name), *self._places(node.directory, join)),
                *(node.pool, node.site, node.cores),
            )
            for node in self.file.nodes
        ]
        self._launcher.start(plans, join)

    @property
    def needs_depot(self) -> bool:
        """Whether any node is without our disk."""
        apart = any(node.directory is not None for node in self.file.nodes)
        return apart or self.file.launcher != "local"

    def join_address(self, certificate: Certificate | None) -> JoinAddress:
        """What an agent must know."""
        listened, port = self._hub.address
        host = self.file.advertise or listened
        scheme = "http" if certificate is None else "https"
        depot = f"{scheme}://{host}:{0 if self._depot is None else self._depot.port}"
        pin = None if certificate is None else certificate.pin
        return JoinAddress(f"{host}:{port}", depot, self._keys.key, pin, self._budgets)

    def revoke(self, node: str) -> None:
        """No token of the node works any more; if the node is here, it goes."""
        self._keys.revoke(node)
        self._hub.hang_up(agent_name(NodeId(node)))

    def _places(self, directory: str | None, join: JoinAddress) -> tuple[str, str]:
        """Where a node of the local launcher has its files and its logs."""
        if directory is None:
            return f"folder:{self._state.root}", str(self._state.logs)
        own = Path(directory).expanduser()
        return f"{join.depot}={own / 'files'}", str(own / "logs")

    # ---- what the hub says ----
    def agent_joined(self, facts: says.NodeFacts) -> None:
        """ConfigError if the fleet has no pool for the node."""
        pool = self.file.pool_of(facts.node, facts.pool)
        node = self.nodes.joined(facts, loop_time())
        self.supervisor.start(node, self._plans_of(node, pool))

    def agent_said(self, node: NodeId, message: messages.FromWorker) -> None:
        self.nodes.said(node, message)

    def agent_lost(self, node: NodeId) -> None:
        """Its workers are gone with it; they come back when the node does."""
        self.supervisor.stop(node)
        self.nodes.lost(node)

    # ---- for the rest of the service ----
    async def spawn(self, plan: WorkerPlan, worker: WorkerId) -> WorkerProcess:
        """Start a worker where there are the fewest."""
        return await self.nodes.spawn(self.nodes.least_busy(), plan, worker)

    def rows(self) -> list[dict[str, Any]]:
        """Every node that is here, and every listed one that is not."""
        rows = self.nodes.rows(loop_time())
        here = {row["node"] for row in rows}
        away = [node for node in self.file.nodes if node.name not in here]
        return [*rows, *({"node": node.name, "pool": node.pool, "workers": []} for node in away)]

    async def close(self) -> None:
        """After the hub has told everybody to stop."""
        await self.supervisor.close()
        await self._launcher.close()
        if self._depot is not None:
            await self._depot.close()


def _launcher(file: FleetFile, logs: Path) -> AgentLauncher:
    match file.launcher:
        case "local":
            return LocalAgents(logs)
        case "join":
            return JoiningAgents()
        case "ray":
            from slackwater.runtime.launch.ray_agents import RayAgents

            return RayAgents(file.ray, file.pools[0].name)
