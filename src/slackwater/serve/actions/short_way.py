"""The short way of an action's request: what is asked for every tool call does not go through the whole of FastAPI.

It does what the route of `api.py` does, with the same body and the same answers; whatever is unusual (a body that is large or wrong, a caller
without a key) takes the usual way.
"""

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from slackwater.model.errors import SlackwaterError
from slackwater.runtime.plane import ControlPlane
from slackwater.serve.actions.api import PATH, submitted
from slackwater.serve.actions.bodies import ActionBody
from slackwater.serve.http.errors import answer, status_of
from slackwater.serve.http.large_bodies import BODY, LARGE_JSON_BYTES, TENANT

_JSON = (b"content-type", b"application/json")


class ShortWay:
    """ASGI middleware inside of `BodyLimits`, which has read the body and found its tenant."""

    def __init__(self, app: ASGIApp, *, plane: ControlPlane) -> None:
        self._app = app
        self._plane = plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._body(scope)
        if body is None:
            await self._app(scope, receive, send)
            return
        scope[BODY].take()
        response: Response
        try:
            response = await submitted(self._plane, body, scope[TENANT])
        except SlackwaterError as error:
            response = answer(Request(scope), status_of(error), str(error))
        await response(scope, receive, send)

    def _body(self, scope: Scope) -> ActionBody | None:
        """What is asked, if it can go the short way."""
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "POST":
            return None
        if scope.get(TENANT) is None or BODY not in scope or _JSON not in scope["headers"]:
            return None
        raw = scope[BODY].shown()
        if len(raw) > LARGE_JSON_BYTES:
            return None
        try:
            return ActionBody.model_validate_json(raw)
        except ValidationError:
            return None
