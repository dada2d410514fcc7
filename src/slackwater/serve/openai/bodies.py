"""Request bodies of the OpenAI API with vLLM's additions.

Every field is implemented or refused by name, unknown ones too: an option that is accepted but
ignored would change results silently.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slackwater.model.errors import ConfigError, RefusedError
from slackwater.model.sampling import Grammar, GrammarKind
from slackwater.serve.openai.tools import Tool, ToolChoice
from slackwater.serve.tinker.bodies import Finite, Token

# Known options that are not supported, with their values that have no effect (null never has).
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "cache_salt": (),
    "chat_template": (),
    "early_stopping": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "metadata": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"], []),
    "moderation": (),
    "prediction": (),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_cache_retention": (),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
_INSTEAD = {
    "functions": "write tools",
    "function_call": "write tool_choice",
    "use_beam_search": "sample with n",
}


_MAX_DIGITS = 20  # Python refuses to parse a number of thousands of digits

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def refuse_extra(
    extra: Mapping[str, Any] | None,
    harmless: Mapping[str, tuple[Any, ...]],
    instead: Mapping[str, str],
) -> None:
    """Refuse undeclared fields, unless their value is null or has no effect."""
    for field, value in (extra or {}).items():
        if value is not None and value not in harmless.get(field, ()):
            fix = instead.get(field, "leave it out")
            raise RefusedError(f"{field}: is not supported here; {fix}")


class StrictBody(BaseModel):
    """Forbids unknown fields."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), populate_by_name=True)


class StreamOptions(StrictBody):
    include_usage: bool = False
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(StrictBody):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(default={}, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema", "regex", "choice", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def to_grammar(self) -> Grammar | None:
        """The grammar of the answer; None for plain text."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return Grammar("json_object")
            case "json_schema":
                if self.json_schema is None:
                    raise ConfigError.of("response_format.json_schema", None, "must be given")
                return Grammar("json_schema", json.dumps(self.json_schema.schema_))
            case kind:
                source = getattr(self, kind)
                if source is None:
                    raise ConfigError.of(f"response_format.{kind}", None, "must be given")
                return _grammar("lark" if kind == "grammar" else kind, source)


class StructuredOutputs(StrictBody):
    """vLLM's structured outputs; set one field."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def _grammar(kind: GrammarKind, source: Any) -> Grammar:
    return Grammar(kind, source if isinstance(source, str) else json.dumps(source))


BadWord = Annotated[str, Field(min_length=1, max_length=256)]


class GenerationBody(BaseModel):
    """Fields of both completions and chat completions."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str
    n: Annotated[int, Field(ge=1, le=128)] = 1
    best_of: Annotated[int | None, Field(ge=1, le=128)] = None
    temperature: Annotated[Finite | None, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[Finite | None, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    min_p: Annotated[Finite | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Token] | None, Field(max_length=256)] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    presence_penalty: Annotated[Finite | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[Finite | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[Finite | None, Field(gt=0, le=100)] = None
    logit_bias: Annotated[dict[str, Finite] | None, Field(max_length=1024)] = None
    allowed_token_ids: Annotated[list[Token] | None, Field(max_length=65536)] = None
    bad_words: Annotated[list[BadWord] | None, Field(max_length=256)] = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    truncate_prompt_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    # Identifiers of the caller; the answer does not depend on them.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    request_id: str | None = None

    def refuse_unsupported(self) -> None:
        """Refuse unsupported options instead of ignoring them."""
        refuse_extra(self.model_extra, _UNSUPPORTED, _INSTEAD)
        if self.best_of not in (None, self.n):
            raise RefusedError("best_of: is not supported; must equal n")
        if self.stream and self.prompt_logprobs is not None:
            raise RefusedError("prompt_logprobs: is not supported with stream; leave one out")

    @property
    def stop_strings(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        return [stop for stop in stops if stop]

    def biases(self) -> list[tuple[int, float]]:
        """`logit_bias` by token."""
        found = []
        for name, bias in (self.logit_bias or {}).items():
            if not name.isdecimal() or len(name) > _MAX_DIGITS:
                raise ConfigError.of("logit_bias", name[:100], "must name tokens by their ids")
            found.append((int(name), bias))
        return sorted(found)

    def grammar(self) -> Grammar | None:
        """The requested output grammar from any of its fields; at most one."""
        outputs = self.structured_outputs or StructuredOutputs()
        sources: list[tuple[GrammarKind, Any]] = [
            ("json_schema", outputs.json_),
            ("json_schema", self.guided_json),
            ("regex", outputs.regex),
            ("regex", self.guided_regex),
            ("choice", outputs.choice),
            ("choice", self.guided_choice),
            ("lark", outputs.grammar),
            ("lark", self.guided_grammar),
        ]
        grammars = [_grammar(kind, source) for kind, source in sources if source is not None]
        if outputs.json_object:
            grammars.append(Grammar("json_object"))
        if self.response_format and (grammar := self.response_format.to_grammar()):
            grammars.append(grammar)
        if len(grammars) > 1:
            raise ConfigError.of(
                "response_format", "and others", "request two forms of answer; keep one"
            )
        return grammars[0] if grammars else None


class CompletionBody(GenerationBody):
    """With `echo`, `max_tokens` may be 0: only the prompt is returned, with its scores."""

    prompt: str | list[Token] | list[str] | list[list[Token]]
    max_tokens: Annotated[int | None, Field(ge=0, lt=2**31)] = 16
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    echo: bool | None = False

    @property
    def only_prompt(self) -> bool:
        """Whether nothing is to be generated."""
        return self.max_tokens == 0

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if self.only_prompt and not self.echo:
            raise ValueError("max_tokens: 0 must be at least 1 without echo")
        return self

    def prompts(self) -> list[str | list[int]]:
        """One or more, as text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if len(self.prompt) and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(cast(list[str | list[int]], self.prompt))


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """Other fields go to the chat template, which may read them."""

    model_config = ConfigDict(extra="allow")
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates expect it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ChatBody(GenerationBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: Annotated[list[Tool] | None, Field(max_length=256)] = None
    tool_choice: ToolChoice | Literal["none", "auto", "required"] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    continuous_tokens: bool | None = None

    def refuse_unsupported(self) -> None:
        extra = self.model_extra or {}
        if extra.get("echo"):
            raise RefusedError("echo: is not supported for chat; use /v1/completions")
        extra.pop("echo", None)
        super().refuse_unsupported()
        if self.top_logprobs and not self.logprobs:
            raise ConfigError.of("top_logprobs", self.top_logprobs, "needs logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ConfigError.of(
                "continue_final_message", True, "excludes add_generation_prompt; set one of them"
            )
        if self.continuous_tokens and self.continue_final_message:
            fix = "excludes continue_final_message; set one of them"
            raise ConfigError.of("continuous_tokens", True, fix)
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ConfigError.of("tool_choice", self.tool_choice, "needs tools")
