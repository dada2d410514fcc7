"""Base of the HTTP applications of the control plane and its front ends."""

from importlib.metadata import version

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from slackwater.serve.http.errors import ERROR_RESPONSES


class App(FastAPI):
    """Calls `front` (middleware) first, because not every request reaches FastAPI."""

    front: ASGIApp

    def __init__(self) -> None:
        super().__init__(
            title="Slackwater",
            version=version("slackwater"),
            responses=ERROR_RESPONSES,
            docs_url=None,
            redoc_url=None,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)

    async def behind(self, scope: Scope, receive: Receive, send: Send) -> None:
        """FastAPI's own routes."""
        await super().__call__(scope, receive, send)
