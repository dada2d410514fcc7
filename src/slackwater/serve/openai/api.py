"""OpenAI API: models, completions and chat completions, whole or streamed."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response, StreamingResponse

from slackwater.model.errors import ConfigError, SlackwaterError
from slackwater.model.ids import TenantId
from slackwater.model.sampling import Sampling
from slackwater.model.seeds import sample_seed
from slackwater.runtime.bodies.rollout import TurnResult
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.services.fair_work import FairWork
from slackwater.runtime.store import checkpoints as shelf
from slackwater.runtime.store.base_models import BaseModel
from slackwater.serve.http.auth import tenant_reader
from slackwater.serve.http.errors import error_body
from slackwater.serve.openai.answers import Answers, ChatAnswers, CompletionAnswers
from slackwater.serve.openai.bodies import ChatBody, CompletionBody, GenerationBody
from slackwater.serve.openai.generation import Asked, Generation, Piece
from slackwater.serve.openai.text import TextCodec, check_length


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

    async def _tokens(
        self, tenant: TenantId, body: CompletionBody, base: BaseModel, codec: TextCodec
    ) -> list[list[int]]:
        """The prompts as tokens; whatever is too much is refused before any is tokenised."""
        given = body.prompts()
        if not given:
            raise ConfigError.of("prompt", "[]", "must hold at least one prompt")
        self.plane.shares.check(tenant, len(given) * body.n, "prompts x n")
        for prompt in given:
            if isinstance(prompt, str):
                check_length(prompt, base.max_text_chars)
        run = self.plane.fair_work.run
        return [
            prompt if isinstance(prompt, list) else await run(tenant, codec.encode, prompt)
            for prompt in given
        ]

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
            prompts = [
                await self.plane.fair_work.run(tenant, codec.chat, messages, base.max_text_chars)
            ]
        else:
            prompts = await self._tokens(tenant, body, base, codec)
        seed = secrets.randbits(63) if body.seed is None else body.seed % 2**63
        asked = []
        for place in range(len(prompts) * body.n):
            prompt = prompts[place // body.n]
            sampling = _sampling(body, base, prompt, sample_seed(seed, place))
            asked.append(Asked(prompt, sampling, base.name, version))
            if place % 64 == 63:
                await asyncio.sleep(0)  # others' requests go between
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


async def _whole(
    request: Request, generation: Generation, answers: Answers, tenant: TenantId, work: FairWork
) -> Response:
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
        whole = await work.run(tenant, _json, answers, working.result())
        return Response(whole, media_type="application/json")
    finally:
        generation.close()
        working.cancel()
        watching.cancel()


def _json(answers: Answers, results: list[TurnResult]) -> bytes:
    return json.dumps(answers.whole(results), allow_nan=False).encode()


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
        generation.close()
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
        generation = Generation(plane, tenant, asked, stream=bool(body.stream))
        try:
            await generation.begin()
            if not body.stream:
                return await _whole(request, generation, answers, tenant, plane.fair_work)
        except BaseException:
            generation.close()
            raise
        return StreamingResponse(_stream(generation, answers), media_type="text/event-stream")

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
