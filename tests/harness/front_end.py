"""A front end in this process, over a real channel to a control plane in this process."""

import contextlib
import socket
import tempfile
from asyncio import get_running_loop
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from slackwater.runtime.plane import ControlPlane
from slackwater.serve.app import create_app
from slackwater.serve.front.app import create_front_app
from slackwater.serve.front.channel import FrontChannel
from slackwater.serve.front.gateway import Gateway
from slackwater.serve.http.body_file import HEADER
from slackwater.serve.http.large_bodies import BODY


@contextlib.asynccontextmanager
async def front_end(plane: ControlPlane) -> AsyncIterator[FastAPI]:
    """The application that clients see."""
    channel, gateway = FrontChannel(plane), Gateway()
    channel.open()
    ours, theirs = socket.socketpair()
    loop = get_running_loop()
    await loop.create_connection(channel.connect, sock=ours)
    await loop.create_connection(lambda: gateway.connection, sock=theirs)
    await gateway.ready
    try:
        behind = create_app(plane)

        async def passed_on(scope: Scope, receive: Receive, send: Send) -> None:
            if (file := scope[BODY].file) is not None:
                scope = {**scope, "headers": [*scope["headers"], (HEADER, bytes(file))]}
            await behind(scope, receive, send)

        with tempfile.TemporaryDirectory(prefix="slackwater-front-") as folder:
            app = create_front_app(gateway, passed_on, Path(folder))
            app.state.dashboard = behind.state.dashboard
            yield app
    finally:
        gateway.close()
        channel.close()
