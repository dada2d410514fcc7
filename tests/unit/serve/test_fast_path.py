"""Ordinary requests skip FastAPI and are answered alike; unusual ones take the regular way."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from harness.service_plane import with_plane
from slackwater.model.errors import NotFoundError
from slackwater.model.ids import TenantId
from slackwater.runtime.plane import ControlPlane
from slackwater.serve.http.auth import Caller
from slackwater.serve.http.fast_path import FastPathMiddleware
from slackwater.serve.http.large_bodies import LARGE_JSON_BYTES
from slackwater.serve.http.limits import BodyLimits

_REGULAR = 418  # what the regular way answers here


class Body(BaseModel):
    number: int
    text: str = ""


def _router() -> APIRouter:
    router = APIRouter(prefix="/things")

    @router.post("", status_code=201)
    async def add(body: Body, tenant: Caller, request: Request) -> dict[str, Any]:
        if body.number < 0:
            raise NotFoundError(f"number: {body.number} is not one of yours")
        if body.number == 0:
            raise ZeroDivisionError
        return {"number": body.number, "tenant": tenant, "path": request.url.path}

    @router.post("/raw")
    async def raw(tenant: Caller, request: Request) -> dict[str, str]:
        raise AssertionError("it reads its body itself")

    @router.post("/open")
    async def without_key(body: Body) -> dict[str, str]:
        raise AssertionError("it does not ask for a key")

    async def refuse() -> TenantId:
        raise NotFoundError("nobody may")

    @router.post("/guarded", dependencies=[Depends(refuse)])
    async def guarded(body: Body, tenant: Caller) -> dict[str, str]:
        raise AssertionError("it checks something first")

    @router.post("/operators")
    async def operators(body: Body, tenant: Annotated[TenantId, Depends(refuse)]) -> dict[str, str]:
        raise AssertionError("not every caller may")

    @router.get("/{name}")
    async def show(name: str, tenant: Caller, wait_s: float = 0.0) -> dict[str, str]:
        raise AssertionError("it has a query")

    @router.delete("/{name}")
    async def drop(name: str, tenant: Caller) -> dict[str, str]:
        return {"dropped": name}

    return router


def _ask(method: str, path: str, **options: Any) -> httpx.Response:
    async def regular(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(status_code=_REGULAR)(scope, receive, send)

    def tenant_of(headers: Any) -> TenantId | None:
        return TenantId(headers["x-api-key"]) if "x-api-key" in headers else None

    app = BodyLimits(
        FastPathMiddleware(regular, _router().routes),
        max_bytes=1 << 20,
        stall_s=5.0,
        tenant_of=tenant_of,
    )

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **{"headers": {"x-api-key": "me"}, **options})

    return asyncio.run(ask())


def test_an_ordinary_request_is_answered_without_fastapi() -> None:
    got = _ask("POST", "/things", json={"number": 3})
    assert got.status_code == 201
    assert got.json() == {"number": 3, "tenant": "me", "path": "/things"}
    assert _ask("DELETE", "/things/this").json() == {"dropped": "this"}


@pytest.mark.parametrize(
    ("method", "path", "options"),
    [
        ("POST", "/things", {"json": {"number": "no"}}),
        ("POST", "/things", {"content": b"{", "headers": {"x-api-key": "me"}}),
        ("POST", "/things", {"json": {"number": 1, "text": "x" * LARGE_JSON_BYTES}}),
        ("POST", "/things", {"json": {"number": 1}, "headers": {}}),
        ("POST", "/things/raw", {"json": {"number": 1}}),
        ("POST", "/things/open", {"json": {"number": 1}}),
        ("POST", "/things/guarded", {"json": {"number": 1}}),
        ("POST", "/things/operators", {"json": {"number": 1}}),
        ("PUT", "/things", {"json": {"number": 1}}),
        ("GET", "/things/this", {}),
        ("DELETE", "/things/this/part", {}),
        ("DELETE", "/things/", {}),
    ],
)
def test_an_unusual_request_takes_the_regular_way(
    method: str, path: str, options: dict[str, Any]
) -> None:
    assert _ask(method, path, **options).status_code == _REGULAR


def test_errors_are_answered_as_by_the_regular_way() -> None:
    got = _ask("POST", "/things", json={"number": -1})
    assert (got.status_code, got.json()["error"]) == (404, "number: -1 is not one of yours")
    got = _ask("POST", "/things", json={"number": 0})
    assert (got.status_code, got.json()["error"]) == (500, "internal error: ZeroDivisionError")


def test_both_ways_give_the_same_answers(tmp_path: Path) -> None:
    async def scenario(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        opened = await client.post("create_session", json={"sdk_version": "0", "tags": []})
        session = opened.json()["session_id"]
        asked: list[tuple[str, bytes]] = [
            ("session_heartbeat", f'{{"session_id": "{session}"}}'.encode()),
            ("session_heartbeat", b'{"session_id": "none"}'),
            ("session_heartbeat", b'{"session_id": 3}'),
            ("client/config", b'{"sdk_version": "0"}'),
            ("asample", b'{"prompt": {"chunks": []}, "sampling_params": {}}'),
            ("/v1/completions", b'{"model": "none", "prompt": "a"}'),
        ]
        for path, body in asked:
            kinds = ("application/json", "application/json; charset=utf-8")  # the second is unusual
            one, other = [
                await client.post(
                    path if path[0] != "/" else f"http://test{path}",
                    content=body,
                    headers={"content-type": kind},
                )
                for kind in kinds
            ]
            assert (one.status_code, one.json()) == (other.status_code, other.json()), path

    with_plane(tmp_path, scenario)
