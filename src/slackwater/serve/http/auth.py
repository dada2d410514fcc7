"""Keys to tenants: `X-API-Key` (Tinker), `Bearer` (OpenAI), or a URL's password (`Basic`)."""

import base64
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from fastapi import Request

from slackwater.model.ids import TenantId
from slackwater.runtime.services.tenants import Tenants
from slackwater.serve.http.errors import UnauthorizedError


def find_tenant(tenants: Tenants, headers: Mapping[str, str]) -> TenantId | None:
    """Whose key a request carries, if anybody's."""
    return tenants.of_key(_key(headers))


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
    """The job that a request names: that of its key, if it has one of a job, else of its header."""
    return find_job_key(tenants, headers) or headers.get(JOB_HEADER)


def find_job_key(tenants: Tenants, headers: Mapping[str, str]) -> str | None:
    """The job whose key a request carries, if it is a job's."""
    return tenants.job_of_key(_key(headers))


def tenant_reader(tenants: Tenants) -> Callable[[Request], Awaitable[TenantId]]:
    """A dependency that returns the caller's tenant or refuses; async, so it needs no thread."""

    async def tenant_of(request: Request) -> TenantId:
        tenant = find_tenant(tenants, request.headers)
        if tenant is None:
            raise UnauthorizedError(
                "key: none, or not known here; send X-API-Key or Authorization: Bearer with the "
                "key "
                "that `slackwater up` printed"
            )
        return tenant

    return tenant_of
