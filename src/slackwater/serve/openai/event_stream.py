"""Server-sent events with little work per token.

Starlette starts a task group per response; here one task writes and one watches for a disconnect.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import Response
from msgspec.json import encode
from starlette.types import Receive, Scope, Send

from slackwater.model.errors import SlackwaterError
from slackwater.serve.http.errors import error_body
from slackwater.serve.openai.answers import ResponseWriter
from slackwater.serve.openai.generation import ChoiceDelta, Generation

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_SLICE = 64
_DEPTH = 5  # reaches the tokens of a choice


class EventStream(Response):
    """Streams a generation as events and always closes it."""

    def __init__(self, generation: Generation, answers: ResponseWriter) -> None:
        super().__init__(media_type="text/event-stream")
        self._generation = generation
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(self._generation.until_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            async for data in self._events():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        finally:
            watching.cancel()
            self._generation.close()

    async def _events(self) -> AsyncIterator[bytes]:
        answers = self._answers
        try:
            if opening := answers.opening():
                yield _events(opening)
            async for event in self._generation.events():
                if not isinstance(event, ChoiceDelta):
                    yield _events(answers.end(event))
                elif (data := answers.plain_piece(event)) is not None:
                    if data:
                        yield data
                elif chunks := answers.piece(event):
                    yield _events(chunks)
            if closing := answers.closing():
                yield _events(closing)
        except SlackwaterError as error:
            yield _events([error_body("/v1/", 503, str(error))])


def _events(chunks: list[dict[str, Any]]) -> bytes:
    return b"".join(
        _kind(chunk) + b"data: " + json.dumps(chunk, allow_nan=False).encode() + b"\n\n"
        for chunk in chunks
    )


def _kind(chunk: dict[str, Any]) -> bytes:
    """The event line of a typed event (/v1/responses)."""
    return f"event: {chunk['type']}\n".encode() if "type" in chunk else b""


def encode_sliced_json(value: Any, depth: int = _DEPTH) -> bytes:
    """Compact JSON, encoded in slices so that other threads can run in between; NaN is null."""
    if depth and isinstance(value, dict):
        parts = [
            encode(key) + b":" + encode_sliced_json(each, depth - 1) for key, each in value.items()
        ]
        return b"{" + b",".join(parts) + b"}"
    if not isinstance(value, list) or not value:
        return encode(value)
    if depth > 2 and isinstance(value[0], dict):  # the choices of an answer
        parts = [encode_sliced_json(each, depth - 1) for each in value]
    else:
        starts = range(0, len(value), _SLICE)
        parts = [encode(value[start : start + _SLICE])[1:-1] for start in starts]
    return b"[" + b",".join(parts) + b"]"
