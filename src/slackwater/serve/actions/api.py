"""Routes of actions, environments and limits."""

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response, StreamingResponse

from slackwater.model.action import Limit
from slackwater.model.errors import NotFoundError, RefusedError
from slackwater.model.ids import ActionId, EnvironmentId, ResourceName, TenantId, resolve_id
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.store.action_log import ActionResult
from slackwater.serve.actions.bodies import (
    ActionBody,
    DoneBody,
    EnvironmentBody,
    LimitBody,
    SnapshotBody,
)
from slackwater.serve.http.auth import Caller, require_operator
from slackwater.serve.http.large_bodies import LargeBodyRoute

PATH = "/slackwater/actions"
ENVIRONMENTS = "/slackwater/environments"
Hold = Annotated[float, Query(ge=0, le=30)]
PENDING: dict[int | str, dict[str, Any]] = {202: {"description": "Not yet."}}


def check_sandboxes(plane: ControlPlane) -> None:
    """Refuse if the service has no sandboxes."""
    if not plane.brokers_actions:
        raise RefusedError("this service has no sandboxes: start it with --sandboxes 1")


def _check_service(plane: ControlPlane, name: str | None) -> None:
    rewards = plane.settings.rewards
    known = [] if rewards is None else sorted(rewards.services)
    if name is not None and name not in known:
        fix = f"must be one of {known}" if known else "this service has none; see [rewards]"
        raise NotFoundError(f"service: {name!r} is not a reward service; {fix}")


def resolve_action_id(tenant: TenantId, name: str) -> ActionId:
    """The action's id, from the name that the caller or the service gave it."""
    return ActionId(resolve_id(tenant, name))


def render_result(name: str, result: ActionResult) -> dict[str, Any]:
    """A result as JSON; output that is not UTF-8 gets replacement characters."""
    return {
        "action": name,
        "state": "ended",
        "outcome": result.kind,
        "reason": result.reason,
        "end": result.end,
        "status": result.status,
        "stdout": result.stdout.decode(errors="replace"),
        "stderr": result.stderr.decode(errors="replace"),
        "node": result.node,
        "usage": {
            "queued_s": result.queued_s,
            "launch_s": result.launch_s,
            "ran_s": result.ran_s,
            "cpu_s": result.cpu_s,
            "max_rss_bytes": result.max_rss_bytes,
            "cores": len(result.cores),
        },
    }


async def _answer(plane: ControlPlane, tenant: TenantId, name: ActionId, wait_s: float) -> Response:
    result = await plane.actions.result(tenant, name, wait_s)
    if result is None:
        return JSONResponse({"action": name, "state": plane.actions.state(name)}, 202)
    return Response(msgspec.json.encode(render_result(name, result)), media_type="application/json")


def action_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, prefix=PATH, tags=["actions"])
    actions = plane.actions

    @router.post("", response_model=None, responses=PENDING)
    async def submit(body: ActionBody, tenant: Caller) -> Response:
        """Submit an action: 200 with its outcome, or 202 with its name once `wait_s` has passed.

        With several tenants the answer is delayed for one with a long queue, which slows a flood
        of requests down.
        """
        if body.command:
            check_sandboxes(plane)
        _check_service(plane, body.service)
        environment_mib = actions.memory_of(tenant, body.environment)
        request = body.to_request(tenant, actions.limits_of(tenant), environment_mib)
        name = await actions.submit(tenant, request)
        return await _answer(plane, tenant, name, max(body.wait_s, actions.pause_s(tenant)))

    @router.get("")
    async def top(tenant: Caller) -> dict[str, Any]:
        """Running, waiting and recent actions of all tenants; only the operator sees commands."""
        found = actions.top()
        if not plane.is_operator(tenant):
            found["live"] = found["ended"] = []
        return found

    @router.get("/{action}", response_model=None, responses=PENDING)
    async def result(action: str, tenant: Caller, wait_s: Hold = 0.0) -> Response:
        """The outcome, or the state after `wait_s`."""
        return await _answer(plane, tenant, resolve_action_id(tenant, action), wait_s)

    @router.get("/{action}/output", response_model=None)
    async def output(action: str, tenant: Caller) -> Response:
        """Output of a `stream` action as JSON lines; the last line holds its outcome."""
        name = resolve_action_id(tenant, action)
        await actions.result(tenant, name, 0.0)  # 404 if it belongs to another tenant

        async def lines() -> AsyncIterator[bytes]:
            async for stream, data in actions.output(tenant, name):
                piece = {"stream": stream, "data": data.decode(errors="replace")}
                yield json.dumps(piece).encode() + b"\n"
            ended = await actions.result(tenant, name, 0.0)
            if ended is not None:
                last = render_result(name, ended) | {"stdout": "", "stderr": ""}
                yield json.dumps(last).encode() + b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    @router.post("/{action}/cancel")
    async def cancel(action: str, tenant: Caller) -> dict[str, str]:
        """Cancel an action; a running one is killed with every process that it started."""
        actions.cancel(tenant, resolve_action_id(tenant, action))
        return {"action": action}

    return router


