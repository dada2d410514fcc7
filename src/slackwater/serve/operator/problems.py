"""What keeps the service from its work, one sentence each, and what is still starting."""

from slackwater.model.ids import TenantId
from slackwater.model.instance import InstanceState
from slackwater.runtime.launch.fleet_file import LOCAL_NODE
from slackwater.runtime.plane import ControlPlane

_NOT_UP = ("starting", InstanceState.JOINING.value, InstanceState.PULLING.value)


def problems_of(plane: ControlPlane, tenant: TenantId) -> list[str]:
    """Models and training that cannot run; for the operator also failed workers and lost nodes."""
    models = (plane.broken_engine(base.name, tenant) for base in plane.bases)
    found = [f"{why}; requests get 503" for why in models if why is not None]
    if (why := plane.broken_trainer(tenant)) is not None:
        found.append(f"{why}; training requests get 503")
    if not plane.is_operator(tenant):
        return found
    failed = plane.fleet.supervisor.failed()
    away = [row["node"] for row in plane.fleet.rows() if "host" not in row]
    return [
        *found,
        *(
            f"worker {name} failed to start {one.deaths} times: {one.said}"
            for name, one in failed.items()
        ),
        *(
            f"node {node} is not here: its agent has not joined"
            for node in away
            if node != LOCAL_NODE
        ),
    ]


def starting_workers(plane: ControlPlane) -> list[str]:
    """Workers that have been started, or are about to be, and have not joined yet."""
    rows = plane.instances.listed()
    names = {str(row["instance"]) for row in rows if row["state"] in _NOT_UP}
    names |= set(plane.fleet.supervisor.starting())
    local = {row["node"] for row in plane.fleet.rows() if "host" not in row} & {LOCAL_NODE}
    return sorted(names | {f"agent of node {name}" for name in local})
