"""OpenAI API: completions, chat completions and responses, whole or streamed."""

import asyncio
import secrets
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from slackwater.grammar.guides import check
from slackwater.model.errors import ConfigError
from slackwater.model.ids import TenantId
from slackwater.model.job_life import job_of_key
from slackwater.runtime.services.loop_shares import FairWork
from slackwater.runtime.store.base_models import BaseModel
from slackwater.serve.front.gateway import Gateway
from slackwater.serve.http.auth import Caller, find_job
from slackwater.serve.http.large_bodies import LargeBodyRoute
from slackwater.serve.http.limits import arrival_s
from slackwater.serve.openai.answers import ChatAnswers, CompletionAnswers, ResponseWriter
from slackwater.serve.openai.bodies import ChatBody, CompletionBody
from slackwater.serve.openai.event_stream import EventStream, encode_sliced_json
from slackwater.serve.openai.generation import Generation
from slackwater.serve.openai.prompts import Conversation
from slackwater.serve.openai.responses import ResponseAnswers, ResponsesBody
from slackwater.serve.openai.sampling_params import bad_word_tokens, most_tokens, to_sampling
from slackwater.serve.openai.text import TextCodec, TextCodecs, check_length
from slackwater.serve.openai.token_history import ConversationRecord, TokenHistory
from slackwater.serve.openai.tools import ToolPlan
from slackwater.wire.front import GenerateChoices

# Work below these sizes takes less time than a hop to another thread and the wait for the GIL.
_SHORT_CHARS = 256
_GROUP_CHARS = 1 << 14
_FEW_TOKENS = 64


class OpenAiHandlers:
    """State and preparation shared by the OpenAI routes."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.codecs = TextCodecs()
        self._history = TokenHistory()

    async def encode(
        self,
        tenant: TenantId,
        base: BaseModel,
        codec: TextCodec,
        texts: Sequence[str],
        special: bool = True,
    ) -> list[list[int]]:
        """Tokenize texts; those that cannot fit the context are refused first."""
        for text in texts:
            check_length(text, base.max_text_chars)
        if len(texts) == 1 and len(texts[0]) <= _SHORT_CHARS:
            return codec.encode_all(texts, special=special)
        found: list[list[int]] = []
        for group in _groups(texts):
            encode = partial(codec.encode_all, group, special=special)
            found += await self.gateway.fair_work.run(tenant, encode)
        return found

    async def chat_tokens(
        self,
        tenant: TenantId,
        base: BaseModel,
        codec: TextCodec,
        chat: Conversation,
        record: ConversationRecord | None = None,
    ) -> list[int]:
        """Tokenize a conversation; tokens on record (`continuous_tokens`) are reused."""
        if record is not None and (known := record.find_known_prefix()) is not None:
            count, tokens = known
            run = self.gateway.fair_work.run
            return await run(tenant, chat.tokens_after, codec, tokens, count, base.max_text_chars)
        return await self.gateway.fair_work.run(tenant, chat.tokens, codec, base.max_text_chars)

    async def prepare(
        self,
        tenant: TenantId,
        body: CompletionBody | ChatBody,
        request: Request,
        response: ResponsesBody | None = None,
    ) -> tuple[GenerateChoices, ResponseWriter]:
        """The choices to generate, and the writer of the answer (`response`: of /v1/responses)."""
        body.refuse_unsupported()
        base, version = await self.gateway.weights(tenant, body.model)
        codec = await self.codecs.load(base)
        plan, grammar, record = None, body.grammar(), None
        if isinstance(body, ChatBody):
            plan = ToolPlan.create(
                body.tools or (), body.tool_choice, codec.tool_form, body.parallel_tool_calls
            )
            grammar = grammar if plan is None else plan.grammar(grammar)
            chat = _conversation(body)
            if body.continuous_tokens:
                options = [chat.variables, [tool.model_dump() for tool in chat.tools]]
                owner = f"{tenant}/{base.name}"
                record = ConversationRecord(self._history, owner, options, chat.messages)
            prompts = [await self.chat_tokens(tenant, base, codec, chat, record)]
        else:
            prompts = await self._prompts(tenant, body, base, codec)
        if grammar is not None:
            await self.gateway.fair_work.run(tenant, check, grammar)
        if body.truncate_prompt_tokens is not None:
            prompts = [prompt[-body.truncate_prompt_tokens :] for prompt in prompts]
        seed = secrets.randbits(63) if body.seed is None else body.seed % 2**63
        max_tokens = [most_tokens(body, base, prompt) for prompt in prompts]
        sampling = to_sampling(body, base, min(max_tokens), seed, grammar)
        if body.bad_words:
            words = await self.gateway.fair_work.run(tenant, bad_word_tokens, codec, body.bad_words)
            sampling = replace(sampling, bad_words=words)
        choices = GenerateChoices(
            number=0,  # the gateway sets it
            tenant=tenant,
            job=job_of_key(tenant, find_job(self.gateway.tenants, request.headers)),
            base_model=base.name,
            version=version,
            stream=bool(body.stream),
            arrived_s=arrival_s(request.scope),
            sampling=sampling,
            n=body.n,
            prompts=[array("I", prompt).tobytes() for prompt in prompts],
            max_tokens=max_tokens,
        )
        per_choice = [prompt for prompt in prompts for _ in range(body.n)]
        if isinstance(body, CompletionBody):
            return choices, CompletionAnswers(body, codec, per_choice)
        if response is not None:
            return choices, ResponseAnswers(response, body, codec, per_choice, plan)
        return choices, ChatAnswers(body, codec, per_choice, plan, record)

    async def _prompts(
        self, tenant: TenantId, body: CompletionBody, base: BaseModel, codec: TextCodec
    ) -> list[list[int]]:
        """The prompts as tokens; every limit is checked before any is tokenized."""
        items = body.prompts()
        if not items:
            raise ConfigError.of("prompt", "[]", "must hold at least one prompt")
        self.gateway.shares.check(tenant, len(items) * body.n, "prompts x n")
        special = body.add_special_tokens is not False
        texts = [item for item in items if isinstance(item, str)]
        for item in items:
            if not isinstance(item, str):
                base.check_length(item)
        encoded = iter(await self.encode(tenant, base, codec, texts, special))
        return [next(encoded) if isinstance(item, str) else list(item) for item in items]


def _groups(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Consecutive groups of texts, small enough that other tenants wait only briefly."""
    first, chars = 0, 0
    for place, text in enumerate(texts):
        chars += len(text)
        if chars > _GROUP_CHARS and place > first:
            yield texts[first:place]
            first, chars = place, len(text)
    if texts:
        yield texts[first:]


