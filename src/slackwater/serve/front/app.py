"""A front end's HTTP application: it serves the frequent routes itself and forwards the rest."""

import json
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slackwater.serve.front.gateway import Gateway
from slackwater.serve.http.application import App
from slackwater.serve.http.auth import find_tenant
from slackwater.serve.http.errors import add_error_handlers
from slackwater.serve.http.fast_path import FastPathMiddleware
from slackwater.serve.http.host_check import HostCheck
from slackwater.serve.http.limits import BODY_STALL_S, BodyLimits, max_json_bytes
from slackwater.serve.openai.api import OpenAiHandlers, openai_routes
from slackwater.serve.openai.extras import token_routes
from slackwater.serve.tinker.pass_reader import MAX_JSON_PASS_BYTES, PASS_PATHS
from slackwater.serve.tinker.samples import sample_routes

_DOCUMENT = "/openapi.json"


def create_front_app(gateway: Gateway, plane: ASGIApp, folder: Path) -> FastAPI:
    """`plane` gets all other requests; their large bodies are in files of `folder`."""
    app = App()
    app.state.plane = gateway
    add_error_handlers(app)
    handlers = OpenAiHandlers(gateway)
    routers = (sample_routes(gateway), openai_routes(handlers), token_routes(handlers))
    for router in routers:
        app.include_router(router)
    routes = [route for router in routers for route in router.routes]
    own = frozenset(route.path for route in routes if hasattr(route, "path"))
    fast = FastPathMiddleware(app.behind, routes)

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in own:
            await fast(scope, receive, send)
        elif scope["path"] == _DOCUMENT:
            await plane(scope, receive, _OpenApiMerger(send, app))
        else:
            await plane(scope, receive, send)

    longest = max((base.max_text_chars for base in gateway.bases), default=0)
    setup = gateway.setup
    limited = BodyLimits(
        choose,
        max_bytes=setup.max_body_bytes,
        max_json_bytes=max_json_bytes(longest, setup.max_body_bytes),
        json_limits=dict.fromkeys(PASS_PATHS, MAX_JSON_PASS_BYTES),
        stall_s=BODY_STALL_S,
        tenant_of=lambda headers: find_tenant(gateway.tenants, headers),
        shares=gateway.loop_shares,
        folder=folder,
    )
    app.front = HostCheck(limited, bound=setup.host, allowed=setup.allowed_hosts)
    return app


class _OpenApiMerger:
    """Adds this application's routes to the OpenAPI document that the control plane sends."""

    def __init__(self, send: Send, app: FastAPI) -> None:
        self._send, self._app = send, app
        self._pieces: list[bytes] = []
        self._start: Message = {}

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._pieces.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        body = b"".join(self._pieces)
        if self._start["status"] == 200:
            body = json.dumps(_merge_documents(json.loads(body), self._app.openapi())).encode()
        headers = [each for each in self._start["headers"] if each[0] != b"content-length"]
        headers = [*headers, (b"content-length", str(len(body)).encode())]
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _merge_documents(document: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    paths = {**document["paths"], **own["paths"]}
    schemas = {
        **document.get("components", {}).get("schemas", {}),
        **own.get("components", {}).get("schemas", {}),
    }
    return {**document, "paths": paths, "components": {"schemas": schemas}}
