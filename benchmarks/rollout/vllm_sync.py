"""`slackwater bench vllm_sync`: how long a real vLLM server takes to serve a new version.

Four ways for the same model: an adapter loaded while the server runs, the same adapter merged into
the base and reloaded, whole weights in phases, and whole weights reloaded. Each time runs from a
published version to the server's last answer; the pause is the part in which no turn runs.
Adapters of two jobs are updated under load, and every turn must be what the server samples alone
from its version.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import aiohttp
import torch
from torch import Tensor

from benchmarks.options import BenchOptions
from slackwater.model.errors import ConfigError
from slackwater.model.sampling import Sampling
from slackwater.nets.loading import load_net, net_config, net_tensors
from slackwater.nets.lora import LoraAdapter, LoraSpec, lora_meta
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.worker.engine_server.adapter import free_port, run_server, wait_until_healthy
from slackwater.worker.engine_server.versions import VersionDirectories
from slackwater.worker.engine_server.vllm import VllmServer
from slackwater.worker.puller import WeightLane
from slackwater.zoo.sources import is_model, models_directory

_BASE = "base"
_PROMPT = [101, 102, 103, 104, 105, 106, 107, 108]
_TOKENS = 12
_TURNS = 2
_RANK = 16


def run(options: BenchOptions) -> dict[str, object]:
    """Medians over the updates of each way, and ratios to the merged reload."""
    program = os.environ.get("SLACKWATER_VLLM")
    if program is None:
        fix = "must name the vllm program; scripts/setup_vllm_cpu.sh makes one"
        raise ConfigError.of("SLACKWATER_VLLM", None, fix)
    model = models_directory() / "smollm2"
    if not is_model(model):
        raise ConfigError.of("smollm2", str(model), "is not there: slackwater model get smollm2")
    return asyncio.run(_measure(program, model, options))


class _Versions:
    """Published versions of one model, and their directories for a server."""

    def __init__(self, model: Path, folder: Path, seed: int) -> None:
        self._store = DirectoryWeightStore(folder / "weights")
        served = folder / "served"
        served.mkdir()
        self.directories = VersionDirectories(
            WeightLane(self._store), model, _BASE, served, in_memory=True
        )
        self._model, self._config = model, net_config(model)
        self._draw = torch.Generator().manual_seed(seed)
        self._base: dict[str, Tensor] | None = None

    def publish_adapter(self, version: str) -> None:
        spec = LoraSpec(_RANK)
        tensors = LoraAdapter.create(spec, self._config).tensors
        for name, tensor in tensors.items():
            if "lora_B" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=self._draw) * 0.02)
        self._store.publish(version, tensors, lora_meta(spec))

    def publish_whole(self, version: str) -> None:
        if self._base is None:
            self._base = dict(net_tensors(load_net(self._model)))
        for tensor in self._base.values():
            noise = torch.randn(tensor.shape, generator=self._draw)
            tensor.add_(noise, alpha=1e-3)
        self._store.publish(version, self._base, lora_meta(None))

    def drop(self, version: str) -> None:
        """Forget a version, as a service does that has newer ones."""
        self.directories.drop(version)
        self._store.drop(version)


async def _measure(program: str, model: Path, options: BenchOptions) -> dict[str, object]:
    updates = 2 if options.quick else 10
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-sync-")))
        versions = await asyncio.to_thread(_Versions, model, folder, options.seed)
        told = argparse.Namespace(device="cpu", kind="dedicated", kv_mb=1024)
        told.server_options = "--enforce-eager --max-model-len 512"
        port = free_port()
        base = versions.directories.directory(_BASE)
        words, variables = VllmServer.command(program, base, port, folder, told)
        quiet = ["sh", "-c", 'exec "$@" > "$0" 2>&1', str(folder / "server.log"), *words]
        process = await stack.enter_async_context(run_server(quiet, variables))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        server = VllmServer(session, f"http://127.0.0.1:{port}")
        options.progress("start of the server", 0.0)
        await wait_until_healthy(server, process)
        await server.read_capabilities()
        await server.load_adapter("none", versions.directories.write_neutral_adapter())
        figures = await _under_load(server, versions, updates, options)
        figures |= await _whole(server, versions, updates, options)
    merged_s = figures["merged_reload_s"]
    assert isinstance(merged_s, float)
    for way in ("adapter", "phased", "reload"):
        seconds = figures[f"{way}_s"]
        assert isinstance(seconds, float)
        figures[f"{way}_over_merged_reload"] = seconds / merged_s
    return figures


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    began_s = time.perf_counter()
    await work()
    return time.perf_counter() - began_s


async def _sampled(server: VllmServer, name: str, seed: int, adapter: str) -> list[int]:
    stream = server.stream(name, [*_PROMPT], Sampling(_TOKENS, seed=seed), 0, adapter=adapter)
    return [token async for part in stream for token in part.tokens]


async def _under_load(
    server: VllmServer, versions: _Versions, updates: int, options: BenchOptions
) -> dict[str, object]:
    """Two jobs' adapters, updated in turn while turns of the two newest run."""
    names = [f"job-{number % 2}-step-{number // 2}" for number in range(2 * updates)]
    seconds: list[float] = []
    turns: list[tuple[str, int, asyncio.Task[list[int]]]] = []
    for number, version in enumerate(names):
        await asyncio.to_thread(versions.publish_adapter, version)

        async def sync(version: str = version) -> None:
            await asyncio.to_thread(versions.directories.pull, version)
            found = versions.directories.adapter(version)
            assert found is not None
            await server.load_adapter(version, found)

        seconds.append(await _timed(sync))
        for seed in range(_TURNS):
            work = _sampled(server, f"{version}-{seed}", seed, version)
            turns.append((version, seed, asyncio.create_task(work)))
        if number >= 1:  # the turns of the version before run on during the next update
            await turns[_TURNS * (number - 1)][2]
        options.progress("adapters under load", number / len(names) / 2)
    await asyncio.gather(*(task for _, _, task in turns))
    wrong = 0
    for version, seed, task in turns:
        alone = await _sampled(server, f"alone-{version}-{seed}", seed, version)
        wrong += alone != task.result()
    for version in names:
        await server.unload_adapter(version)
    return {
        "adapter_updates": len(names),
        "turns": len(turns),
        "turns_not_as_alone": wrong,
        "adapter_s": statistics.median(seconds),
    }


