"""A `vllm serve` of our own: started, awaited, and gone when we are."""

import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from slackwater.model.errors import UnavailableError
from slackwater.worker.vllm.api import VllmApi

_PR_SET_PDEATHSIG = 1
_STARTS_WITHIN_S = 600.0


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A port below the ephemeral range, from which a client could connect to itself."""
    return 20_000 + secrets.randbelow(12_000)


@contextlib.asynccontextmanager
async def serving(
    program: Path, model: Path, port: int, device: str, kv_mb: int, extra: list[str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a server inside the block; log-probs are of the sampled distribution; `kv_mb` is for
    CPUs.
    """
    dtype = "float32" if device == "cpu" else "auto"
    command = [str(program), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", dtype, "--logprobs-mode", "processed_logprobs"]
    command += ["--served-model-name", "policy", *extra]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
    if device == "cpu":
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(kv_mb // 1024, 1)))  # in GB
    # Our own OMP_NUM_THREADS is meant for our engines; the server places its threads itself.
    environment.pop("OMP_NUM_THREADS", None)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        env=environment,
        preexec_fn=_die_with_parent,
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
