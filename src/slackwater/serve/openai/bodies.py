"""Request bodies of the OpenAI API: what is supported, and what is refused by name."""

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from slackwater.model.errors import RefusedError
from slackwater.serve.tinker.bodies import Finite, Token

# Fields that change the answer and are not done here: refused unless they ask for nothing.
_UNSUPPORTED = (
    "logit_bias",
    "tools",
    "functions",
    "response_format",
    "suffix",
    "audio",
    "modalities",
)
_NEUTRAL: tuple[Any, ...] = (None, {}, [], "", {"type": "text"}, ["text"])


class StreamOptions(BaseModel):
    include_usage: bool = False


class GenerationBody(BaseModel):
    """What both endpoints share. Unknown fields are allowed, as clients send many that mean nothing."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str
    n: Annotated[int, Field(ge=1, le=128)] = 1
    temperature: Annotated[Finite | None, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[Finite | None, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: list[Token] = []
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    presence_penalty: Finite | None = 0.0
    frequency_penalty: Finite | None = 0.0
    return_token_ids: bool | None = False
    ignore_eos: bool = False
    user: str | None = None

    def refuse_unsupported(self) -> None:
        """Say so rather than answer something else."""
        given = self.model_extra or {}
        for field in _UNSUPPORTED:
            if given.get(field) not in _NEUTRAL:
                raise RefusedError(f"{field}: is not supported here; leave it out")
        for field in ("presence_penalty", "frequency_penalty"):
            if getattr(self, field):
                raise RefusedError(f"{field}: {getattr(self, field)} is not supported; must be 0")
        if given.get("best_of") not in (None, self.n):
            raise RefusedError("best_of: is not supported; must equal n")

    @property
    def stop_strings(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        return [stop for stop in stops if stop]


class CompletionBody(GenerationBody):
    prompt: str | list[Token] | list[str] | list[list[Token]]
    max_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = 16
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    echo: bool | None = False

    def prompts(self) -> list[str | list[int]]:
        """One or more, as text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(cast(list[str | list[int]], self.prompt))


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
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
