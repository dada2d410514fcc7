"""Explains why a service cannot sample or train: every worker of a kind fails to start."""

from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.control.rollout.manager import RolloutManager
from slackwater.model.ids import TenantId
from slackwater.runtime.launch.fleet import LaunchedFleet
from slackwater.runtime.services.instances import InstanceService
from slackwater.runtime.services.workers import Workers
from slackwater.runtime.store.base_models import BaseModels


@dataclass(eq=False)
class Breakdowns:
    """The operator gets the full reason, other tenants a general one."""

    fleet: LaunchedFleet
    bases: BaseModels
    manager: RolloutManager
    instances: InstanceService
    workers: Workers
    operator: str

    def engine_failure(self, model: str, tenant: TenantId) -> str | None:
        """Why a base model cannot be sampled: every engine of it was drained or fails to start."""
        for record in self.manager.state.instances.records.values():
            if record.spec.runs(model):  # usually the first
                return None
        if self.instances.is_starting(model):
            return None
        place = [base.name for base in self.bases].index(model)
        kinds = (f"engine-{place}-", f"local-{place}-", f"serving-{place}-")
        begun = [name for name in self.fleet.supervisor.names() if any(k in name for k in kinds)]
        names = [name for name in begun if not self.fleet.supervisor.is_retired(name)]
        planned = any(pool.has_engines or pool.local_engines for pool in self.fleet.file.pools)
        if not names and (begun or (not planned and self.instances.has_request_for(model))):
            add = (
                f"`slackwater instance add --model {model}`"
                if tenant == self.operator
                else "the operator"
            )
            return f"model {model}: no engine serves it, the last one was drained; {add} adds one"
        return self._describe(names, f"model {model}: no engine starts", tenant)

    def trainer_failure(self, tenant: TenantId) -> str | None:
        """Why nothing can be trained, if no trainer runs and every one fails to start."""
        if self.workers.names_by_role()["trainer"]:
            return None
        names = [name for name in self.fleet.supervisor.names() if "trainer-" in name]
        return self._describe(names, "no trainer starts", tenant)

    def _describe(self, names: Sequence[str], what: str, tenant: TenantId) -> str | None:
        failed = self.fleet.supervisor.failures()
        if not names or any(name not in failed or not failed[name].persists for name in names):
            return None
        knows = tenant == self.operator
        why = failed[names[0]].error if knows else "the operator's status says why"
        return f"{what}: {why}"
