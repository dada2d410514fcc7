"""Maps exceptions to responses: one line with field, value and fix; bad input is never a 500.

Permanent errors never get 409, which the Tinker SDK retries. Every error has a Content-Length:
without it the SDK blames a proxy for a 400.
"""

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Scope, Send

from slackwater.model.errors import (
    ConfigError,
    NotFoundError,
    RefusedError,
    SlackwaterError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request cannot be done here."},
    401: {"description": "No key, or a key that is not known."},
    404: {"description": "No such thing, or not yours."},
    408: {"description": "Not finished yet, or the body came too slowly."},
    410: {"description": "The session has ended, or the result has expired."},
    413: {"description": "The body is too large."},
    422: {"description": "A field is wrong."},
    503: {"description": "The service could not generate; try again."},
    429: {"description": "Too much is under way; try again."},
}

_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


_TYPES = ("body", "int", "float", "str", "bool")


class UnauthorizedError(SlackwaterError):
    """The key is missing or unknown."""


class ForbiddenError(SlackwaterError):
    """The caller is known, but may not send this request (a cross-site call)."""


class FailedTurnError(UnavailableError):
    """The service could not generate; the same call may work later."""


class GoneError(SlackwaterError):
    """The resource existed and is gone (HTTP 410)."""


class PlaneRefusedError(SlackwaterError):
    """The control plane refused a front end's request with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


_STATUS = {
    ConfigError: 422,
    RefusedError: 400,
    NotFoundError: 404,
    UnauthorizedError: 401,
    ForbiddenError: 403,
    GoneError: 410,
    FailedTurnError: 503,  # before UnavailableError, its base
    UnavailableError: 429,
}


def status_of(error: SlackwaterError) -> int:
    if isinstance(error, PlaneRefusedError):
        return error.status
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 400)


def error_body(path: str, status: int, message: str) -> dict[str, Any]:
    """The error in the format of the called API."""
    if path.startswith("/v1/"):
        kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return {"detail": message, "error": message}


def _json_error(request: Request, status: int, message: str) -> JSONResponse:
    if status == 422 and request.url.path.startswith("/v1/"):
        status = 400  # as OpenAI's own service, whose clients expect it
    headers = {"retry-after": "1"} if status == 429 else {}
    return JSONResponse(error_body(request.url.path, status, message), status, headers)


def error_response(request: Request, error: Exception) -> Response:
    """The response to a route's exception; unexpected ones are logged."""
    if isinstance(error, SlackwaterError):
        return _json_error(request, status_of(error), str(error))
    logger.error("request failed path=%s", request.url.path, exc_info=error)
    return _json_error(request, 500, f"internal error: {type(error).__name__}")


async def send_refusal(scope: Scope, send: Send, status: int, message: str) -> None:
    """Answer from ASGI middleware and close the connection without reading the body."""
    if status == 422 and scope["path"].startswith("/v1/"):
        status = 400
    body = json.dumps(error_body(scope["path"], status, message)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def validation_message(error: RequestValidationError) -> str:
    """The first few wrong fields on one line."""
    problems: dict[str, str] = {}
    for found in error.errors()[:3]:
        place = ".".join(str(part) for part in found["loc"] if _is_field(part)) or "body"
        fix = found["msg"].replace("Input should", "must").replace("should match", "must match")
        value = found.get("input")
        if place in problems:  # another type of value that the field takes
            problems[place] += f", or {fix}"
        elif found["type"] == "missing" or not isinstance(value, (str, int, float)):
            problems[place] = f"{place}: {fix}"
        else:
            problems[place] = str(ConfigError.of(place, value, fix))
    return "; ".join(problems.values())


def _is_field(part: str | int) -> bool:
    """Not the body itself, and not a type that pydantic tried, such as `list[constrained-int]`."""
    return isinstance(part, int) or (part.isidentifier() and part not in _TYPES)


async def _ignore_body(request: Request, body: Any, reason: str) -> None:
    """Default for applications without training operations."""


def add_error_handlers(
    app: FastAPI, on_invalid_body: Callable[[Request, Any, str], Awaitable[None]] = _ignore_body
) -> None:
    """Install the handlers; `on_invalid_body` sees bodies that fail validation, which may use up an
    operation's number.
    """

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(request, error)

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message = validation_message(error)
        await on_invalid_body(request, error.body, message)
        return _json_error(request, 422, message)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"no such path: {request.method} {request.url.path}"
        response = _json_error(request, error.status_code, message)
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(SlackwaterError, on_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_error)
