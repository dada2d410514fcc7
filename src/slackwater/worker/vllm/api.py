"""The parts of vLLM's HTTP API that an instance needs: stream, score, abort, load weights and
adapters.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from slackwater.model.errors import ConfigError, RefusedError, UnavailableError
from slackwater.model.sampling import Grammar, Sampling

_SEED_MASK = (1 << 63) - 1
_CACHE_TOKENS = re.compile(r'vllm:cache_config_info\{[^}]*kv_cache_size_tokens="(\d+)"')
_BLOCKS = re.compile(r'vllm:cache_config_info\{[^}]*num_gpu_blocks="(\d+)"')
_BLOCK_SIZE = re.compile(r'vllm:cache_config_info\{[^}]*block_size="(\d+)"')


@dataclass(frozen=True, slots=True)
class VllmTokens:
    """New tokens of a request; `top` has a row per token, empty if none were requested."""

    tokens: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    finish_reason: str | None


class VllmApi:
    """One server; ConfigError if it refuses a request, UnavailableError if it fails."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self.model = ""
        self.root = ""
        self.max_context_tokens = 0
        self.takes_adapters = False

    async def healthy(self) -> bool:
        """Whether it answers."""
        try:
            timeout = aiohttp.ClientTimeout(total=5)
            async with self._session.get(f"{self._url}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def learn(self) -> None:
        """The name, the place and the context of the model it serves, and whether adapters can be
        loaded while it runs.
        """
        found = await self._get("/v1/models")
        model = msgspec.json.decode(found)["data"][0]
        self.model, self.root = model["id"], str(model["root"])
        self.max_context_tokens = int(model["max_model_len"])
        routes = msgspec.json.decode(await self._get("/openapi.json"))["paths"]
        self.takes_adapters = "/v1/load_lora_adapter" in routes

    async def cache_tokens(self) -> int | None:
        """The capacity of its KV cache in tokens, if reported."""
        text = (await self._get("/metrics")).decode()
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
    ) -> AsyncIterator[VllmTokens]:
        """Continue `tokens` with an adapter, if one is named; the last `sampled_before` count
        against the sampling limit.
        """
        room = self.max_context_tokens - len(tokens)
        if room <= 0:
            raise ConfigError.of(
                "prompt", len(tokens), f"tokens fill a context of {self.max_context_tokens}"
            )
        body = self._body(tokens, sampling, sampled_before) | {
            "model": adapter or self.model,
            "stream": True,
            "max_tokens": min(sampling.max_tokens - sampled_before, room),
        }
        headers = {"X-Request-Id": name}
        try:
            async with self._session.post(
                f"{self._url}/v1/completions", json=body, headers=headers
            ) as response:
                await _check(response)
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        yield _sampled(line[6:], sampling.topk_logprobs)
        except aiohttp.ClientError as error:
            raise UnavailableError(f"the vLLM server failed: {error}") from None

    def _body(self, tokens: list[int], sampling: Sampling, sampled_before: int) -> dict[str, Any]:
        return {
            "prompt": tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": stream_seed(sampling.seed, sampled_before),
            "stop_token_ids": list(sampling.stop_token_ids),
            "stop": list(sampling.stop_strings),
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "skip_special_tokens": False,
            **_shape(sampling, sampled_before),
            "logprobs": sampling.topk_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    async def score(
        self, tokens: list[int], topk: int, *, adapter: str | None = None
    ) -> tuple[list[float | None], list[list[tuple[int, float]] | None]]:
        """Log-probs of a prompt's tokens (None for the first) and the `topk` likeliest each."""
        body = {
            "model": adapter or self.model,
            "prompt": tokens,
            "max_tokens": 1,
            "prompt_logprobs": max(topk, 1),
        }
        answer = msgspec.json.decode(await self._post("/v1/completions", body))
        rows = answer["choices"][0]["prompt_logprobs"]
        logprobs: list[float | None] = [None]
        top: list[list[tuple[int, float]] | None] = [None]
        for token, row in zip(tokens[1:], rows[1:], strict=True):
            logprobs.append(row[str(token)]["logprob"])
            best = sorted(row.items(), key=lambda item: item[1]["rank"])[:topk]
            top.append([(int(name), entry["logprob"]) for name, entry in best])
        return logprobs, top if topk else []

    async def abort(self, name: str) -> None:
        """Forget a request that was streamed under `name`."""
        # The server names a request's only sample so; under the plain name it would abort nothing.
        await self._post("/abort_requests", {"request_ids": [f"cmpl-{name}-0"]})

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Serve the adapter of a directory under a name of its own, beside whatever runs.

        Never `load_inplace`: it changes the weights under the turns that the name has.
        """
        body = {"lora_name": name, "lora_path": str(directory)}
        await self._post("/v1/load_lora_adapter", body)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def load_weights(self, directory: Path) -> None:
        """Take the weights of a directory, in place; nothing may be running."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await self._post("/collective_rpc", call)
        for _ in range(50):
            answer = msgspec.json.decode(await self._post("/reset_prefix_cache", {}))
            if answer["success"]:
                return
        raise RefusedError("the vLLM server would not forget its prefix cache")

    async def _get(self, path: str) -> bytes:
        try:
            async with self._session.get(self._url + path) as response:
                await _check(response)
                return await response.read()
        except aiohttp.ClientError as error:
            raise UnavailableError(f"the vLLM server failed: {error}") from None

    async def _post(self, path: str, body: dict[str, Any]) -> bytes:
        try:
            async with self._session.post(self._url + path, json=body) as response:
                await _check(response)
                return await response.read()
        except aiohttp.ClientError as error:
            raise UnavailableError(f"the vLLM server failed: {error}") from None


def _shape(sampling: Sampling, sampled_before: int) -> dict[str, Any]:
    """Options that shape logits. vLLM would take generated tokens for the prompt's, so what looks
    back at them cannot be continued.
    """
    if sampled_before and sampling.looks_back:
        raise RefusedError(
            "penalties, bad words, min_tokens and grammars cannot be continued on vLLM"
        )
    if sampling.bad_words:
        raise RefusedError("bad_words: vLLM takes words, not tokens")
    wishes: dict[str, Any] = {
        "min_p": sampling.min_p,
        "min_tokens": sampling.min_tokens,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }
    if sampling.logit_bias:
        wishes["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.allowed_token_ids:
        wishes["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.grammar is not None:
        wishes["structured_outputs"] = _structured(sampling.grammar)
    return wishes


def _structured(grammar: Grammar) -> dict[str, Any]:
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


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    text = (await response.text())[:500]
    if response.status in (400, 404, 422):
        raise ConfigError(f"vLLM refused: {text}")
    raise UnavailableError(f"vLLM answered {response.status}: {text}")


def _sampled(line: bytes, topk: int) -> VllmTokens:
    answer = msgspec.json.decode(line)
    if "choices" not in answer:
        raise UnavailableError(f"vLLM broke off: {line[:500]!r}")
    choice = answer["choices"][0]
    tokens: list[int] = choice.get("token_ids") or []
    scores = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
    logprobs: list[float] = scores["token_logprobs"]
    if len(logprobs) != len(tokens):
        raise UnavailableError(f"vLLM sent {len(tokens)} tokens, {len(logprobs)} log-probs")
    top = [_top(row, topk) for row in scores["top_logprobs"]] if topk else [[] for _ in tokens]
    return VllmTokens(tokens, logprobs, top, choice["finish_reason"])


def _top(row: dict[str, float], topk: int) -> list[tuple[int, float]]:
    named = ((int(name.removeprefix("token_id:")), value) for name, value in row.items())
    return sorted(named, key=lambda pair: (-pair[1], pair[0]))[:topk]
