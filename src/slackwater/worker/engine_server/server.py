"""The interface of an engine server: stream, score, abort, load weights, sleep.

`vllm.py` and `sglang.py` implement it.
"""

import argparse
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import msgspec

from slackwater.model.errors import ConfigError, RefusedError, UnavailableError
from slackwater.model.sampling import Sampling

MAX_ADAPTERS = 4  # in one batch
MAX_LORA_RANK = 32  # of a server that we started; adapters above it are merged
_SHARED = (
    "temperature", "top_p", "min_p",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
PromptLogprobs = tuple[list[float | None], list[list[tuple[int, float]] | None]]


@dataclass(frozen=True, slots=True)
class ServerTokens:
    """New tokens of a request; `top` has a row per token, empty if none were requested."""

    tokens: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    finish_reason: str | None


class EngineServer(ABC):
    """One server; ConfigError if it refuses a request, UnavailableError if it fails."""

    title: ClassVar[str]
    # Whether new weights in place reach an output head that is tied to the embedding.
    reloads_tied_head: ClassVar[bool]

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self.root = ""
        self.max_context_tokens = 0
        self.supports_adapters = False
        self.supports_sleep = False

    @staticmethod
    @abstractmethod
    def command(
        program: str, model: Path, port: int, folder: Path, options: argparse.Namespace
    ) -> tuple[list[str], Mapping[str, str]]:
        """The command and variables that start a server on 127.0.0.1.

        Log-probs are of the sampled distribution. `folder` may get files for the server.
        """

    @abstractmethod
    async def read_capabilities(self) -> None:
        """Read the served model's directory and context length, and what the server supports."""

    @abstractmethod
    async def cache_tokens(self) -> int | None:
        """The capacity of its KV cache in tokens, if reported."""

    @abstractmethod
    def stream(
        self,
        name: str,
        tokens: list[int],
        sampling: Sampling,
        sampled_before: int,
        *,
        adapter: str | None = None,
    ) -> AsyncIterator[ServerTokens]:
        """Continue `tokens`; the last `sampled_before` of them count against the sampling limit."""

    @abstractmethod
    async def score(
        self, tokens: list[int], topk: int, *, adapter: str | None = None
    ) -> PromptLogprobs:
        """Log-probs of a prompt's tokens (None for the first) and the `topk` likeliest each."""

    @abstractmethod
    async def abort(self, name: str) -> None:
        """Forget a request that was streamed under `name`."""

    @abstractmethod
    async def load_adapter(self, name: str, directory: Path) -> None:
        """Serve an adapter from a directory under a new name; running turns continue."""

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""

    @abstractmethod
    async def load_weights(self, directory: Path, version: str) -> None:
        """Replace the weights in place from a directory; none of our turns is running."""

    @abstractmethod
    async def sleep(self) -> None:
        """Free the devices and keep the weights on the host; none of our turns is running."""

    @abstractmethod
    async def wake(self) -> None:
        """Return to the devices with the previous weights and adapters."""

    async def is_healthy(self) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=5)
            async with self._session.get(f"{self._url}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _tokens_to_sample(self, tokens: list[int], sampling: Sampling, sampled_before: int) -> int:
        max_tokens = self.max_context_tokens - len(tokens)
        if max_tokens <= 0:
            raise ConfigError.of(
                "prompt", len(tokens), f"tokens fill a context of {self.max_context_tokens}"
            )
        return min(sampling.max_tokens - sampled_before, max_tokens)

    def _check_shape(self, sampling: Sampling, sampled_before: int) -> None:
        """Refuse what the server would sample wrongly.

        It treats earlier generated tokens as prompt, so options that look back at generated tokens
        cannot be continued.
        """
        if sampled_before and sampling.looks_back:
            raise RefusedError(
                f"penalties, bad words, min_tokens and grammars cannot be continued on {self.title}"
            )
        if sampling.bad_words:
            raise RefusedError(f"bad_words: {self.title} takes words, not tokens")

    async def _events(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        try:
            async with self._session.post(self._url + path, json=body, headers=headers) as response:
                await self._check(response)
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        yield msgspec.json.decode(line[6:])
        except aiohttp.ClientError as error:
            raise UnavailableError(f"the {self.title} server failed: {error}") from None

    async def _request(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """GET, or POST a body."""
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(method, self._url + path, json=body) as response:
                await self._check(response)
                return await response.read()
        except aiohttp.ClientError as error:
            raise UnavailableError(f"the {self.title} server failed: {error}") from None

    async def _list_routes(self) -> set[str]:
        return set(msgspec.json.decode(await self._request("/openapi.json"))["paths"])

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status < 400:
            return
        text = (await response.text())[:500]
        if response.status in (400, 404, 422):
            raise ConfigError(f"{self.title} refused: {text}")
        raise UnavailableError(f"{self.title} answered {response.status}: {text}")


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """The parameters that every server has under these names."""
    params: dict[str, Any] = {name: getattr(sampling, name) for name in _SHARED}
    params |= {"stop_token_ids": list(sampling.stop_token_ids), "stop": list(sampling.stop_strings)}
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    return params | {"ignore_eos": True, "skip_special_tokens": False}


def likeliest(row: list[tuple[int, float]], topk: int) -> list[tuple[int, float]]:
    """The `topk` pairs of token and log-prob with the highest log-prob."""
    return sorted(row, key=lambda pair: (-pair[1], pair[0]))[:topk]
