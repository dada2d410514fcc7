"""Node agents on an existing Ray cluster: one detached actor per node, in a placement group of its
own. Nothing else imports Ray.

Every live Ray node with the resources and without an agent gets one, also nodes that join later
(autoscaling). An actor runs the agent as a child process and ends it when the actor ends, so that
nothing outlives the placement group.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from slackwater.model.device import CPU, CUDA
from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.ids import NodeId
from slackwater.runtime.launch.agents import AgentLauncher, AgentPlan, JoinAddress
from slackwater.runtime.launch.fleet_file import RayCluster

logger = logging.getLogger(__name__)

_PLACED_WITHIN_S = 30.0


def bundle(resources: Mapping[str, float], cluster: RayCluster, kind: str) -> dict[str, float]:
    """What the agent of a Ray node reserves: cores, and GPUs if deployments need them."""
    if kind != CUDA:
        return {"CPU": cluster.cores}
    gpus = int(resources.get("GPU", 0)) if cluster.gpus is None else cluster.gpus
    return {"CPU": cluster.cores, "GPU": max(gpus, 1)}


class AgentHolder:
    """The actor: holds one agent's process on its node."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        command = [sys.executable, *arguments, "--redial"]
        self._process = subprocess.Popen(command, env=os.environ | environment)

    def status(self) -> int | None:
        """None while the agent runs."""
        return self._process.poll()

    def end(self) -> None:
        """Terminate the agent, and kill it if it does not exit."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RayAgents(AgentLauncher):
    """Polls the cluster every `look_every_s` for nodes that joined, left or lost their agent."""

    def __init__(self, cluster: RayCluster, pool: str, kind: str = CPU) -> None:
        """`kind` is of the devices that deployments have; only for CUDA are GPUs reserved."""
        self._cluster = cluster
        self._pool = pool
        self._kind = kind
        self._held: dict[str, tuple[Any, Any]] = {}  # Ray's node id -> actor, placement group
        self._task: asyncio.Task[None] | None = None

    def start(self, plans: Sequence[AgentPlan], join: JoinAddress) -> None:
        del plans  # the cluster's nodes are the fleet's
        self._task = asyncio.create_task(self._follow(join))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._leave)

    async def _follow(self, join: JoinAddress) -> None:
        await asyncio.to_thread(self._connect)
        while True:
            try:
                await asyncio.to_thread(self._look, join)
            except Exception as error:  # noqa: BLE001  (Ray raises many kinds; the next look may go well)
                logger.warning("ray: %s", error)
            await asyncio.sleep(self._cluster.look_every_s)

    def _connect(self) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            fix = "needs Ray: pip install 'slackwater[ray]'"
            raise ConfigError.of("launcher", "ray", fix) from None
        try:
            ray.init(
                address=self._cluster.address,
                namespace=self._cluster.namespace,
                log_to_driver=False,
                logging_level="WARNING",
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = self._cluster.address
            raise UnavailableError(f"no Ray cluster answers at {where!r}: {error}") from None

    def _look(self, join: JoinAddress) -> None:
        import ray

        living = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        for gone in set(self._held) - set(living):
            self._drop(gone)
        for node_id, (actor, _) in list(self._held.items()):
            with contextlib.suppress(Exception):  # it dies with its node, which the next look sees
                if ray.get(actor.status.remote(), timeout=5) is not None:
                    self._drop(node_id)
        for node_id, node in living.items():
            wanted = bundle(node["Resources"], self._cluster, self._kind)
            enough = all(node["Resources"].get(name, 0.0) >= much for name, much in wanted.items())
            if node_id not in self._held and enough:
                self._held[node_id] = self._place(node_id, join, wanted)

    def _place(self, node_id: str, join: JoinAddress, wanted: dict[str, float]) -> tuple[Any, Any]:
        import ray
        from ray.util.placement_group import (
            placement_group,
            placement_group_table,
            remove_placement_group,
        )
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group(
            [wanted], strategy="STRICT_PACK", _soft_target_node_id=node_id, lifetime="detached"
        )
        try:
            ray.get(group.ready(), timeout=_PLACED_WITHIN_S)
            placed = set(placement_group_table(group)["bundles_to_node_id"].values())
            if placed != {node_id}:
                raise UnavailableError(f"node {node_id[:8]} has no room for an agent")
        except Exception:
            remove_placement_group(group)
            raise
        node = NodeId(f"ray-{node_id[:8]}")
        folder = f"{self._cluster.directory}/{node}"
        files, logs = f"{join.depot}={folder}/files", f"{folder}/logs"
        plan = AgentPlan(node, files, logs, self._pool, options=("--device", self._kind))
        # Ray makes the GPUs of the bundle visible to the actor, and so to the agent.
        holder = ray.remote(AgentHolder).options(
            num_cpus=wanted["CPU"],
            num_gpus=wanted.get("GPU", 0),
            lifetime="detached",
            name=f"slackwater-{node}",
            get_if_exists=False,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group),
        )
        environment = join.environment(node, self._pool)
        logger.info("ray: bringing up node=%s", node)
        return holder.remote(plan.arguments(join), environment), group

    def _drop(self, node_id: str) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        actor, group = self._held.pop(node_id)
        with contextlib.suppress(Exception):  # a node that died took its actor along
            ray.get(actor.end.remote(), timeout=15)
        with contextlib.suppress(Exception):
            ray.kill(actor)
        with contextlib.suppress(Exception):
            remove_placement_group(group)

    def _leave(self) -> None:
        with contextlib.suppress(ModuleNotFoundError):
            import ray

            for node_id in list(self._held):
                self._drop(node_id)
            ray.shutdown()
