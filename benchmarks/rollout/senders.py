"""Sending processes of `bench fanin`, and the client of their streams."""

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from benchmarks.rollout.paced_engines import SECRET_VARIABLE

SOURCE = "benchmarks.rollout.fanin_source"


@contextlib.asynccontextmanager
async def sender(
    module: str, *arguments: object, secret: str = ""
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A module in a process of its own, which is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *map(str, arguments)),
        env=os.environ | {SECRET_VARIABLE: secret},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def stream_server(kind: str, *arguments: object) -> AsyncIterator[str]:
    """The URL of a server of streams."""
    async with contextlib.AsyncExitStack() as stack:
        listens = b""
        while not listens:  # the port may be taken
            port = 20_000 + secrets.randbelow(12_000)
            started = sender(SOURCE, kind, port, *arguments)
            source = await stack.enter_async_context(started)
            assert source.stdout is not None
            listens = await source.stdout.readline()
        yield f"http://127.0.0.1:{port}/v1/completions"


class StreamedTurn:
    """The tokens of one streamed turn, as they come."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []

    async def read(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
        """One request, until its stream ends."""
        async with session.post(url, json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    self.tokens += choice["token_ids"]
                    self.logprobs += choice["logprobs"]["token_logprobs"]
