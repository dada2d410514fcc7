"""vLLM's HTTP API (0.32)."""

import argparse
import asyncio
import os
import re
import shlex
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from slackwater.model.errors import RefusedError, SlackwaterError, UnavailableError
from slackwater.model.sampling import Grammar, Sampling
from slackwater.worker.engine_server.server import (
    MAX_ADAPTERS,
    MAX_LORA_RANK,
    EngineServer,
    PromptLogprobs,
    ServerTokens,
    likeliest,
    sampling_params,
)

_BACKEND = "slackwater_file"  # as `vllm_plugin.py` names it
_SEED_MASK = (1 << 63) - 1
_CACHE_TOKENS = re.compile(r'vllm:cache_config_info\{[^}]*kv_cache_size_tokens="(\d+)"')
_BLOCKS = re.compile(r'vllm:cache_config_info\{[^}]*num_gpu_blocks="(\d+)"')
_BLOCK_SIZE = re.compile(r'vllm:cache_config_info\{[^}]*block_size="(\d+)"')


class VllmServer(EngineServer):
    """A server that runs with VLLM_SERVER_DEV_MODE=1."""

    title = "vLLM"
    reloads_tied_head = False

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        super().__init__(session, url)
        self._model = ""
        self._phased = False

    @staticmethod
    def command(
        program: str, model: Path, port: int, folder: Path, options: argparse.Namespace
    ) -> tuple[list[str], Mapping[str, str]]:
        on_cpu = options.device == "cpu"
        dtype = "float32" if on_cpu else "auto"
        command = [program, "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", dtype, "--logprobs-mode", "processed_logprobs"]
        command += ["--served-model-name", "policy"]
        command += ["--enable-lora", "--max-loras", str(MAX_ADAPTERS + 1)]
        command += ["--max-lora-rank", str(MAX_LORA_RANK)]
        command += ["--weight-transfer-config", f'{{"backend": "{_BACKEND}"}}']
        command += ["--enable-sleep-mode"] if options.kind == "local" and not on_cpu else []
        command += shlex.split(options.server_options)
        variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        if on_cpu and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            variables["VLLM_CPU_KVCACHE_SPACE"] = str(max(options.kv_mb // 1024, 1))
        return command, variables | _install_plugin(folder)

    async def read_capabilities(self) -> None:
        model = msgspec.json.decode(await self._request("/v1/models"))["data"][0]
        self._model, self.root = model["id"], str(model["root"])
        self.max_context_tokens = int(model["max_model_len"])
        self.supports_adapters = "/v1/load_lora_adapter" in await self._list_routes()
        try:
            info = msgspec.json.decode(await self._request("/server_info?config_format=json"))
            self.supports_sleep = bool(info["vllm_config"]["model_config"]["enable_sleep_mode"])
        except (SlackwaterError, msgspec.DecodeError, LookupError, TypeError):
            self.supports_sleep = False  # a server that does not report sleep mode stays awake
        try:
            init = {"init_info": {"file_format": "safetensors"}}
            await self._request("/init_weight_transfer_engine", init)
            self._phased = True
        except SlackwaterError:
            self._phased = False  # a server without our backend reloads

    async def cache_tokens(self) -> int | None:
        text = (await self._request("/metrics")).decode()
        if (tokens := _CACHE_TOKENS.search(text)) is not None:
            return int(tokens.group(1))
        blocks, size = _BLOCKS.search(text), _BLOCK_SIZE.search(text)
        return None if blocks is None or size is None else int(blocks[1]) * int(size[1])

    async def stream(
        self,
        name: str,
        tokens: list[int],
        sampling: Sampling,
        sampled_before: int,
        *,
        adapter: str | None = None,
    ) -> AsyncIterator[ServerTokens]:
        self._check_shape(sampling, sampled_before)
        body = _body(tokens, sampling, sampled_before) | {
            "model": adapter or self._model,
            "stream": True,
            "max_tokens": self._tokens_to_sample(tokens, sampling, sampled_before),
        }
        headers = {"X-Request-Id": name}
        async for response in self._events("/v1/completions", body, headers):
            yield _parse_part(response, sampling.topk_logprobs)

    async def score(
        self, tokens: list[int], topk: int, *, adapter: str | None = None
    ) -> PromptLogprobs:
        body = {
            "model": adapter or self._model,
            "prompt": tokens,
            "max_tokens": 1,
            "prompt_logprobs": max(topk, 1),
        }
        response = msgspec.json.decode(await self._request("/v1/completions", body))
        rows = response["choices"][0]["prompt_logprobs"]
        logprobs: list[float | None] = [None]
        top: list[list[tuple[int, float]] | None] = [None]
        for token, row in zip(tokens[1:], rows[1:], strict=True):
            logprobs.append(row[str(token)]["logprob"])
            best = sorted(row.items(), key=lambda item: item[1]["rank"])[:topk]
            top.append([(int(name), entry["logprob"]) for name, entry in best])
        return logprobs, top if topk else []

    async def abort(self, name: str) -> None:
        # The server gives a request's only sample this name; the plain name would abort nothing.
        await self._request("/abort_requests", {"request_ids": [f"cmpl-{name}-0"]})

    async def load_adapter(self, name: str, directory: Path) -> None:
        # Never `load_inplace`: it changes the weights under the turns that the name has.
        body = {"lora_name": name, "lora_path": str(directory)}
        await self._request("/v1/load_lora_adapter", body)

    async def unload_adapter(self, name: str) -> None:
        await self._request("/v1/unload_lora_adapter", {"lora_name": name})

    async def load_weights(self, directory: Path, version: str) -> None:
        if not self._phased:
            await self.reload_weights(directory)
            return
        await self._request("/pause?mode=abort", {})  # this also resets the prefix cache
        try:
            await self._request("/start_weight_update", {})
            for file in await asyncio.to_thread(lambda: sorted(directory.glob("*.safetensors"))):
                await self._request("/update_weights", {"update_info": {"path": str(file)}})
            await self._request("/finish_weight_update", {"weight_version": version})
        finally:
            await self._request("/resume", {})
        loaded = msgspec.json.decode(await self._request("/weight_info"))["weight_version"]
        if loaded != version:
            raise UnavailableError(f"vLLM holds weight version {loaded!r}, not {version!r}")

    async def reload_weights(self, directory: Path) -> None:
        """Reload weights from a directory, as a server without our backend must."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await self._request("/collective_rpc", call)
        for _ in range(50):
            response = msgspec.json.decode(await self._request("/reset_prefix_cache", {}))
            if response["success"]:
                return
        raise RefusedError("the vLLM server did not reset its prefix cache")

    async def sleep(self) -> None:
        await self._request("/sleep?level=1", {})  # level 2 would drop the weights

    async def wake(self) -> None:
        await self._request("/wake_up", {})


def _install_plugin(folder: Path) -> dict[str, str]:
    """Variables that let a server find our weight transfer backend, installed in a folder."""
    plugin_folder = folder / "vllm-plugin"
    info = plugin_folder / "slackwater_vllm_plugin-1.dist-info"
    info.mkdir(parents=True)
    for name in ("vllm_plugin.py", "mapped_files.py"):
        shutil.copy(Path(__file__).with_name(name), plugin_folder / f"slackwater_{name}")
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: slackwater-vllm-plugin\nVersion: 1\n"
    )
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nslackwater = slackwater_vllm_plugin:register\n"
    )
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(plugin_folder), os.getenv("PYTHONPATH")]))
    }
    if plugins := os.getenv("VLLM_PLUGINS"):
        variables["VLLM_PLUGINS"] = f"{plugins},slackwater"
    return variables


def _body(tokens: list[int], sampling: Sampling, sampled_before: int) -> dict[str, Any]:
    body = sampling_params(sampling) | {
        "prompt": tokens,
        "top_k": sampling.top_k,
        "min_tokens": sampling.min_tokens,
        "seed": stream_seed(sampling.seed, sampled_before),
        "include_stop_str_in_output": True,
        "logprobs": sampling.topk_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if sampling.allowed_token_ids:
        body["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.grammar is not None:
        body["structured_outputs"] = _grammar_params(sampling.grammar)
    return body


def _grammar_params(grammar: Grammar) -> dict[str, Any]:
    match grammar.kind:
        case "json_schema":
            return {"json": msgspec.json.decode(grammar.source)}
        case "json_object":
            return {"json_object": True}
        case "regex":
            return {"regex": grammar.source}
        case "choice":
            return {"choice": msgspec.json.decode(grammar.source)}
        case "lark":
            return {"grammar": grammar.source}


def stream_seed(seed: int, position: int) -> int:
    """A seed for the rest of a turn: the original would repeat its first draws."""
    if position == 0:
        return seed & _SEED_MASK
    mixed = (seed + position * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    return (mixed ^ (mixed >> 27)) & _SEED_MASK


def _parse_part(response: dict[str, Any], topk: int) -> ServerTokens:
    if "choices" not in response:
        raise UnavailableError(f"vLLM broke off: {str(response)[:500]}")
    choice = response["choices"][0]
    tokens: list[int] = choice.get("token_ids") or []
    scores = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
    logprobs: list[float] = scores["token_logprobs"]
    if len(logprobs) != len(tokens):
        raise UnavailableError(f"vLLM sent {len(tokens)} tokens, {len(logprobs)} log-probs")
    top: list[list[tuple[int, float]]] = [[] for _ in tokens]
    if topk:
        rows = scores["top_logprobs"]
        by_token = [[(int(key.removeprefix("token_id:")), row[key]) for key in row] for row in rows]
        top = [likeliest(row, topk) for row in by_token]
    return ServerTokens(tokens, logprobs, top, choice["finish_reason"])
