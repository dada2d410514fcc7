"""SGLang's native HTTP API (0.5.23).

Every part of a stream has the server's `weight_version`, which must be the loaded one.
"""

import argparse
import shlex
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from slackwater.model.errors import ConfigError, RefusedError, UnavailableError
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

_SEED_MASK = (1 << 63) - 1
_NO_TOP_K = 1 << 30  # a top_k without effect

# Log-prob, token and text of a token, as the server lists them.
Scored = tuple[float | None, int, str | None]


class SglangServer(EngineServer):
    """A server of `sglang.launch_server`."""

    title = "SGLang"
    reloads_tied_head = True

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        super().__init__(session, url)
        self._incremental = False
        self._phased = False
        self._version: str | None = None

    @staticmethod
    def command(
        program: str, model: Path, port: int, folder: Path, options: argparse.Namespace
    ) -> tuple[list[str], Mapping[str, str]]:
        command = [program, "-m", "sglang.launch_server", "--model-path", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--incremental-streaming-output"]
        command += ["--enable-deterministic-inference"]
        command += ["--enable-lora", "--max-loras-per-batch", str(MAX_ADAPTERS + 1)]
        command += ["--max-lora-rank", str(MAX_LORA_RANK), "--lora-target-modules", "all"]
        if options.kind == "local":
            command += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
        return [*command, *shlex.split(options.server_options)], {}

    async def read_capabilities(self) -> None:
        info = msgspec.json.decode(await self._request("/model_info"))
        self.root, self._version = str(info["model_path"]), info["weight_version"]
        server = await self._server_info()
        self.supports_adapters = bool(server["enable_lora"])
        self.supports_sleep = bool(server.get("enable_memory_saver"))
        # Without the backup it drops its weights.
        self.supports_sleep &= bool(server.get("enable_weights_cpu_backup"))
        self._incremental = bool(server.get("incremental_streaming_output"))
        models = msgspec.json.decode(await self._request("/v1/models"))
        self.max_context_tokens = int(models["data"][0]["max_model_len"])
        self._phased = "/begin_weight_update" in await self._list_routes()

    async def _server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = msgspec.json.decode(await self._request("/server_info"))
        return info

    async def cache_tokens(self) -> int | None:
        return (await self._server_info()).get("max_total_num_tokens")

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
        max_tokens = self._tokens_to_sample(tokens, sampling, sampled_before)
        topk = sampling.topk_logprobs
        body = {
            "rid": _request_name(name),
            "input_ids": tokens,
            "sampling_params": _params(sampling, max_tokens),
            "return_logprob": True,
            "top_logprobs_num": topk,
            "stream": True,
        }
        if adapter is not None:
            body["lora_path"] = adapter
        received = 0
        async for response in self._events("/generate", body):
            part = self._parse_part(response, received, topk)
            received += 0 if self._incremental else len(part.tokens)
            yield part

    def _parse_part(self, response: dict[str, Any], received: int, topk: int) -> ServerTokens:
        """The tokens of one answer after the first `received`."""
        if "meta_info" not in response:
            raise UnavailableError(f"SGLang broke off: {str(response)[:500]}")
        meta, tokens = response["meta_info"], response["output_ids"][received:]
        if (version := meta["weight_version"]) != self._version:
            raise UnavailableError(
                f"SGLang sampled from weight version {version!r}, not {self._version!r}"
            )
        scored_tokens: list[Scored] = meta["output_token_logprobs"][received:]
        if [token for _, token, *_ in scored_tokens] != tokens:
            raise UnavailableError(
                f"SGLang sent {len(tokens)} tokens, {len(scored_tokens)} log-probs"
            )
        logprobs = [float(logprob or 0.0) for logprob, *_ in scored_tokens]
        top: list[list[tuple[int, float]]] = [[] for _ in tokens]
        if topk:
            top = [_top(row, topk) for row in meta["output_top_logprobs"][received:]]
        return ServerTokens(tokens, logprobs, top, _finish_reason(meta["finish_reason"]))

    async def score(
        self, tokens: list[int], topk: int, *, adapter: str | None = None
    ) -> PromptLogprobs:
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": topk,
        }
        if adapter is not None:
            body["lora_path"] = adapter
        meta = msgspec.json.decode(await self._request("/generate", body))["meta_info"]
        scored_tokens: list[Scored] = meta["input_token_logprobs"]
        if [token for _, token, *_ in scored_tokens] != tokens:
            raise UnavailableError(
                f"SGLang scored {len(scored_tokens)} of {len(tokens)} prompt tokens"
            )
        logprobs = [None, *(logprob for logprob, *_ in scored_tokens[1:])]
        if not topk:
            return logprobs, []
        return logprobs, [None, *(_top(row, topk) for row in meta["input_top_logprobs"][1:])]

    async def abort(self, name: str) -> None:
        await self._request("/abort_request", {"rid": _request_name(name)})

    async def load_adapter(self, name: str, directory: Path) -> None:
        await self._post_change(
            "/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)}
        )

    async def unload_adapter(self, name: str) -> None:
        await self._post_change("/unload_lora_adapter", {"lora_name": name})

    async def load_weights(self, directory: Path, version: str) -> None:
        # No turn of ours runs. Requests of other clients end, since none may mix two versions.
        await self._request("/pause_generation", {"mode": "abort"})
        try:
            if self._phased:
                await self._request("/begin_weight_update", {})
            try:
                body = {"model_path": str(directory), "weight_version": version}
                await self._post_change("/update_weights_from_disk", body)
            finally:
                if self._phased:
                    await self._request("/end_weight_update", {})
        finally:
            await self._request("/continue_generation", {})
        self._version = version

    async def sleep(self) -> None:
        await self._request("/release_memory_occupation", {})

    async def wake(self) -> None:
        await self._request("/resume_memory_occupation", {})

    async def _post_change(self, path: str, body: dict[str, Any]) -> None:
        response = msgspec.json.decode(await self._request(path, body))
        if not response["success"]:
            raise RefusedError(f"SGLang refused: {str(response)[:500]}")