async def _whole(
    server: VllmServer, versions: _Versions, updates: int, options: BenchOptions
) -> dict[str, object]:
    """Whole versions, each way on a server without load, as an instance switches."""
    found: dict[str, list[float]] = {"merged_reload": [], "phased": [], "reload": []}
    pauses: dict[str, list[float]] = {way: [] for way in found}
    for number in range(updates):
        for way, seconds in found.items():
            version = f"{way}-{number}"
            merged = way == "merged_reload"
            publish = versions.publish_adapter if merged else versions.publish_whole
            await asyncio.to_thread(publish, version)

            async def sync(version: str = version, way: str = way) -> None:
                await asyncio.to_thread(versions.directories.pull, version)
                if way == "merged_reload":
                    await asyncio.to_thread(versions.directories.merge, version)
                directory = versions.directories.directory(version)
                if way == "phased":
                    work = partial(server.load_weights, directory, version)
                else:
                    work = partial(server.reload_weights, directory)
                pauses[way].append(await _timed(work))

            seconds.append(await _timed(sync))
            versions.drop(version)
            options.progress("whole versions", 0.5 + number / updates / 2)
    figures: dict[str, object] = {}
    for way, seconds in found.items():
        figures[f"{way}_s"] = statistics.median(seconds)
        figures[f"{way}_pause_s"] = statistics.median(pauses[way])
    return figures
