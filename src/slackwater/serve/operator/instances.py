"""Instances over HTTP, for the operator: list, add, drain, kill, replay a spot trace."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from pydantic import Field

from slackwater.model.errors import ConfigError
from slackwater.model.ids import InstanceId
from slackwater.model.instance import EngineName, InstanceKind
from slackwater.model.spot_trace import spot_events
from slackwater.runtime.launch.fleet_file import check_name
from slackwater.runtime.launch.instance_list import InstanceRequest
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.services.instances import MOST_INSTANCES
from slackwater.serve.http.auth import Caller, require_operator
from slackwater.serve.tinker.bodies import Finite, RequestBody

# What tenants may see of an instance: nothing that names other tenants' models or paths.
_FOR_ALL = ("instance", "model", "kind", "state", "running", "pending", "max_running")

Kind = Literal["dedicated", "spot", "borrowed"]


class InstanceRequestBody(RequestBody):
    """`model` may be left out if the service has only one."""

    model: str | None = None
    kind: Kind = "spot"
    engine: EngineName = "embedded"
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    tp: Annotated[int, Field(ge=1, le=64)] = 1


class AddBody(InstanceRequestBody):
    count: Annotated[int, Field(ge=1, le=MOST_INSTANCES)] = 1


class DrainBody(RequestBody):
    move_turns: bool = False


class ReplayBody(InstanceRequestBody):
    trace: Annotated[str, Field(max_length=16 << 20)]
    speed: Annotated[Finite, Field(gt=0)] = 1.0
    notice_s: Annotated[Finite, Field(ge=0)] = 0.0


def _instance_request(plane: ControlPlane, body: InstanceRequestBody) -> InstanceRequest:
    names = [base.name for base in plane.bases]
    model = body.model or names[0]
    if body.model is None and len(names) > 1:
        raise ConfigError.of("model", None, f"must be one of: {', '.join(names)}")
    return InstanceRequest(model, InstanceKind(body.kind), body.engine, body.url, body.tp)


def instance_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(prefix="/slackwater/instances", tags=["instances"])

    def operator(tenant: Caller) -> None:
        require_operator(plane, tenant, "instances")

    allowed = [Depends(operator)]

    @router.get("", name="listed")
    async def list_instances(tenant: Caller) -> dict[str, Any]:
        """List instances, and the last failed starts."""
        if plane.is_operator(tenant):
            return {"instances": plane.instances.rows(), "faults": plane.instances.faults()}
        rows = [
            {name: row[name] for name in _FOR_ALL if name in row} for row in plane.instances.rows()
        ]
        return {"instances": rows, "faults": []}

    @router.post("", status_code=201, dependencies=allowed)
    async def add(body: AddBody) -> dict[str, list[str]]:
        """Start more instances; they take turns once they have joined."""
        return {"added": list(plane.instances.add(_instance_request(plane, body), body.count))}

    @router.post("/replay", status_code=202, dependencies=allowed)
    async def replay(body: ReplayBody) -> dict[str, int]:
        """Replay a spot trace (`t_s,event,instance_id`): add and remove instances from now on."""
        events = spot_events(body.trace.splitlines(), "trace")
        plane.instances.replay(_instance_request(plane, body), events, body.speed, body.notice_s)
        return {"events": len(events)}

    @router.post("/{instance}/drain", status_code=202, dependencies=allowed)
    async def drain(instance: str, body: DrainBody) -> dict[str, str]:
        """Give an instance no new turns, and release it when it has none."""
        plane.instances.drain(InstanceId(instance), body.move_turns)
        return {"draining": instance}

    @router.post("/{instance}/kill", status_code=202, dependencies=allowed)
    async def kill(instance: str) -> dict[str, str]:
        """Kill an instance's process; its turns resume elsewhere."""
        plane.instances.kill(InstanceId(instance))
        return {"killed": instance}

    return router


def node_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(prefix="/slackwater/nodes", tags=["nodes"])

    @router.get("", name="listed")
    async def list_nodes(tenant: Caller) -> dict[str, Any]:
        """Every joined or configured node, and the workers that run on it."""
        require_operator(plane, tenant, "nodes")
        return {"nodes": plane.fleet.rows()}

    @router.post("/{node}/revoke")
    async def revoke(node: str, tenant: Caller) -> dict[str, Any]:
        """Revoke the node's tokens and end its connection."""
        require_operator(plane, tenant, "nodes")
        check_name("node", node)
        plane.fleet.revoke(node)
        return {"node": node}

    return router