def permit_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, prefix=PATH, tags=["actions"])
    actions = plane.actions

    @router.post("/{action}/held", name="held", response_model=None, responses=PENDING)
    async def wait_for_permit(action: str, tenant: Caller, wait_s: Hold = 25.0) -> Response:
        """Wait until a permit is held."""
        is_held = await actions.wait_until_started(
            tenant, resolve_action_id(tenant, action), wait_s
        )
        return JSONResponse({"action": action, "held": is_held}, 200 if is_held else 202)

    @router.post("/{action}/done", name="done")
    async def return_permit(action: str, body: DoneBody, tenant: Caller) -> dict[str, str]:
        """Return a permit."""
        actions.finish_permit(tenant, resolve_action_id(tenant, action), body.ran_s)
        return {"action": action}

    return router


def environment_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, prefix=ENVIRONMENTS, tags=["actions"])
    actions = plane.actions

    @router.post("", name="opened", response_model=None, status_code=201, responses=PENDING)
    async def open_environment(body: EnvironmentBody, tenant: Caller) -> Response:
        """Open an environment: 201 when it is open, 202 while it waits for memory.

        With several tenants the answer is delayed for one that has many waiting environments.
        """
        check_sandboxes(plane)
        name = await actions.open(tenant, body.to_request(tenant, actions.limits_of(tenant)))
        hold_s = max(body.wait_s, actions.pause_s(tenant))
        is_open = await actions.wait_until_open(tenant, name, hold_s)
        return JSONResponse({"environment": name, "open": is_open}, 201 if is_open else 202)

    @router.get("", name="listed")
    async def list_environments(tenant: Caller) -> dict[str, list[EnvironmentId]]:
        return {"environments": actions.environments(tenant)}

    @router.post("/{environment}/snapshot", status_code=201)
    async def snapshot(environment: str, body: SnapshotBody, tenant: Caller) -> dict[str, str]:
        """Snapshot it; other environments can start from the snapshot in milliseconds."""
        await actions.snapshot(tenant, EnvironmentId(environment), body.snapshot)
        return {"snapshot": body.snapshot}

    @router.delete("/{environment}", response_model=None)
    async def close(environment: str, tenant: Caller) -> Response:
        """Close an environment; actions in it are cancelled."""
        await actions.close_environment(tenant, EnvironmentId(environment))
        return JSONResponse({"environment": environment})

    return router


def limit_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, prefix="/slackwater/limits", tags=["actions"])

    @router.put("/{resource}")
    async def declare(resource: str, body: LimitBody, tenant: Caller) -> dict[str, str]:
        """Declare the capacity of an external resource, such as an API, that all jobs share."""
        require_operator(plane, tenant, "limits")
        name = ResourceName(resource)
        await plane.actions.declare(Limit(name, body.concurrency, body.quota, body.window_s))
        return {"resource": resource}

    return router
