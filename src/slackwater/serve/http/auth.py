"""Keys to tenants: `X-API-Key` (Tinker) or `Authorization: Bearer` (OpenAI)."""

from collections.abc import Awaitable, Callable, Mapping

from fastapi import Request

from slackwater.model.ids import TenantId
from slackwater.runtime.services.tenants import Tenants
from slackwater.serve.http.errors import UnauthorizedError


def find_tenant(tenants: Tenants, headers: Mapping[str, str]) -> TenantId | None:
    """Whose key a request carries, if anybody's."""
    key = headers.get("x-api-key")
    if key is None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else ""
    return tenants.of_key(key)


JOB_HEADER = "x-slackwater-job"  # names the job that a request or a new session belongs to


def tenant_reader(tenants: Tenants) -> Callable[[Request], Awaitable[TenantId]]:
    """A dependency that gives the caller's tenant, or refuses. Async, so that it needs no thread."""

    async def tenant_of(request: Request) -> TenantId:
        tenant = find_tenant(tenants, request.headers)
        if tenant is None:
            raise UnauthorizedError(
                "key: none, or not known here; send X-API-Key or Authorization: Bearer with the key "
                "that `slackwater up` printed"
            )
        return tenant

    return tenant_of
