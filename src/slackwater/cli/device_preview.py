"""Previews which deployment gets which device, with the allocator that the service uses."""

from pathlib import Path

from slackwater.control.devices.allocator import DeviceAllocator
from slackwater.control.devices.messages import (
    DeploymentsRequested,
    DevicesReported,
    RefuseDeployment,
)
from slackwater.model.device import CPU
from slackwater.model.errors import RefusedError
from slackwater.model.ids import NodeId
from slackwater.runtime.launch.worker_plans import WorkerPlans, deployment_requests
from slackwater.runtime.settings import ServiceSettings
from slackwater.runtime.store.base_models import BaseModel, BaseModels
from slackwater.worker.node_devices import node_devices


def preview_devices(settings: ServiceSettings) -> list[str]:
    """One line per device of local nodes; RefusedError if a deployment does not get any.

    No model is read, so a missing model does not prevent the preview.
    """
    models = settings.models or ({} if settings.only_actions else {"tiny": Path("tiny")})
    bases = {name: BaseModel(name, path, 1, 1, (), "") for name, path in models.items()}
    plans = WorkerPlans(settings, BaseModels(bases, or_none=True))
    fleet = settings.whole_fleet
    allocator, lines = DeviceAllocator(), []
    for entry in fleet.nodes if fleet.launcher == "local" else ():
        node, pool = NodeId(entry.name), fleet.pool(entry.pool)
        found = node_devices(
            node,
            slices=entry.devices,
            gpu_ids=entry.gpu_ids or None,
            probe=plans.kind != CPU,
            share_gpu=not entry.gpu_ids,
        )
        devices = plans.usable(found, pool)
        if (why := allocator.conflict(node, devices)) is not None:
            raise RefusedError(why)
        allocator.handle(DevicesReported(0.0, node, devices))
        requests = deployment_requests(node, plans.kind, plans.plan_node(node, pool, devices))
        for command in allocator.handle(DeploymentsRequested(0.0, requests)):
            if isinstance(command, RefuseDeployment):
                raise RefusedError(command.reason)
        lines += [
            f"device {each.device}   {', '.join(allocator.owners(each.device)) or 'unused'}"
            for each in devices
        ]
    return lines
