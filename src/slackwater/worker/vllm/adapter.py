"""The vLLM adapter: a vLLM server that is an ordinary engine instance to the control plane.

    python -m slackwater.worker.vllm.adapter --connect HOST:PORT --worker NAME --files FILES
        --model DIR --base NAME --base-version VERSION  (--url http://HOST:PORT | --vllm PROGRAM)

With `--url` it joins a running server (started with VLLM_SERVER_DEV_MODE=1); with `--vllm` it
starts and stops its own.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import tempfile
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import aiohttp

from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.instance import InstanceKind
from slackwater.sandbox.linux import die_with_parent
from slackwater.wire import messages
from slackwater.worker.connection import Connection, DisconnectedError
from slackwater.worker.files import node_files
from slackwater.worker.process import base_parser, dial, pin, run_worker, secret
from slackwater.worker.vllm.api import VllmApi
from slackwater.worker.vllm.instance import VllmInstance
from slackwater.worker.vllm.versions import VersionDirectories, require_own_head
from slackwater.worker.weight_lane import weight_lane

_STARTS_WITHIN_S = 600.0
_HEALTH_EVERY_S = 2.0


def free_port() -> int:
    """A port below the ephemeral range, from which a client could connect to itself."""
    return 20_000 + secrets.randbelow(12_000)


@contextlib.asynccontextmanager
async def serving(
    program: Path, model: Path, port: int, options: argparse.Namespace
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a server inside the block; log-probs are of the sampled distribution."""
    on_cpu = options.device == "cpu"
    dtype = "float32" if on_cpu else "auto"
    command = [str(program), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", dtype, "--logprobs-mode", "processed_logprobs"]
    command += ["--served-model-name", "policy"]
    if options.max_adapters:
        command += ["--enable-lora", "--max-loras", str(options.max_adapters + 1)]
        command += ["--max-lora-rank", str(options.max_lora_rank)]
    command += shlex.split(options.vllm_options)
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if on_cpu:
        space_gb = max(options.kv_mb // 1024, 1)
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(space_gb))
    # Our own OMP_NUM_THREADS is meant for our engines; the server places its threads itself.
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


async def until_healthy(api: VllmApi, process: asyncio.subprocess.Process | None) -> None:
    """Wait for the server to answer; raise if it ends or takes too long."""
    try:
        async with asyncio.timeout(_STARTS_WITHIN_S):
            while not await api.healthy():
                if process is not None and process.returncode is not None:
                    raise UnavailableError(f"vllm serve ended with {process.returncode}")
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise UnavailableError(f"vllm serve did not answer in {_STARTS_WITHIN_S:g} s") from None


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

    def _put(self, came: messages.ToWorker | DisconnectedError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may have ended before this thread
            self._loop.call_soon_threadsafe(self.queue.put_nowait, came)


async def adapt(options: argparse.Namespace) -> None:
    """Run until stopped, or until either side is lost."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, timeout=timeout)
        )
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="slackwater-vllm-"))
        files = node_files(options.files, secret(), pin())
        model = files.model(options.model)
        lane = weight_lane(files.weights(), options)
        versions = VersionDirectories(lane, model, options.base_version, Path(folder))
        base = versions.directory(options.base_version)
        process, url = None, options.url
        if options.vllm is not None:
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            process = await stack.enter_async_context(
                serving(Path(options.vllm), base, port, options)
            )
        api = VllmApi(session, url)
        await until_healthy(api, process)
        await api.learn()
        if options.url is not None:
            require_own_head(Path(api.root), model)
            # A server that ran before may hold any weights: begin from what we say that we hold.
            await api.load_weights(base)
        hello = messages.Hello(options.worker, "engine", await _facts(api, options))
        connection = stack.enter_context(dial(options.connect, hello))
        neutral = None
        if options.device == "cpu" and api.takes_adapters:
            # Hazard: on a CPU, vLLM 0.32 samples rows without an adapter from the one in its last
            # slot (index -1), without an error. With an adapter of zeros they have a slot.
            neutral = f"{connection.name}-none"
            await api.load_adapter(neutral, versions.neutral_adapter())
        instance = VllmInstance(connection, api, versions, options.base_version, neutral=neutral)
        connection.report_gauges(instance.gauges)
        await _serve(instance, ConnectionReader(connection), api)


async def _facts(api: VllmApi, options: argparse.Namespace) -> messages.EngineFacts:
    return messages.EngineFacts(
        base_model=options.base,
        max_running=options.max_running,
        max_context_tokens=api.max_context_tokens,
        kv_tokens=options.kv_tokens or await api.cache_tokens() or api.max_context_tokens,
        max_versions=2,
        max_adapters=options.max_adapters if api.takes_adapters else 0,
        kind=options.kind,
        exact_continuation=False,
        node=options.node,
    )


async def _serve(instance: VllmInstance, inbox: ConnectionReader, api: VllmApi) -> None:
    """Pass messages on until the control plane or the server is lost."""
    watch = asyncio.create_task(_watch(api, inbox))
    try:
        while True:
            came = await inbox.queue.get()
            if isinstance(came, DisconnectedError):
                raise came
            if isinstance(came, messages.Stop):
                return
            instance.apply(came)
    finally:
        watch.cancel()


async def _watch(api: VllmApi, inbox: ConnectionReader) -> None:
    while True:
        await asyncio.sleep(_HEALTH_EVERY_S)
        if not await api.healthy():
            break
    inbox.queue.put_nowait(DisconnectedError("the vLLM server has gone"))


def adapter_parser() -> argparse.ArgumentParser:
    """The options of this process."""
    parser = base_parser("A vLLM server as an instance.")
    parser.add_argument("--model", required=True, help="URI of the base model")
    parser.add_argument("--base", required=True, help="name of the base model")
    parser.add_argument("--base-version", required=True, help="weight version of the base itself")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--vllm", help="the `vllm` program, to start a server of our own")
    parser.add_argument("--vllm-options", default="", help="more options of `vllm serve`")
    parser.add_argument("--kind", default="dedicated", choices=[k.value for k in InstanceKind])
    parser.add_argument("--kv-mb", type=int, default=1024, help="KV memory of our own, on a CPU")
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--max-adapters", type=int, default=4, help="in one batch; 0: merge all")
    parser.add_argument("--max-lora-rank", type=int, default=32, help="of our own server")
    parser.add_argument("--kv-tokens", type=int, help="if the server does not say it")
    return parser


def main() -> None:
    options = adapter_parser().parse_args()
    if (options.url is None) == (options.vllm is None):
        raise ConfigError.of("--url, --vllm", (options.url, options.vllm), "give exactly one")
    asyncio.run(adapt(options))


if __name__ == "__main__":
    run_worker(main)