def _request_name(name: str) -> str:
    # The server aborts every request whose name begins with the given one: "w-1" is not "w-10".
    return f"{name}."


def _params(sampling: Sampling, max_tokens: int) -> dict[str, Any]:
    if sampling.allowed_token_ids:
        raise RefusedError("allowed_token_ids are not supported by SGLang")
    params = sampling_params(sampling) | {
        "max_new_tokens": max_tokens,
        "top_k": sampling.top_k or _NO_TOP_K,
        "min_new_tokens": sampling.min_tokens,
        # It samples by seed and position, so a continued turn keeps its seed.
        "sampling_seed": sampling.seed & _SEED_MASK,
        "no_stop_trim": True,
    }
    if sampling.grammar is not None:
        params |= _grammar_params(sampling.grammar)
    return params


def _grammar_params(grammar: Grammar) -> dict[str, str]:
    match grammar.kind:
        case "json_schema":
            return {"json_schema": grammar.source}
        case "json_object":
            return {"json_schema": '{"type": "object"}'}
        case "regex":
            return {"regex": grammar.source}
        case "choice":
            choices = [msgspec.json.encode(c).decode() for c in msgspec.json.decode(grammar.source)]
            return {"ebnf": "root ::= " + " | ".join(choices)}
        case "lark":
            raise RefusedError("grammar: SGLang does not take Lark's notation")


def _top(row: list[Scored], topk: int) -> list[tuple[int, float]]:
    return likeliest([(token, float(logprob or 0.0)) for logprob, token, *_ in row], topk)


def _finish_reason(info: dict[str, Any] | None) -> str | None:
    if info is None:
        return None
    if info["type"] == "abort" and info.get("status_code") in (400, 422):
        raise ConfigError(f"SGLang refused: {info.get('message')}")
    return str(info["type"])
