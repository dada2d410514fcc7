"""Plans the workers of a node: module, model, memory, and how many devices each needs. No argument
is a path.

All deployments of a node with one device share that. On a node with several each has devices of its
own; only local engines, which work while a trainer does not, are on the devices of a trainer.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from slackwater.model.device import (
    CUDA,
    DeploymentRequest,
    Device,
    count_ranks,
    layout_sizes,
    usable_devices,
)
from slackwater.model.errors import ConfigError
from slackwater.model.folder import read_object
from slackwater.model.ids import DeploymentId, NodeId
from slackwater.model.instance import InstanceKind
from slackwater.runtime.launch.fleet_file import LOCAL_NODE, FleetNode, FleetPool
from slackwater.runtime.launch.instance_list import InstanceRequest
from slackwater.runtime.launch.port import (
    COSERVING,
    ENGINE,
    REWARDS,
    SANDBOX,
    TRAINER,
    WorkerPlan,
)
from slackwater.runtime.settings import ServiceSettings
from slackwater.runtime.store.base_models import BaseModel, BaseModels

_REWARD = "reward:"


def sandbox_plans(settings: ServiceSettings, prefix: str, count: int) -> list[WorkerPlan]:
    """Plans of `count` sandboxes that share a node; `--service` names their folder on disk."""
    plans = []
    for number in range(count):
        name = f"{prefix}sandbox-{number}"
        options = {
            "--service": service_mark(settings.state),
            "--node": name,
            "--backend": settings.sandbox_backend,
            "--share": f"{number}/{count}",
        }
        if settings.sandbox_folder is not None:
            options["--folder"] = str(settings.sandbox_folder)
        if settings.sandbox_image is not None:
            options["--image"] = settings.sandbox_image
        allowed = [("--allow", address) for address in settings.sandbox_allow]
        arguments = tuple(part for pair in (*options.items(), *allowed) for part in pair)
        plans.append(WorkerPlan(name, SANDBOX, arguments))
    return plans


def service_mark(state: Path) -> str:
    """An id that tells services of one machine apart, and stays the same after a restart."""
    return hashlib.sha256(str(state.resolve()).encode()).hexdigest()[:12]


class WorkerPlans:
    """Plans by pool: trainers, then engines and local engines of every base model."""

    def __init__(
        self, settings: ServiceSettings, bases: BaseModels, judges: BaseModels | None = None
    ) -> None:
        self._settings = settings
        self._bases = bases
        self._judges = judges or BaseModels({}, or_none=True)
        fleet = settings.whole_fleet
        for pool in fleet.pools:
            check_layouts(pool, list(bases))
        # Nodes that other launchers or providers bring may be at another site.
        is_one_site = (
            fleet.launcher == "local"
            and not fleet.providers
            and len({node.site for node in fleet.nodes}) == 1
        )
        self._site_options = ("--one-site",) if is_one_site else ()

    @property
    def kind(self) -> str:
        """The kind of devices that deployments use."""
        return self._settings.device.partition(":")[0]

    def agent_options(self, node: FleetNode) -> tuple[str, ...]:
        """Which devices an agent that we start reports."""
        slices = ("--devices", str(node.devices)) if node.devices > 1 else ()
        gpus = ("--gpu-ids", ",".join(node.gpu_ids)) if node.gpu_ids else ("--share-gpu",)
        return ("--device", self.kind, *slices, *gpus)

    def usable(self, devices: Iterable[Device], pool: FleetPool) -> tuple[Device, ...]:
        """A node's devices for its deployments: the service's kind, less the reward services'."""
        rewards = self._settings.rewards
        taken = rewards.devices if rewards is not None and pool.rewards else ()
        found = usable_devices(devices, self._settings.device)
        if len(found) < 2:
            return found
        return tuple(device for device in found if f"{device.kind}:{device.index}" not in taken)

    def plan_node(
        self, node: NodeId, pool: FleetPool, devices: Sequence[Device]
    ) -> Sequence[WorkerPlan]:
        """The plans of a node's workers, whose names begin with the node's in a fleet."""
        prefix = "" if node == LOCAL_NODE else f"{node}."
        common = self._common()
        trainers = [f"{prefix}trainer-{number}" for number in range(pool.trainers)]
        shared = str(node) if len(devices) < 2 else ""

        def group(number: int) -> str:
            """The trainer whose devices a local engine shares."""
            alternates = pool.local_engines and trainers
            return shared or (trainers[number % len(trainers)] if alternates else "")

        plans = [
            WorkerPlan(
                name,
                TRAINER,
                (*common, "--dtype", self._settings.trainer_dtype, *self._site_options),
                layout=pool.trainer_layout,
                memory_mb=self._memory_mb(list(self._bases), pool.trainer_layout),
                group=group(number),
                grace_s=self._grace_s(pool.trainer_layout),
            )
            for number, name in enumerate(trainers)
        ]
        counts = self._engine_counts(pool, len(devices))
        for place, (base, count) in enumerate(zip(self._bases, counts, strict=True)):
            arguments = (*common, *self._engine_options(base.name))
            kind, module, engines = "engine", ENGINE, count
            served = self._settings.serving
            is_served = served is not None and base.name == served.model
            if is_served:
                kind, module, engines = "serving", COSERVING, max(count, 1)
                arguments = (*common, *self._serving_options())
            engine = WorkerPlan(
                "",
                module,
                arguments,
                layout=pool.engine_layout,
                memory_mb=self._memory_mb([base], pool.engine_layout),
                group=shared,
                grace_s=0.0 if is_served else self._grace_s(pool.engine_layout),
            )
            plans += [
                replace(engine, name=f"{prefix}{kind}-{place}-{number}")
                for number in range(engines)
            ]
            for number in range(0 if is_served else pool.local_engines):
                local = self._local_engine(engine, pool, base.name)
                name = f"{prefix}local-{place}-{number}"
                plans.append(replace(local, name=name, group=group(number)))
        for number in range(pool.rewards):
            name = f"{prefix}rewards-{number}"
            plans.append(WorkerPlan(name, REWARDS, self.reward_arguments(name)))
        return [*plans, *sandbox_plans(self._settings, prefix, pool.sandboxes)]

    def _local_engine(self, engine: WorkerPlan, pool: FleetPool, model: str) -> WorkerPlan:
        """The same on a trainer's devices; a server ends with the control plane."""
        kind, ranks = pool.local_engine, count_ranks(pool.engine_layout)
        module, more = InstanceRequest(model, InstanceKind.LOCAL, kind, tp=ranks).worker()
        arguments = (*engine.arguments, *more)
        if kind == "embedded":
            return replace(engine, module=module, arguments=arguments)
        return replace(engine, module=module, arguments=arguments, one_process=True, grace_s=0.0)

    def _engine_counts(self, pool: FleetPool, devices: int) -> list[int]:
        """Engines of each model; where no number is set, they fill the node's devices."""
        models = len(list(self._bases))
        if pool.engines is not None or devices < 2 or not models:
            return [1 if pool.engines is None else pool.engines] * models
        left = devices - pool.trainers * count_ranks(pool.trainer_layout)
        each, more = divmod(left // count_ranks(pool.engine_layout), models)
        return [max(each + (place < more), 1) for place in range(models)]

    def _grace_s(self, layout: str) -> float:
        """A worker of several ranks ends with the control plane: none of them may miss a step."""
        return self._settings.worker_grace_s if count_ranks(layout) == 1 else 0.0

    def _memory_mb(self, models: Sequence[BaseModel], layout: str) -> int:
        """The least that a rank needs on a GPU: its part of the smallest model's weights."""
        if not self._settings.device.startswith(CUDA) or not models:
            return 0
        return min(weights_mb(base.directory) for base in models) // count_ranks(layout)

    def reward_arguments(self, name: str) -> tuple[str, ...]:
        """Of a worker that holds the reward services; `name` is the broker's for its devices."""
        rewards = self._settings.rewards
        if rewards is None:
            fix = "needs the services: a table [rewards] with services = { NAME = DIRECTORY }"
            raise ConfigError.of("fleet: rewards", 1, fix)
        staged = (("--stage", *_service(judge)) for judge in self._judges)
        devices = (("--on", device) for device in rewards.devices)
        room = ("--kv-mb", str(rewards.kv_mb), "--device-mib", str(rewards.device_mib))
        named = (*chain.from_iterable(devices), *chain.from_iterable(staged))
        return ("--threads", str(self._settings.threads), "--node", name, *room, *named)

    def engine_arguments(self, model: str) -> tuple[str, ...]:
        """Of an engine of a base model; NotFoundError if the service has no such model."""
        return (*self._common(), *self._engine_options(model))

    def _engine_options(self, model: str) -> tuple[str, ...]:
        base, settings = self._bases.get(model), self._settings
        named = ("--model", base.uri, "--base", base.name, "--base-version", base.version)
        room = ("--kv-mb", str(settings.kv_mb), "--max-running", str(settings.max_running))
        return (*named, *room)

    def _serving_options(self) -> tuple[str, ...]:
        """Of a worker that serves within an SLO, and may lend."""
        served = self._settings.serving
        assert served is not None
        slo = f"ttft={served.slo.ttft_s:g},tpot={served.slo.tpot_s:g},share={served.slo.share:g}"
        lends: tuple[str, ...] = ()
        if served.lend:
            others = [base for base in self._bases if base.name != served.model]
            borrowers = (("--borrower", base.uri, base.version) for base in others)
            lends = ("--lend", *chain.from_iterable(borrowers))
        return (*self._engine_options(served.model), "--slo", slo, "--mode", served.mode, *lends)

    def _common(self) -> tuple[str, ...]:
        """A worker sees its own device alone, so that is always the first."""
        return ("--threads", str(self._settings.threads), "--device", self.kind)


def deployment_requests(
    node: NodeId, kind: str, plans: Sequence[WorkerPlan]
) -> tuple[DeploymentRequest, ...]:
    """What those of a node's workers that are deployments need of its devices."""
    return tuple(
        DeploymentRequest(
            DeploymentId(plan.name),
            count_ranks(plan.layout),
            node=node,
            kind=kind,
            memory_mb=plan.memory_mb,
            group=plan.group,
        )
        for plan in plans
        if plan.layout is not None
    )


def check_layouts(pool: FleetPool, models: Sequence[BaseModel]) -> None:
    """Refuse a layout whose ranks cannot share the heads and hidden units of every model evenly."""
    runs_engines = pool.has_engines or pool.local_engines > 0
    used = {"engine_layout": runs_engines, "trainer_layout": pool.trainers > 0}
    for field in (field for field, is_used in used.items() if is_used):
        layout = getattr(pool, field)
        tp, dp = layout_sizes(layout, field)
        if field == "engine_layout" and dp > 1:
            raise ConfigError.of(
                field, layout, "must be tp alone, such as tp=2; start more engines"
            )
        for model in models if tp > 1 else ():
            config = _model_config(model.directory)
            heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
            shared = {"key/value heads": heads, "hidden units": config.get("intermediate_size")}
            for what, count in shared.items():
                if isinstance(count, int) and count % tp:
                    fix = f"must have a tp that divides the {count} {what} of model {model.name}"
                    raise ConfigError.of(field, layout, fix)


def weights_mb(directory: Path) -> int:
    """What a model's weights take in two bytes each."""
    config = _model_config(directory)
    whole = sum(file.stat().st_size for file in directory.glob("*.safetensors")) >> 20
    is_fp32 = config.get("torch_dtype", config.get("dtype")) == "float32"
    return (whole // 2 if is_fp32 else whole) if config else 0


def _model_config(directory: Path) -> dict[str, Any]:
    """Empty where there is none: whoever reads the model says what is wrong with it."""
    return read_object(directory / "config.json") or {}


def reward_models(settings: ServiceSettings) -> BaseModels:
    """The models of the reward services, under names that no base model has."""
    services = {} if settings.rewards is None else settings.rewards.services
    found = {
        name: BaseModel.read(f"{_REWARD}{name}", directory) for name, directory in services.items()
    }
    return BaseModels(found, or_none=True)


def _service(judge: BaseModel) -> tuple[str, str]:
    return judge.name.removeprefix(_REWARD), judge.uri
