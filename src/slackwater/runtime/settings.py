"""Settings of a service, and their checks."""

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slackwater.control.coschedule.settings import CoscheduleSettings
from slackwater.control.operations.settings import OperationsConfig
from slackwater.control.rollout.settings import RolloutSettings, rollout_settings
from slackwater.model.device import count_ranks
from slackwater.model.endpoint import Endpoint
from slackwater.model.errors import ConfigError, check_above_zero, check_not_negative
from slackwater.model.ids import check_tenant
from slackwater.model.instance import EngineName
from slackwater.model.node import NodeSize
from slackwater.model.residency import ResidencySettings
from slackwater.model.serving import ServingSlo
from slackwater.model.tenant_limits import OperatorLimits
from slackwater.policy.serving.modes import find_mode
from slackwater.runtime.launch.fleet_file import (
    LOCAL_NODE,
    MAX_COUNT,
    FleetFile,
    FleetNode,
    FleetPool,
    check_unique,
)
from slackwater.runtime.launch.instance_list import InstanceList, ListedInstance

_MOST_KV_MB = 1 << 30
SILENT_AFTER_S = 20.0  # a worker that sends nothing for so long is lost
TRAIN_DTYPES = ("float32", "bfloat16")

SANDBOX_BACKENDS = ("auto", "process", "bubblewrap", "docker", "gvisor")


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """A model served under an SLO; with `lend` its idle devices roll out for other models."""

    model: str
    slo: ServingSlo
    lend: bool = False
    mode: str = "foresight"

    def __post_init__(self) -> None:
        find_mode(self.mode)  # a wrong name is refused at once


