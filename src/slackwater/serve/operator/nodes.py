"""The fleet's nodes over HTTP, for whoever runs the service."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from slackwater.model.errors import RefusedError
from slackwater.model.ids import TenantId
from slackwater.runtime.plane import ControlPlane
from slackwater.serve.http.auth import tenant_reader


def node_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(prefix="/slackwater/nodes", tags=["nodes"])
    caller = Annotated[TenantId, Depends(tenant_reader(plane.tenants))]

    @router.get("")
    async def listed(tenant: caller) -> dict[str, Any]:
        """Every node that is here or should be, and the workers that run on it."""
        operator = plane.settings.tenants[0]
        if tenant != operator:
            raise RefusedError(f"key: of {tenant}; nodes are the operator's, who is {operator}")
        return {"nodes": plane.fleet.rows()}

    return router
