"""Fast path for submitting actions and for opening and closing environments, without FastAPI.

Same bodies and answers as the routes of `api.py`; anything unusual (a large or invalid body, a
caller without a key) takes the regular route.
"""

from collections.abc import Coroutine
from typing import Any, TypeAlias

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from slackwater.model.errors import SlackwaterError
from slackwater.model.ids import TenantId
from slackwater.runtime.plane import ControlPlane
from slackwater.serve.actions.api import (
    ENVIRONMENTS,
    PATH,
    environment_closed,
    environment_opened,
    submitted,
)
from slackwater.serve.actions.bodies import ActionBody, EnvironmentBody
from slackwater.serve.http.errors import answer, status_of
from slackwater.serve.http.large_bodies import BODY, LARGE_JSON_BYTES, TENANT

_JSON = (b"content-type", b"application/json")
Work: TypeAlias = Coroutine[Any, Any, Response]


class FastPathMiddleware:
    """ASGI middleware inside of `BodyLimits`, which has read the body and found its tenant."""

    def __init__(self, app: ASGIApp, *, plane: ControlPlane) -> None:
        self._app = app
        self._plane = plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._work(scope)
        if work is None:
            await self._app(scope, receive, send)
            return
        scope[BODY].take()
        response: Response
        try:
            response = await work
        except SlackwaterError as error:
            response = answer(Request(scope), status_of(error), str(error))
        await response(scope, receive, send)

    def _work(self, scope: Scope) -> Work | None:
        """The handler, if the request qualifies for the fast path."""
        if scope["type"] != "http" or scope.get(TENANT) is None or BODY not in scope:
            return None
        path, tenant = scope["path"], scope[TENANT]
        match scope["method"]:
            case "POST" if path in (PATH, ENVIRONMENTS) and _JSON in scope["headers"]:
                return self._posted(path, scope[BODY].shown(), tenant)
            case "DELETE" if path.startswith(f"{ENVIRONMENTS}/"):
                name = path.removeprefix(f"{ENVIRONMENTS}/")
                return None if "/" in name else environment_closed(self._plane, name, tenant)
        return None

    def _posted(self, path: str, raw: bytes, tenant: TenantId) -> Work | None:
        if len(raw) > LARGE_JSON_BYTES:
            return None
        try:
            if path == PATH:
                return submitted(self._plane, ActionBody.model_validate_json(raw), tenant)
            body = EnvironmentBody.model_validate_json(raw)
            return environment_opened(self._plane, body, tenant)
        except ValidationError:
            return None
