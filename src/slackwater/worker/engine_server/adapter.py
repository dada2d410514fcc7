"""The adapter: a vLLM or SGLang server that is an ordinary engine instance to the control plane.

    python -m slackwater.worker.engine_server.adapter --connect HOST:PORT --worker NAME
        --files FILES --model DIR --base NAME --base-version VERSION --engine vllm|sglang
        (--url http://HOST:PORT | --program PROGRAM)

With `--url` it joins a running server; with `--program` it starts and stops its own: the `vllm`
program, or a Python that has SGLang.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path

import aiohttp

from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.instance import InstanceKind
from slackwater.sandbox.linux import die_with_parent
from slackwater.wire import messages
from slackwater.worker.connection import Connection, DisconnectedError
from slackwater.worker.engine_server.instance import ServerInstance
from slackwater.worker.engine_server.server import MAX_ADAPTERS, EngineServer
from slackwater.worker.engine_server.sglang import SglangServer
from slackwater.worker.engine_server.versions import VersionDirectories, require_own_head
from slackwater.worker.engine_server.vllm import VllmServer
from slackwater.worker.files import node_files
from slackwater.worker.process import dial, engine_parser, pin, run_worker, secret
from slackwater.worker.puller import weight_lane

_START_WITHIN_S = 600.0
_HEALTH_EVERY_S = 2.0
_SERVER_TYPES: dict[str, type[EngineServer]] = {"vllm": VllmServer, "sglang": SglangServer}


def free_port() -> int:
    """A port below the ephemeral range, from which a client could connect to itself."""
    return 20_000 + secrets.randbelow(12_000)


@contextlib.asynccontextmanager
async def run_server(
    command: list[str], variables: Mapping[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    # OMP_NUM_THREADS is meant for our own engines; the server chooses its threads itself.
    environment.pop("OMP_NUM_THREADS", None)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        env=environment,
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(20):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def wait_until_healthy(
    server: EngineServer, process: asyncio.subprocess.Process | None
) -> None:
    """Wait for the server to answer; raise if it ends or takes too long."""
    try:
        async with asyncio.timeout(_START_WITHIN_S):
            while not await server.is_healthy():
                if process is not None and process.returncode is not None:
                    raise UnavailableError(
                        f"the {server.title} server ended with {process.returncode}"
                    )
                await asyncio.sleep(0.5)
    except TimeoutError:
        reason = f"the {server.title} server did not answer in {_START_WITHIN_S:g} s"
        raise UnavailableError(reason) from None


class ConnectionReader:
    """Reads the connection in a thread and passes messages, or its end, to the loop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[messages.ToWorker | DisconnectedError] = asyncio.Queue()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                for message in self._connection.receive(None):
                    self._put(message)
        except (DisconnectedError, OSError, ValueError) as error:
            self._put(DisconnectedError(str(error)))

    def _put(self, received: messages.ToWorker | DisconnectedError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may have ended before this thread
            self._loop.call_soon_threadsafe(self.queue.put_nowait, received)


async def run_adapter(options: argparse.Namespace) -> None:
    """Run until stopped, or until either side is lost."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, timeout=timeout)
        )
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="slackwater-server-"))
        files = node_files(options.files, secret(), pin())
        model = files.model(options.model)
        lane = weight_lane(files.weights(), options)
        starts_server = options.program is not None
        versions = VersionDirectories(
            lane, model, options.base_version, Path(folder), in_memory=starts_server
        )
        base = versions.directory(options.base_version)
        server_type = _SERVER_TYPES[options.engine]
        process, url = None, options.url
        if options.program is not None:
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            command = server_type.command(options.program, base, port, Path(folder), options)
            process = await stack.enter_async_context(run_server(*command))
        server = server_type(session, url)
        await wait_until_healthy(server, process)
        await server.read_capabilities()
        if options.url is not None:
            if not server.reloads_tied_head:
                require_own_head(Path(server.root), model)
            # A running server may have any weights: load those that `Hello` reports.
            await server.load_weights(base, options.base_version)
        hello = messages.Hello(options.worker, "engine", await _facts(server, options))
        connection = stack.enter_context(dial(options.connect, hello))
        neutral_adapter = None
        if isinstance(server, VllmServer) and options.device == "cpu" and server.supports_adapters:
            # Hazard: on a CPU, vLLM 0.32 samples rows without an adapter from the one in its last
            # slot (index -1), without an error. With an adapter of zeros they have a slot.
            neutral_adapter = f"{connection.name}-none"
            await server.load_adapter(neutral_adapter, versions.write_neutral_adapter())
        instance = ServerInstance(
            connection, server, versions, options.base_version, neutral_adapter=neutral_adapter
        )
        connection.report_gauges(instance.gauges)
        await _serve(instance, ConnectionReader(connection), server)


async def _facts(server: EngineServer, options: argparse.Namespace) -> messages.EngineFacts:
    return messages.EngineFacts(
        base_model=options.base,
        max_running=options.max_running,
        max_context_tokens=server.max_context_tokens,
        kv_tokens=await server.cache_tokens() or server.max_context_tokens,
        max_versions=2,
        max_adapters=MAX_ADAPTERS if server.supports_adapters else 0,
        kind=options.kind,
        exact_continuation=False,
        node=options.node,
        sleeps=server.supports_sleep and options.kind == "local",
    )


async def _serve(instance: ServerInstance, inbox: ConnectionReader, server: EngineServer) -> None:
    """Forward messages until the control plane or the server is lost."""
    watch = asyncio.create_task(_watch(server, instance, inbox))
    try:
        while True:
            received = await inbox.queue.get()
            if isinstance(received, DisconnectedError):
                raise received
            if isinstance(received, messages.Stop):
                return
            instance.handle_message(received)
    finally:
        watch.cancel()


async def _watch(server: EngineServer, instance: ServerInstance, inbox: ConnectionReader) -> None:
    while True:
        await asyncio.sleep(_HEALTH_EVERY_S)
        if instance.broken or not await server.is_healthy():
            break
    reason = instance.broken or "does not answer"
    inbox.queue.put_nowait(DisconnectedError(f"the {server.title} server {reason}"))


def adapter_parser() -> argparse.ArgumentParser:
    parser = engine_parser("A vLLM or SGLang server as an instance.")
    parser.add_argument("--engine", required=True, choices=list(_SERVER_TYPES))
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--program", help="to start a server: `vllm`, or a Python with SGLang")
    parser.add_argument("--server-options", default="", help="more options of that server")
    parser.add_argument("--kind", default="dedicated", choices=[k.value for k in InstanceKind])
    parser.add_argument("--kv-mb", type=int, default=1024, help="KV memory of our own, on a CPU")
    return parser


def main() -> None:
    options = adapter_parser().parse_args()
    if (options.url is None) == (options.program is None):
        values = (options.url, options.program)
        raise ConfigError.of("--url, --program", values, "give exactly one")
    asyncio.run(run_adapter(options))


if __name__ == "__main__":
    run_worker(main)
