"""The sandbox workers of a node."""

import hashlib
from pathlib import Path

from slackwater.model.ids import NodeId
from slackwater.runtime.launch.port import WorkerPlan
from slackwater.runtime.settings import ServiceSettings

SANDBOX = "slackwater.worker.sandbox_worker"


def sandbox_plans(
    settings: ServiceSettings, node: NodeId, prefix: str, count: int
) -> list[WorkerPlan]:
    """So many for a node, which share its cores and memory; each finds its place on the node's disk
    by `--service`.
    """
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
    """Tells services of one machine apart; the same after a restart."""
    return hashlib.sha256(str(state.resolve()).encode()).hexdigest()[:12]
