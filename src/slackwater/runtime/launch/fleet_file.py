"""A fleet file, for `slackwater up --fleet fleet.toml`: pools, their nodes, who starts the agents,
and where they connect.

launcher = "local"            # agents of this machine; join: `slackwater agent`; ray: a Ray cluster
listen = "127.0.0.1:0"        # where agents and workers connect; encrypted beyond the loopback
advertise = "10.0.0.7"        # the address that nodes are told, if not the one listened on

[[pools]]
name = "mixed"
engines = 2                   # per node and model
trainers = 1                  # per node
sandboxes = 1                 # per node: workers that run actions on its cores
rewards = 1                   # per node: workers that hold the reward services of [rewards]
price_per_h = 4.0

[[nodes]]
name = "a"
pool = "mixed"
directory = "/scratch/a"      # local launcher: the node's own files; without it, our disk
site = "east"                 # nodes of one site share a fast network: weights come there once
cores = [0, 1]                # local launcher: the node's cores of this machine; without it all
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slackwater.model.config import decode
from slackwater.model.device import count_ranks
from slackwater.model.errors import ConfigError, check_above_zero, check_not_negative
from slackwater.model.ids import NodeId
from slackwater.model.instance import EngineName
from slackwater.model.toml_text import read_toml
from slackwater.runtime.launch.kubernetes import KubernetesPool
from slackwater.runtime.launch.rental_provider import RentalProvider
from slackwater.runtime.launch.slurm import SlurmPool
from slackwater.runtime.net.listening import LOOPBACK

LOCAL_NODE = NodeId("local")
MAX_COUNT = 4096  # of one kind of worker, or of devices, on a node
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


def check_name(field: str, name: str) -> None:
    """ConfigError unless this is a valid name of a node or pool."""
    if not _NAME.fullmatch(name):
        raise ConfigError.of(field, name, "must be letters, digits, '_' and '-', 32 at most")


@dataclass(frozen=True, slots=True)
class FleetPool:
    """What runs on every node of a pool: engines per model, engines that share the trainers'
    devices, trainers, sandboxes, workers that hold reward services.

    Without a number of `engines` they take all devices of the node that no trainer has, and one
    engine per model shares the device of a node that has only one. A layout such as `tp=2,dp=2`
    spreads each trainer or engine over several devices.
    """

    name: str
    engines: int | None = None
    local_engines: int = 0
    local_engine: EngineName = "embedded"
    trainers: int = 0
    sandboxes: int = 0
    rewards: int = 0
    price_per_h: float = 0.0
    engine_layout: str = ""
    trainer_layout: str = ""

    def __post_init__(self) -> None:
        check_name("name", self.name)
        for field in ("engines", "local_engines", "trainers", "sandboxes", "rewards"):
            if not 0 <= (getattr(self, field) or 0) <= MAX_COUNT:
                fix = f"must be from 0 to {MAX_COUNT}"
                raise ConfigError.of(field, getattr(self, field), fix)
        check_not_negative("", self, "price_per_h")
        count_ranks(self.engine_layout, "engine_layout")
        count_ranks(self.trainer_layout, "trainer_layout")

    @property
    def has_engines(self) -> bool:
        """Whether its nodes have engines of their own."""
        return self.engines != 0


@dataclass(frozen=True, slots=True)
class FleetNode:
    """One node. Without a `directory` it shares the control plane's disk (local launcher only).

    Nodes of one `site` share a fast network; weights come to a site once, and go from node to node
    within it. Workers of a node with `cores` run on those alone (local launcher). So many
    `devices` are slices of its cores; `gpu_ids` are its GPUs, by default all of the machine.
    """

    name: str
    pool: str
    directory: str | None = None
    site: str = ""
    cores: tuple[int, ...] = ()
    devices: int = 1
    gpu_ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if not 1 <= self.devices <= MAX_COUNT:
            fix = f"must be from 1 to {MAX_COUNT}"
            raise ConfigError.of(f"nodes: {self.name}: devices", self.devices, fix)
        if not all(self.gpu_ids) or len(set(self.gpu_ids)) != len(self.gpu_ids):
            fix = 'must be different ids, such as ["0", "1"]'
            raise ConfigError.of(f"nodes: {self.name}: gpu_ids", list(self.gpu_ids), fix)
        here = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        if not here.issuperset(self.cores):
            fix = f"must be cores of this machine: {sorted(here)}"
            raise ConfigError.of(f"nodes: {self.name}: cores", list(self.cores), fix)


@dataclass(frozen=True, slots=True)
class RayCluster:
    """An existing Ray cluster: nodes with the resources get an agent with `gpus` (default: all)."""

    address: str = "auto"
    namespace: str = "slackwater"
    cores: float = 1.0
    gpus: int | None = None
    directory: str = "/tmp/slackwater"
    look_every_s: float = 2.0

    def __post_init__(self) -> None:
        check_above_zero("ray: ", self, "look_every_s")
        check_not_negative("ray: ", self, "cores")
        if self.gpus is not None:
            check_not_negative("ray: ", self, "gpus")


@dataclass(frozen=True, slots=True)
class FleetFile:
    """The whole file; the default is one node that shares everything with the control plane."""

    pools: tuple[FleetPool, ...] = ()
    nodes: tuple[FleetNode, ...] = ()
    launcher: Literal["local", "join", "ray"] = "local"
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    ray: RayCluster = RayCluster()
    slurm: tuple[SlurmPool, ...] = ()
    kubernetes: tuple[KubernetesPool, ...] = ()
    providers: tuple[RentalProvider, ...] = ()

    def __post_init__(self) -> None:
        for field, names in (("pools", self.pools), ("nodes", self.nodes)):
            check_unique(field, [entry.name for entry in names])
        for node in self.nodes:
            self.pool(node.pool, f"nodes: {node.name}: pool")
        self._check_cluster("slurm", [entry.pool for entry in self.slurm])
        self._check_cluster("kubernetes", [entry.pool for entry in self.kubernetes])
        check_unique("providers", [entry.pool for entry in self.providers])
        for provider in self.providers:
            self.pool(provider.pool, "providers: pool")
        self.address()
        if self.pools and self.launcher == "local" and not self.nodes:
            raise ConfigError.of("nodes", "none", 'must list at least one with launcher = "local"')
        if self.launcher == "ray" and len(self.pools) != 1:
            fix = 'must be one with launcher = "ray": every node of the cluster is of that pool'
            raise ConfigError.of("pools", len(self.pools), fix)

    def _check_cluster(self, field: str, pools: Sequence[str]) -> None:
        """Pools that a cluster brings must be pools of the fleet, whose agents join."""
        if pools and self.launcher != "join":
            raise ConfigError.of("launcher", self.launcher, f'must be "join" with [[{field}]]')
        check_unique(field, pools)
        for pool in pools:
            self.pool(pool, f"{field}: pool")

    def pool(self, name: str, field: str = "pool") -> FleetPool:
        for pool in self.pools:
            if pool.name == name:
                return pool
        known = ", ".join(pool.name for pool in self.pools) or "none"
        raise ConfigError.of(field, name, f"is not a pool of the fleet; there are: {known}")

    def pool_of(self, node: str, claimed: str | None) -> FleetPool:
        """The pool of a node that dials in: the file's, else the one that the node names."""
        for listed in self.nodes:
            if listed.name == node:
                return self.pool(listed.pool)
        if claimed is None:
            fix = "is not listed in the fleet file and names no pool; start it with --pool"
            raise ConfigError.of("node", node, fix)
        return self.pool(claimed, f"node {node}: pool")

    def address(self) -> tuple[str, int]:
        host, colon, port = self.listen.rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > 65535:
            raise ConfigError.of("listen", self.listen, "must be HOST:PORT")
        return host.strip("[]"), int(port)

    @property
    def encrypted(self) -> bool:
        """Whether connections leave this machine."""
        return self.address()[0] not in LOOPBACK


def check_unique(field: str, names: Sequence[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError.of(f"{field}: names", repeated, "must be named once each")


def read_fleet_file(file: Path) -> FleetFile:
    """The fleet, or an error that names what is wrong with the file."""
    return decode(FleetFile, read_toml("--fleet", file))
