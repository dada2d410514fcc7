"""Endpoints that harnesses expect of a vLLM server; unsupported ones are refused by name."""

from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field

from slackwater.model.errors import ConfigError, RefusedError
from slackwater.runtime.store.base_models import BaseModel
from slackwater.serve.http.auth import Caller
from slackwater.serve.http.large_bodies import LargeBodyRoute
from slackwater.serve.openai.api import OpenAiHandlers
from slackwater.serve.openai.bodies import ChatMessage, StrictBody
from slackwater.serve.openai.event_stream import encode_sliced_json
from slackwater.serve.openai.prompts import Conversation
from slackwater.serve.openai.text import TextCodec
from slackwater.serve.openai.tools import Tool
from slackwater.serve.tinker.bodies import Token

_UNSUPPORTED = {
    "embeddings": "this service generates; it has no embeddings",
    "rerank": "this service generates; it ranks nothing",
    "score": "this service generates; it scores no pairs",
    "audio/transcriptions": "this service reads text",
    "audio/translations": "this service reads text",
    "audio/speech": "this service writes text",
    "images/generations": "this service writes text",
    "moderations": "this service judges nothing",
    "files": "this service keeps no files",
    "batches": "send the requests; they are batched as they come",
    "fine_tuning/jobs": "train through the Tinker API",
}


class TokenizeBody(StrictBody):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage] | None, Field(min_length=1)] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(StrictBody):
    model: str | None = None
    tokens: Annotated[list[Token], Field(max_length=1 << 20)]


def _tokenize_response(
    base: BaseModel, codec: TextCodec, tokens: list[int], strings: bool
) -> bytes:
    found = {
        "count": len(tokens),
        "max_model_len": base.max_context_tokens,
        "tokens": tokens,
        "token_strs": [codec.token_text(token) for token in tokens] if strings else None,
    }
    return encode_sliced_json(found)


def health_routes() -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, tags=["openai"])

    @router.get("/health")
    @router.get("/ping")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": version("slackwater")}

    return router


def token_routes(handlers: OpenAiHandlers) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, tags=["openai"])
    gateway = handlers.gateway

    def only_model(given: str | None) -> str:
        """The given model, or the only one that is served."""
        names = [base.name for base in gateway.bases]
        if given is None and len(names) != 1:
            raise ConfigError.of("model", None, f"must be given: one of {', '.join(names)}")
        return given or str(names[0])

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody, tenant: Caller) -> Response:
        base, _ = await gateway.weights(tenant, only_model(body.model))
        codec = await handlers.codecs.load(base)
        if (body.prompt is None) == (body.messages is None):
            raise ConfigError.of("prompt", body.prompt, "must be given, unless messages are")
        if body.messages is None:
            special = body.add_special_tokens is not False
            (tokens,) = await handlers.encode(tenant, base, codec, [body.prompt or ""], special)
        else:
            chat = Conversation(
                [message.plain() for message in body.messages],
                body.tools or (),
                body.chat_template_kwargs or {},
                body.add_generation_prompt,
                body.continue_final_message,
            )
            tokens = await handlers.chat_tokens(tenant, base, codec, chat)
        strings = bool(body.return_token_strs)
        written = await gateway.fair_work.run(
            tenant, _tokenize_response, base, codec, tokens, strings
        )
        return Response(written, media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody, tenant: Caller) -> dict[str, str]:
        base, _ = await gateway.weights(tenant, only_model(body.model))
        if len(body.tokens) > 2 * base.max_context_tokens:
            fix = f"must be at most {2 * base.max_context_tokens}"
            raise ConfigError.of("tokens", f"{len(body.tokens)} of them", fix)
        codec = await handlers.codecs.load(base)

        def decode() -> str:
            largest = max(body.tokens, default=0)
            if largest >= base.vocab_size:
                raise ConfigError.of("tokens", largest, f"must be below {base.vocab_size}")
            return codec.decode(body.tokens, special=True)

        return {"prompt": await gateway.fair_work.run(tenant, decode)}

    return router


def refusal_routes() -> APIRouter:
    """Endpoints of OpenAI's own service that are refused, each with an alternative."""
    router = APIRouter(route_class=LargeBodyRoute, prefix="/v1", tags=["openai"])

    def refuse(name: str, instead: str) -> None:
        async def refuse_request(tenant: Caller) -> None:
            raise RefusedError(f"/v1/{name}: is not served here; {instead}")

        router.add_api_route(f"/{name}", refuse_request, methods=["POST"], include_in_schema=False)

    for name, instead in _UNSUPPORTED.items():
        refuse(name, instead)
    return router
