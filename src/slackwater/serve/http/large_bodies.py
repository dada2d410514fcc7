"""Routes that send large JSON bodies to helper processes and parse small ones in place."""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from slackwater.model.ids import TenantId
from slackwater.serve.http.body_reader import InvalidBody, read_body

if TYPE_CHECKING:
    from slackwater.runtime.plane import ControlPlane

LARGE_JSON_BYTES = 16 << 10
BODY = "slackwater.body"  # scope key of the body, which the middleware has read
TENANT = "slackwater.tenant"


class LargeBodyRoute(APIRoute):
    """Passes FastAPI a validated body; uses the helpers and threads of `app.state.plane`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        usual = super().get_route_handler()
        kind = getattr(getattr(self.body_field, "field_info", None), "annotation", None)
        kind = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None

        async def handle(request: Request) -> Response:
            body = request.scope.get(BODY)
            if body is not None:
                # Else Starlette would join the pieces again, which is slow for large bodies.
                request._body = body.take()
                if kind is not None and len(request._body) > LARGE_JSON_BYTES:
                    request._json = await _read(request, kind, request._body)
            return await usual(request)

        return handle


async def _read(request: Request, kind: type[BaseModel], body: bytes) -> BaseModel:
    plane: ControlPlane = request.app.state.plane
    tenant: TenantId = request.scope[TENANT]
    found: BaseModel | InvalidBody
    found = await plane.fair_work.run(tenant, plane.helpers.run, read_body, kind, body)
    if isinstance(found, InvalidBody):
        raise RequestValidationError(found.errors, body=found.named)
    return found
