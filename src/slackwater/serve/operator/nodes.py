"""The fleet's nodes over HTTP, for whoever runs the service."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from slackwater.model.errors import RefusedError
from slackwater.model.ids import TenantId
from slackwater.runtime.launch.fleet_file import check_name
from slackwater.runtime.plane import ControlPlane
from slackwater.serve.http.auth import tenant_reader


def node_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(prefix="/slackwater/nodes", tags=["nodes"])
    caller = Annotated[TenantId, Depends(tenant_reader(plane.tenants))]

    def only_operator(tenant: TenantId) -> None:
        operator = plane.settings.tenants[0]
        if tenant != operator:
            raise RefusedError(f"key: of {tenant}; nodes are the operator's, who is {operator}")

    @router.get("")
    async def listed(tenant: caller) -> dict[str, Any]:
        """Every node that is here or should be, and the workers that run on it."""
        only_operator(tenant)
        return {"nodes": plane.fleet.rows()}

    @router.post("/{node}/revoke")
    async def revoke(node: str, tenant: caller) -> dict[str, Any]:
        """Let no token of the node work any more, and end its connection."""
        only_operator(tenant)
        check_name("node", node)
        plane.fleet.revoke(node)
        return {"node": node}

    return router
