"""Authentication: `X-API-Key` (Tinker), `Bearer` (OpenAI), or a URL's password (`Basic`)."""

import base64
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from slackwater.model.errors import RefusedError
from slackwater.model.ids import TenantId
from slackwater.runtime.services.tenants import Tenants
from slackwater.serve.http.errors import UnauthorizedError

if TYPE_CHECKING:
    from slackwater.runtime.plane import ControlPlane


def find_tenant(tenants: Tenants, headers: Mapping[str, str]) -> TenantId | None:
    """The tenant of the request's key, if any."""
    return tenants.find_by_key(_key(headers))


def _key(headers: Mapping[str, str]) -> str:
    key = headers.get("x-api-key")
    if key is None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else ""
        if scheme.lower() == "basic":
            with contextlib.suppress(ValueError):
                key = base64.b64decode(token, validate=True).decode().partition(":")[2]
    return key


JOB_HEADER = "x-slackwater-job"  # names the job that a request or a new session belongs to


def find_job(tenants: Tenants, headers: Mapping[str, str]) -> str | None:
    """The request's job: that of its key, if it is a job's key, else that of the header."""
    return find_job_key(tenants, headers) or headers.get(JOB_HEADER)


def find_job_key(tenants: Tenants, headers: Mapping[str, str]) -> str | None:
    """The job of the request's key, if it is a job's key."""
    return tenants.job_of_key(_key(headers))


async def read_tenant(request: Request) -> TenantId:
    """The caller's tenant; async, so that FastAPI does not run it in a thread."""
    plane: ControlPlane = request.app.state.plane
    tenant = find_tenant(plane.tenants, request.headers)
    if tenant is None:
        raise UnauthorizedError(
            "key: missing or unknown; send X-API-Key or Authorization: Bearer with the key that "
            "`slackwater up` printed"
        )
    return tenant


Caller = Annotated[TenantId, Depends(read_tenant)]


def require_operator(plane: "ControlPlane", tenant: TenantId, what: str) -> None:
    """Refuse every tenant but the operator; `what` names what only the operator may use."""
    if not plane.is_operator(tenant):
        operator = plane.settings.tenants[0]
        raise RefusedError(f"key: of {tenant}; {what} need the operator's key, of {operator}")