@dataclass(frozen=True, slots=True)
class PriceSettings:
    """Dollars per hour, for the dashboard's cost and savings; 0 means unknown."""

    device_per_h: float = 0.0
    spot_device_per_h: float = 0.0
    core_per_h: float = 0.0

    def __post_init__(self) -> None:
        for name in ("device_per_h", "spot_device_per_h", "core_per_h"):
            if not 0 <= getattr(self, name) < float("inf"):
                fix = "must be dollars per hour, at least 0"
                raise ConfigError.of(f"prices: {name}", getattr(self, name), fix)


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """Reward models, by the name of their service: directories. `devices` are those of one worker;
    each runs one action at a time.

    `device_mib` is how much of each device services may have (0: most of it), so how many lie
    there at once.
    """

    services: Mapping[str, Path]
    devices: tuple[str, ...] = ("cpu",)
    kv_mb: int = 256
    device_mib: int = 0

    def __post_init__(self) -> None:
        if not self.services:
            raise ConfigError.of(
                "rewards: services", {}, "must name at least one: NAME = DIRECTORY"
            )
        if not 1 <= len(self.devices) <= 8:
            raise ConfigError.of("rewards: devices", list(self.devices), "must be 1 to 8 devices")
        if self.kv_mb < 1 or self.device_mib < 0:
            wrong = f"kv_mb {self.kv_mb}, device_mib {self.device_mib}"
            raise ConfigError.of("rewards", wrong, "must be at least 1 and 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """`models` maps names to directories; `engines` is per model, by default as many as there are
    devices that no trainer has; `record` is a file for events. `devices` are slices of the cores,
    each a device of its own; `gpu_ids` are the GPUs to use, by default all. A layout such as
    `tp=2,dp=2` spreads each engine or trainer over several devices.

    `instances` lists engines beside those, under names of the operator's. `train_dtype` is what
    trainers compute in (master weights and moments are fp32 always); None is the device's own:
    bfloat16 on CUDA, float32 on a CPU. Without `residency` the models of a trainer stay on its
    device, unmanaged. `allowed_hosts` are names by which clients call the service beside the
    loopback's and `host`; `*` is any. With `trust_tenants` the operator states that no tenant's
    actions need to be kept from another's; else several tenants need a backend that isolates.
    """

    state: Path
    models: Mapping[str, Path]
    engines: int | None = None
    local_engines: int = 0
    local_engine: EngineName = "embedded"
    instances: tuple[ListedInstance, ...] = ()
    trainers: int = 1
    sandboxes: int = 0
    sandbox_backend: str = "auto"
    sandbox_folder: Path | None = None
    sandbox_image: str | None = None
    sandbox_allow: tuple[str, ...] = ()
    trust_tenants: bool = False
    rewards: RewardSettings | None = None
    max_waiting_actions: int = 20_000
    limits: OperatorLimits = field(default_factory=OperatorLimits)
    tenants: tuple[str, ...] = ("default",)
    host: str = "127.0.0.1"
    port: int = 8123
    front_ends: int = 1
    allowed_hosts: tuple[str, ...] = ()
    database_url: str | None = None
    record: Path | None = None
    device: str = "cpu"
    devices: int = 1
    gpu_ids: tuple[str, ...] = ()
    engine_layout: str = ""
    trainer_layout: str = ""
    train_dtype: str | None = None
    threads: int = 1
    kv_mb: int = 1024
    max_running: int = 64
    max_live_turns: int = 8192
    max_body_bytes: int = 64 << 20
    max_waiting_bytes: int = 2 << 30
    hold_s: float = 25.0
    worker_grace_s: float = 60.0
    session_silent_after_s: float = 300.0
    results_kept_s: float = 24 * 3600.0
    ephemeral_bytes_per_model: int = 8 << 30
    ephemeral_versions_kept: int = 4
    fleet: FleetFile | None = None
    rollout: Mapping[str, Any] = field(default_factory=dict)
    serving: ServingSettings | None = None
    coschedule: CoscheduleSettings | None = None
    residency: ResidencySettings | None = None
    operations: OperationsConfig = field(default_factory=OperationsConfig)
    prices: PriceSettings = field(default_factory=PriceSettings)

    def __post_init__(self) -> None:
        self._check_counts()
        if not self.host:
            raise ConfigError.of("--host", self.host, "must be an address, such as 127.0.0.1")
        if not self.tenants:
            raise ConfigError.of("tenants", [], "must name at least one")
        check_unique("tenants", self.tenants)
        for name in self.tenants:
            check_tenant(name, "--tenant")
        _ = self.whole_fleet  # a wrong layout or GPU is refused at once
        if self.gpu_ids and not self.device.startswith("cuda"):
            raise ConfigError.of("--gpu-ids", list(self.gpu_ids), "needs --device cuda")
        if self.serving is not None and self.serving.model not in self.models:
            fix = f"must be one of the models: {', '.join(self.models)}"
            raise ConfigError.of("--serve", self.serving.model, fix)
        if self.fleet is not None and not self.fleet.pools:
            raise ConfigError("fleet.pools: missing; add a pool, and the nodes that are in it")
        self._check_sandboxes()
        self._check_coscheduling()
        InstanceList(self.instances)
        _ = self.rollout_settings  # a wrong table is refused at once
        no_engines = not self.has_engines and not self.instances
        if no_engines and not self.only_actions:
            raise ConfigError.of(
                "--engines", 0, "must be at least 1 without --local-engines or --instances"
            )
        if self.trainers < (0 if self.only_actions else 1):
            raise ConfigError.of("--trainers", self.trainers, "must be at least 1")
        if self.train_dtype is not None and self.train_dtype not in TRAIN_DTYPES:
            choices = f"must be one of {', '.join(TRAIN_DTYPES)}"
            raise ConfigError.of("--train-dtype", self.train_dtype, choices)
        self._check_sizes()
        if not 0 <= self.port < 65536:
            raise ConfigError.of("--port", self.port, "must be a port number")

    def _check_counts(self) -> None:
        """Counts of workers and devices, which a mistyped number would let fill the machine."""
        counts = {"engines": 0, "local_engines": 0, "trainers": 0, "sandboxes": 0}
        counts |= {"devices": 1, "threads": 1, "max_running": 1, "front_ends": 1}
        for name, least in counts.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= MAX_COUNT:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError.of(flag, value, f"must be from {least} to {MAX_COUNT}")

    def _check_sizes(self) -> None:
        if not 0 < self.session_silent_after_s < float("inf"):
            silent_s = self.session_silent_after_s
            raise ConfigError.of("--session-timeout", silent_s, "must be above 0, in seconds")
        if not 0 < self.hold_s <= 30:
            raise ConfigError.of("hold_s", self.hold_s, "must be above 0 and at most 30")
        if not 0 <= self.worker_grace_s <= 3600:
            fix = "must be at least 0 and at most 3600, in seconds"
            raise ConfigError.of("worker_grace_s", self.worker_grace_s, fix)
        sizes = ("max_live_turns", "max_body_bytes", "max_waiting_bytes", "results_kept_s")
        check_above_zero("", self, "kv_mb", *sizes)
        if self.kv_mb > _MOST_KV_MB:
            raise ConfigError.of("--kv-mb", self.kv_mb, f"must be at most {_MOST_KV_MB}")
        check_not_negative("", self, "ephemeral_bytes_per_model", "ephemeral_versions_kept")

    def _check_coscheduling(self) -> None:
        """Refuse co-scheduling without rollout and train nodes that are known from the start."""
        if self.coschedule is None:
            return
        rollout, train = self.coscheduled_nodes
        if self.local_engines or any(pool.local_engines for pool in self.whole_fleet.pools):
            fix = "must be 0 with [coschedule]: a rollout on train nodes is a placement there"
            raise ConfigError.of("local_engines", self.local_engines, fix)
        if not rollout or not train:
            what = f"{len(rollout)} rollout nodes and {len(train)} train nodes"
            fix = "must be at least one of each: list nodes with engines and nodes with trainers"
            raise ConfigError.of("coschedule: fleet", what, fix)

    @property
    def coscheduled_nodes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The fleet's rollout nodes and train nodes; a node may be both."""
        file = self.whole_fleet
        pools = {pool.name: pool for pool in file.pools}
        rollout = tuple(node.name for node in file.nodes if pools[node.pool].has_engines)
        train = tuple(node.name for node in file.nodes if pools[node.pool].trainers)
        return rollout, train

    @property
    def coscheduled_sizes(self) -> tuple[NodeSize, NodeSize]:
        """Sizes of rollout nodes and of train nodes, if the fleet says which devices they have.
        Nodes of different sizes, or with engines of several models, are not divided into parts.
        """
        file, found = self.whole_fleet, (set[NodeSize](), set[NodeSize]())
        for node in file.nodes:
            pool, devices = file.pool(node.pool), max(node.devices, len(node.gpu_ids))
            engine, trainer = count_ranks(pool.engine_layout), count_ranks(pool.trainer_layout)
            engines = pool.engines
            if engines is None:
                engines = (devices - pool.trainers * trainer) // engine
            for sizes, count, ranks in (
                (found[0], max(engines, 1) if pool.has_engines else 0, engine),
                (found[1], pool.trainers, trainer),
            ):
                if count:
                    sizes.add(NodeSize(count * ranks, ranks) if devices > 1 else NodeSize())
        return _common_size(found[0], self.models), _common_size(found[1])

    def _check_sandboxes(self) -> None:
        if self.sandbox_backend not in SANDBOX_BACKENDS:
            choices = f"must be one of {', '.join(SANDBOX_BACKENDS)}"
            raise ConfigError.of("--sandbox-backend", self.sandbox_backend, choices)
        several = len(self.tenants) > 1 and not self.trust_tenants
        if several and self.sandbox_backend == "process" and self.brokers_actions:
            fix = (
                f"does not isolate {len(self.tenants)} tenants: use bubblewrap, or --trust-tenants"
            )
            raise ConfigError.of("--sandbox-backend", "process", fix)
        for address in self.sandbox_allow:
            Endpoint.parse("--sandbox-allow", address)
        if self.max_waiting_actions < 1:
            flag = "--max-waiting-actions"
            raise ConfigError.of(flag, self.max_waiting_actions, "must be at least 1")

    @property
    def rollout_settings(self) -> RolloutSettings:
        """Settings of the rollout manager; by default an instance is lost with its connection."""
        return rollout_settings({"lease_s": SILENT_AFTER_S} | dict(self.rollout))

    @property
    def has_engines(self) -> bool:
        return self.engines != 0 or self.local_engines > 0

    @property
    def only_actions(self) -> bool:
        """Whether the service brokers actions and has no engines and trainers."""
        has_actions = self.sandboxes > 0 or self.rewards is not None
        return has_actions and self.engines == 0 and self.trainers == 0

    @property
    def whole_fleet(self) -> FleetFile:
        """The fleet of the file, or one node without a file."""
        if self.fleet is not None:
            return self.fleet
        pool = FleetPool(
            LOCAL_NODE,
            engines=self.engines,
            local_engines=self.local_engines,
            local_engine=self.local_engine,
            trainers=self.trainers,
            sandboxes=self.sandboxes,
            rewards=int(self.rewards is not None),
            engine_layout=self.engine_layout,
            trainer_layout=self.trainer_layout,
        )
        node = FleetNode(LOCAL_NODE, pool.name, devices=self.devices, gpu_ids=self.gpu_ids)
        return FleetFile((pool,), (node,))

    @property
    def brokers_actions(self) -> bool:
        """Whether any pool has sandboxes."""
        return any(pool.sandboxes for pool in self.whole_fleet.pools)

    @property
    def trainer_dtype(self) -> str:
        """The type that trainers compute in: as set, or the device's default."""
        return self.train_dtype or ("bfloat16" if self.device.startswith("cuda") else "float32")


def _common_size(sizes: set[NodeSize], models: Sized = ("",)) -> NodeSize:
    """The one size of all nodes; else the smallest, undivided."""
    if len(sizes) == len(models) == 1:
        return next(iter(sizes))
    least = min((size.devices for size in sizes), default=1)
    return NodeSize(least, least)
