"""A front end in this process, over a real channel to a control plane in this process."""

import contextlib
import socket
from asyncio import get_running_loop
from collections.abc import AsyncIterator

from fastapi import FastAPI

from slackwater.runtime.plane import ControlPlane
from slackwater.serve.app import create_app
from slackwater.serve.front.app import create_front_app
from slackwater.serve.front.channel import FrontChannel
from slackwater.serve.front.gateway import Gateway


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
        app = create_front_app(gateway, behind)
        app.state.dashboard = behind.state.dashboard
        yield app
    finally:
        gateway.close()
        channel.close()
