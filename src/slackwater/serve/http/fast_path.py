"""Calls a route directly if the request is ordinary: a known key, a small valid JSON body.

FastAPI's routing and dependencies take longer than most routes. Every other request (a large or
invalid body, no key) goes through FastAPI, so that errors are produced in one place.
"""

import inspect
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from slackwater.serve.http.auth import Caller
from slackwater.serve.http.errors import error_response
from slackwater.serve.http.large_bodies import BODY, LARGE_JSON_BYTES, TENANT

_JSON = (b"content-type", b"application/json")


@dataclass(frozen=True, slots=True)
class _FastRoute:
    """`last` is the name of the path's last part, if that is a parameter."""

    endpoint: Any
    parameters: frozenset[str]
    status: int
    body: type[BaseModel] | None
    last: str | None

    def arguments(self, scope: Scope, receive: Receive) -> dict[str, Any] | None:
        """The endpoint's arguments; None if FastAPI must handle the request."""
        found: dict[str, Any] = {}
        if self.body is not None:
            raw = scope[BODY].peek()
            if len(raw) > LARGE_JSON_BYTES or _JSON not in scope["headers"]:
                return None
            try:
                found["body"] = self.body.model_validate(json.loads(raw))
            except (ValidationError, ValueError, RecursionError):
                return None
        if "tenant" in self.parameters:
            found["tenant"] = scope[TENANT]
        if "request" in self.parameters:
            found["request"] = Request(scope, receive)
        if self.last is not None:
            found[self.last] = scope["path"].rpartition("/")[2]
        return found


class FastPathMiddleware:
    """ASGI middleware behind `BodyLimits`, which has read the body and found the tenant."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._routes: dict[tuple[str, str], _FastRoute] = {}
        for route in routes:
            if isinstance(route, APIRoute) and (fast := _to_fast_route(route)) is not None:
                path = route.path if fast.last is None else _wildcard_path(route.path)
                for method in route.methods or ():
                    self._routes.setdefault((method, path), fast)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._find(scope)
        arguments = None if route is None else route.arguments(scope, receive)
        if route is None or arguments is None:
            await self._app(scope, receive, send)
            return
        scope[BODY].take()
        try:
            answer = await route.endpoint(**arguments)
            if not isinstance(answer, Response):
                answer = JSONResponse(answer, route.status)
        except Exception as error:  # noqa: BLE001  (every error of a route is answered)
            answer = error_response(Request(scope), error)
        await answer(scope, receive, send)

    def _find(self, scope: Scope) -> _FastRoute | None:
        if scope.get(TENANT) is None:
            return None
        method, path = scope["method"], scope["path"]
        last = path if path.endswith("/") else _wildcard_path(path)
        return self._routes.get((method, path)) or self._routes.get((method, last))


def _wildcard_path(path: str) -> str:
    return path.rpartition("/")[0] + "/{}"


def _to_fast_route(route: APIRoute) -> _FastRoute | None:
    """None for a route with dependencies, or with parameters other than a body, a caller and the
    last part of the path.
    """
    if route.dependencies:
        return None
    parameters = inspect.signature(route.endpoint).parameters
    kind = parameters["body"].annotation if "body" in parameters else None
    parent, _, part = route.path.rpartition("/")
    last = part[1:-1] if part.startswith("{") else None
    known = {"body", "tenant", "request", last}
    is_plain = kind is None or (isinstance(kind, type) and issubclass(kind, BaseModel))
    if "{" in parent or ":" in part or not known.issuperset(parameters) or not is_plain:
        return None
    if "tenant" not in parameters or parameters["tenant"].annotation != Caller:
        return None
    if kind is None and (last is None or "GET" in (route.methods or ())):
        return None
    return _FastRoute(route.endpoint, frozenset(parameters), route.status_code or 200, kind, last)
