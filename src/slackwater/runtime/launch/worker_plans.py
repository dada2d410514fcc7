"""What every worker of a node is told: which module, which model, how much memory. Nothing in it is a path."""

from collections.abc import Sequence
from itertools import chain

from slackwater.model.ids import NodeId
from slackwater.model.instance import InstanceKind
from slackwater.runtime.launch.fleet_file import LOCAL_NODE, FleetPool
from slackwater.runtime.launch.port import WorkerPlan
from slackwater.runtime.launch.sandboxes import sandbox_plans
from slackwater.runtime.settings import ServiceSettings
from slackwater.runtime.store.base_models import BaseModels

ENGINE = "slackwater.worker.engine_worker"
TRAINER = "slackwater.worker.trainer_worker"
COSERVING = "slackwater.worker.coserving_worker"


class WorkerPlans:
    """Plans by pool: trainers, then engines and local engines of every base model."""

    def __init__(self, settings: ServiceSettings, bases: BaseModels) -> None:
        self._settings = settings
        self._bases = bases

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
        return [*plans, *sandbox_plans(self._settings, node, prefix, pool.sandboxes)]

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