def _conversation(body: ChatBody) -> Conversation:
    variables = dict(body.chat_template_kwargs or {})
    if body.documents:
        variables["documents"] = body.documents
    return Conversation(
        [message.plain() for message in body.messages],
        () if body.tool_choice == "none" else body.tools or (),
        variables,
        body.add_generation_prompt is not False,
        bool(body.continue_final_message),
        bool(body.add_special_tokens),
        body.reasoning_effort,
    )


async def _whole(
    request: Request,
    generation: Generation,
    answers: ResponseWriter,
    tenant: TenantId,
    work: FairWork,
) -> Response:
    """The complete answer; work stops if the client disconnects."""
    watching = asyncio.create_task(generation.until_gone(request.receive))
    try:
        results = await generation.results()
        if results is None:
            return Response(status_code=204)  # nobody reads it
        if sum(len(result.tokens) for result in results) <= _FEW_TOKENS and answers.only_text:
            whole = encode_sliced_json(answers.whole(results))
        else:
            whole = await work.run(tenant, lambda: encode_sliced_json(answers.whole(results)))
        return Response(whole, media_type="application/json")
    finally:
        generation.close()
        watching.cancel()


def openai_routes(handlers: OpenAiHandlers) -> APIRouter:
    gateway = handlers.gateway
    router = APIRouter(route_class=LargeBodyRoute, prefix="/v1", tags=["openai"])

    async def answer(
        tenant: TenantId,
        body: CompletionBody | ChatBody,
        request: Request,
        response: ResponsesBody | None = None,
    ) -> Response:
        choices, answers = await handlers.prepare(tenant, body, request, response)
        generation = Generation(gateway, choices)
        try:
            await generation.begin()
            if not body.stream:
                return await _whole(request, generation, answers, tenant, gateway.fair_work)
        except BaseException:
            generation.close()
            raise
        return EventStream(generation, answers)

    @router.post("/completions")
    async def completions(body: CompletionBody, tenant: Caller, request: Request) -> Response:
        return await answer(tenant, body, request)

    @router.post("/chat/completions")
    async def chat(body: ChatBody, tenant: Caller, request: Request) -> Response:
        return await answer(tenant, body, request)

    @router.post("/responses")
    async def responses(body: ResponsesBody, tenant: Caller, request: Request) -> Response:
        return await answer(tenant, body.to_chat(), request, body)

    return router
