"""What every worker of a node is told: which module, which model, how much memory. Nothing in it is
a path.
"""

from collections.abc import Sequence
from itertools import chain

from slackwater.model.errors import ConfigError
from slackwater.model.ids import NodeId
from slackwater.model.instance import InstanceKind
from slackwater.runtime.launch.fleet_file import LOCAL_NODE, FleetPool
from slackwater.runtime.launch.port import WorkerPlan
from slackwater.runtime.launch.sandboxes import sandbox_plans
from slackwater.runtime.settings import ServiceSettings
from slackwater.runtime.store.base_models import BaseModel, BaseModels

ENGINE = "slackwater.worker.engine_worker"
TRAINER = "slackwater.worker.trainer_worker"
COSERVING = "slackwater.worker.coserving_worker"
REWARDS = "slackwater.worker.reward_worker"
_REWARD = "reward:"


class WorkerPlans:
    """Plans by pool: trainers, then engines and local engines of every base model."""

    def __init__(
        self, settings: ServiceSettings, bases: BaseModels, judges: BaseModels | None = None
    ) -> None:
        self._settings = settings
        self._bases = bases
        self._judges = judges or BaseModels({}, or_none=True)

    def of(self, node: NodeId, pool: FleetPool) -> Sequence[WorkerPlan]:
        """The workers of one node; names of a fleet's nodes begin with the node's."""
        prefix = "" if node == LOCAL_NODE else f"{node}."
        trainer = (*self._common(), "--dtype", self._settings.trainer_dtype)
        plans = [
            WorkerPlan(f"{prefix}trainer-{number}", TRAINER, trainer)
            for number in range(pool.trainers)
        ]
        for place, base in enumerate(self._bases):
            arguments = self.engine_arguments(base.name)
            served = self._settings.serving
            if served is not None and base.name == served.model:
                plans += [
                    WorkerPlan(
                        f"{prefix}serving-{place}-{number}", COSERVING, self.serving_arguments()
                    )
                    for number in range(max(pool.engines, 1))
                ]
                continue
            plans += [
                WorkerPlan(f"{prefix}engine-{place}-{number}", ENGINE, arguments)
                for number in range(pool.engines)
            ]
            local = (*arguments, "--kind", InstanceKind.LOCAL.value)
            plans += [
                WorkerPlan(f"{prefix}local-{place}-{number}", ENGINE, local)
                for number in range(pool.local_engines)
            ]
        for number in range(pool.rewards):
            name = f"{prefix}rewards-{number}"
            plans.append(WorkerPlan(name, REWARDS, self.reward_arguments(name)))
        return [*plans, *sandbox_plans(self._settings, node, prefix, pool.sandboxes)]

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
        base, settings = self._bases.get(model), self._settings
        named = ("--model", base.uri, "--base", base.name, "--base-version", base.version)
        room = ("--kv-mb", str(settings.kv_mb), "--max-running", str(settings.max_running))
        return (*self._common(), *named, *room)

    def serving_arguments(self) -> tuple[str, ...]:
        """Of a worker that serves with a promise, and may lend."""
        served = self._settings.serving
        assert served is not None
        slo = f"ttft={served.slo.ttft_s:g},tpot={served.slo.tpot_s:g},share={served.slo.share:g}"
        lends: tuple[str, ...] = ()
        if served.lend:
            others = [base for base in self._bases if base.name != served.model]
            borrowers = (("--borrower", base.uri, base.version) for base in others)
            lends = ("--lend", *chain.from_iterable(borrowers))
        return (*self.engine_arguments(served.model), "--slo", slo, "--mode", served.mode, *lends)

    def _common(self) -> tuple[str, ...]:
        return ("--threads", str(self._settings.threads), "--device", self._settings.device)


def reward_models(settings: ServiceSettings) -> BaseModels:
    """The models of the reward services, under names that no base model has."""
    services = {} if settings.rewards is None else settings.rewards.services
    found = {
        name: BaseModel.read(f"{_REWARD}{name}", directory) for name, directory in services.items()
    }
    return BaseModels(found, or_none=True)


def _service(judge: BaseModel) -> tuple[str, str]:
    return judge.name.removeprefix(_REWARD), judge.uri
