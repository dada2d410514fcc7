"""SandboxFusion's `run_code`: run code with its files in a sandbox.

Recipes such as tinker-cookbook's `code_rl` use it with
SANDBOX_URL=http://slackwater:KEY@HOST:PORT/slackwater/run_code
"""

import base64
import binascii
import contextlib
import secrets
from typing import Any

from fastapi import APIRouter

from slackwater.model.errors import ConfigError, NotFoundError
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.store.action_log import ActionResult
from slackwater.serve.actions.api import check_sandboxes
from slackwater.serve.actions.bodies import ActionBody, EnvironmentBody
from slackwater.serve.actions.code_body import RunCodeBody
from slackwater.serve.http.auth import Caller
from slackwater.serve.http.large_bodies import LargeBodyRoute

_COMMANDS = {"python": ("main.py", "python3"), "bash": ("main.sh", "bash")}
_MAX_WAIT_S = 600.0
_HOLD_S = 30.0
_DEFAULT_MIB = 2048


def _environment_body(body: RunCodeBody, max_mib: int) -> EnvironmentBody:
    """An environment with the files and the code; all of them must be UTF-8."""
    files = {}
    for name, text in body.files.items():
        try:
            files[name] = base64.b64decode(text or "", validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise ConfigError.of("files", name, "must be base64 of UTF-8 text") from None
    files[_COMMANDS[body.language][0]] = body.code
    memory_mib = min(_DEFAULT_MIB, max_mib) if body.memory_limit_MB < 1 else body.memory_limit_MB
    name = f"code-{secrets.token_hex(12)}"
    return EnvironmentBody(environment=name, files=files, memory_mib=memory_mib)


def _action_body(body: RunCodeBody, environment: str) -> ActionBody:
    file, program = _COMMANDS[body.language]
    return ActionBody(
        command=[program, file],
        environment=environment,
        kind="run_code",
        limit_s=body.run_timeout,
        stdin=body.stdin or "",
    )


def sandbox_fusion_result(result: ActionResult) -> dict[str, Any]:
    """A result in SandboxFusion's format; `Success` means exit status 0."""
    ran = result.kind in ("done", "timed_out", "failed")
    status = "Success" if result.kind == "done" and result.status == 0 else "Failed"
    finished = "Finished" if result.kind == "done" else "Error"
    if result.kind == "timed_out":
        finished = "TimeLimitExceeded"
    return {
        "status": status if ran else "SandboxError",
        "message": result.reason,
        "compile_result": None,
        "run_result": {
            "status": finished,
            "execution_time": result.ran_s,
            "return_code": result.status,
            "stdout": result.stdout.decode(errors="replace"),
            "stderr": result.stderr.decode(errors="replace"),
        },
        "executor_pod_name": result.node,
        "files": {},
    }


def run_code_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, prefix="/slackwater", tags=["actions"])
    actions = plane.actions

    @router.post("/run_code")
    async def run_code(body: RunCodeBody, tenant: Caller) -> dict[str, Any]:
        """Run a program with its files in an environment of its own."""
        check_sandboxes(plane)
        limits = actions.limits_of(tenant)
        environment = _environment_body(body, limits.memory_mib).to_request(tenant, limits)
        memory_mib = environment.spec.memory_mib
        action_body = _action_body(body, environment.spec.environment)
        request = action_body.to_request(tenant, limits, memory_mib)
        environment_id = await actions.open(tenant, environment)
        try:
            action = await actions.submit(tenant, request)
            for _ in range(int((_MAX_WAIT_S + body.run_timeout) / _HOLD_S) + 1):
                result = await actions.result(tenant, action, _HOLD_S)
                if result is not None:
                    return sandbox_fusion_result(result)
            actions.cancel(tenant, action)
            return {"status": "SandboxError", "message": "no core came free in time"}
        finally:
            with contextlib.suppress(NotFoundError):  # its worker was lost
                await actions.close_environment(tenant, environment_id)

    return router
