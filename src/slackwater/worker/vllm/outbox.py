"""Gathers the tokens of many vLLM streams into one frame, like an engine step's."""

import asyncio
from collections.abc import Callable
from typing import Literal

import numpy as np

from slackwater.wire import messages
from slackwater.wire.frames import FrameKind, encode_frame
from slackwater.wire.tokens import TokenColumns, encode_tokens
from slackwater.worker.vllm.api import VllmTokens


class Outbox:
    """Flushes `every_s` after the first token that waits."""

    def __init__(self, send: Callable[..., None], every_s: float = 0.002) -> None:
        self._send = send
        self._every_s = every_s
        self._requests: list[int] = []
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[list[tuple[int, float]]] = []
        self._endings: list[messages.TurnFinished] = []
        self._due = False

    def add(self, request: int, sampled: VllmTokens) -> None:
        """New tokens."""
        self._requests += [request] * len(sampled.tokens)
        self._tokens += sampled.tokens
        self._logprobs += sampled.logprobs
        self._top += sampled.top
        self._wake()

    def end(
        self, request: int, reason: Literal["stop", "length"], total_tokens: int, version: str
    ) -> None:
        """A request is whole; its ending follows its tokens."""
        self._endings.append(messages.TurnFinished(request, reason, total_tokens, version))
        self._wake()

    def _wake(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(self._every_s, self.flush)

    def flush(self) -> None:
        """One write: alternatives, tokens, endings."""
        self._due = False
        frames: list[bytes] = []
        if any(self._top):
            frames.append(messages.encode(messages.SampledTopK(self._top)))
        if self._tokens:
            columns = TokenColumns(
                np.array(self._requests, np.uint32),
                np.array(self._tokens, np.uint32),
                np.array(self._logprobs, np.float32),
            )
            frames.append(encode_frame(FrameKind.TOKENS, encode_tokens(columns)))
        frames += [messages.encode(ending) for ending in self._endings]
        self._requests, self._tokens, self._logprobs = [], [], []
        self._top, self._endings = [], []
        if frames:
            self._send(*frames)
