"""OpenAI API: models, completions and chat completions, whole or streamed."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from slackwater.model.errors import ConfigError, SlackwaterError
from slackwater.model.ids import TenantId
from slackwater.model.sampling import Sampling
from slackwater.model.seeds import sample_seed
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.store import checkpoints as shelf
from slackwater.runtime.store.base_models import BaseModel
from slackwater.serve.http.auth import tenant_reader
from slackwater.serve.http.errors import error_body
from slackwater.serve.openai.answers import Answers, ChatAnswers, CompletionAnswers
from slackwater.serve.openai.bodies import ChatBody, CompletionBody, GenerationBody
from slackwater.serve.openai.generation import Asked, Generation, Piece
from slackwater.serve.openai.text import TextCodec


class OpenAiFace:
    """What the routes of this file share."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self._codecs: dict[str, TextCodec] = {}

    async def codec(self, base: BaseModel) -> TextCodec:
        """The model's tokenizer, loaded once."""
        if base.name not in self._codecs:
            self._codecs[base.name] = await asyncio.to_thread(TextCodec, base.directory)
        return self._codecs[base.name]

    async def weights(self, tenant: TenantId, model: str) -> tuple[BaseModel, str]:
        """A base model by name, or sampler weights by their path."""
        if not model.startswith("tinker://"):
            base = self.plane.bases.get(model)
            return base, base.version
        held = await self.plane.store.call(
            lambda c: shelf.find_checkpoint(c, tenant, model, time.time())
        )
        if held.kind != shelf.SAMPLER:
            raise ConfigError.of("model", model, "must be sampler weights, or a base model's name")
        return self.plane.bases.get(held.base_model), held.held_as

    async def prepare(
        self, tenant: TenantId, body: CompletionBody | ChatBody
    ) -> tuple[list[Asked], Answers]:
        """The choices to generate, and how to write the answers."""
        body.refuse_unsupported()
        base, version = await self.weights(tenant, body.model)
        codec = await self.codec(base)
        prompts: list[list[int]]
        if isinstance(body, ChatBody):
            messages = [message.plain() for message in body.messages]
            prompts = [await asyncio.to_thread(codec.chat, messages)]
        else:
            prompts = [
                given if isinstance(given, list) else await asyncio.to_thread(codec.encode, given)
                for given in body.prompts()
            ]
        if not prompts:
            raise ConfigError.of("prompt", "[]", "must hold at least one prompt")
        seed = secrets.randbits(63) if body.seed is None else body.seed % 2**63
        asked = [
            Asked(
                prompt, _sampling(body, base, prompt, sample_seed(seed, place)), base.name, version
            )
            for place, prompt in enumerate(prompt for prompt in prompts for _ in range(body.n))
        ]
        shown = [item.prompt for item in asked]
        if isinstance(body, ChatBody):
            return asked, ChatAnswers(body, codec, shown)
        return asked, CompletionAnswers(body, codec, shown)


def _sampling(body: GenerationBody, base: BaseModel, prompt: list[int], seed: int) -> Sampling:
    room = base.room_after(prompt)
    wanted, topk, scores = _wishes(body)
    stops = [] if body.ignore_eos else base.stop_token_ids
    return Sampling(
        max_tokens=min(wanted or room, room),
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        seed=seed,
        stop_token_ids=sorted({*stops, *body.stop_token_ids}),
        stop_strings=body.stop_strings,
        prompt_logprobs=scores,
        topk_prompt_logprobs=topk if scores else 0,
        topk_logprobs=topk,
    )


def _wishes(body: GenerationBody) -> tuple[int | None, int, bool]:
    """Tokens wanted, alternatives per token, and whether the prompt is scored too."""
    if isinstance(body, ChatBody):
        wanted = body.max_completion_tokens or body.max_tokens
        return wanted, (body.top_logprobs or 0) if body.logprobs else 0, False
    assert isinstance(body, CompletionBody)
    echo_scores = bool(body.echo) and body.logprobs is not None
    return body.max_tokens, body.logprobs or 0, echo_scores


async def _whole(request: Request, generation: Generation, answers: Answers) -> Response:
    """Answer when all is there; a client that leaves is not worked for."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.create_task(generation.results())
    watching = asyncio.create_task(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return Response(status_code=204)  # which nobody will read
        return JSONResponse(answers.whole(working.result()))
    finally:
        working.cancel()
        watching.cancel()


async def _stream(generation: Generation, answers: Answers) -> AsyncIterator[bytes]:
    try:
        for chunk in answers.opening():
            yield _event(chunk)
        async for event in generation.events():
            chunks = answers.piece(event) if isinstance(event, Piece) else answers.end(event)
            for chunk in chunks:
                yield _event(chunk)
        for chunk in answers.closing():
            yield _event(chunk)
    except SlackwaterError as error:
        yield _event(error_body("/v1/", 503, str(error)))
    finally:
        generation.__exit__()
    yield b"data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, allow_nan=False).encode() + b"\n\n"


def openai_routes(plane: ControlPlane) -> APIRouter:
    face = OpenAiFace(plane)
    router = APIRouter(prefix="/v1", tags=["openai"])
    caller = Annotated[TenantId, Depends(tenant_reader(plane.tenants))]

    async def answer(
        tenant: TenantId, body: CompletionBody | ChatBody, request: Request
    ) -> Response:
        asked, answers = await face.prepare(tenant, body)
        if body.stream:
            generation = Generation(plane, asked, stream=True).__enter__()
            return StreamingResponse(_stream(generation, answers), media_type="text/event-stream")
        with Generation(plane, asked, stream=False) as generation:
            return await _whole(request, generation, answers)

    @router.post("/completions")
    async def completions(body: CompletionBody, tenant: caller, request: Request) -> Response:
        return await answer(tenant, body, request)

    @router.post("/chat/completions")
    async def chat(body: ChatBody, tenant: caller, request: Request) -> Response:
        return await answer(tenant, body, request)

    @router.get("/models")
    async def models(tenant: caller) -> dict[str, Any]:
        held = await plane.store.call(lambda c: shelf.list_checkpoints(c, tenant, time.time()))
        listed = [_model(base.name, 0) for base in plane.bases]
        listed += [_model(item.path, item.created_s) for item in held if item.kind == shelf.SAMPLER]
        return {"object": "list", "data": listed}

    @router.get("/models/{name:path}")
    async def model(name: str, tenant: caller) -> dict[str, Any]:
        await face.weights(tenant, name)
        return _model(name, 0)

    return router


def _model(name: str, created_s: float) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created_s), "owned_by": "slackwater"}
