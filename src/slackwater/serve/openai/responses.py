"""`/v1/responses`: OpenAI's newer chat API, translated to chat completions.

Nothing is stored: clients send the whole conversation each time.
"""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from slackwater.model.errors import ConfigError, RefusedError
from slackwater.runtime.executors.turn_results import TurnResult
from slackwater.serve.openai.answers import ChatAnswers
from slackwater.serve.openai.bodies import ChatBody, ReasoningEffort, StrictBody, refuse_extra
from slackwater.serve.openai.generation import ChoiceDelta, FinishedChoice
from slackwater.serve.openai.text import TextCodec
from slackwater.serve.openai.tools import ToolPlan
from slackwater.serve.tinker.bodies import Finite

Json = dict[str, Any]
# Unsupported options, with their values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "conversation": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "stream_options": ({},),
}
_INSTEAD = {
    "previous_response_id": "send the whole conversation as input",
    "conversation": "send the whole conversation as input",
    "store": "nothing is stored here; write false",
}


class ReasoningOptions(StrictBody):
    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class TextOptions(StrictBody):
    format: Json | None = None
    verbosity: None = None


class ResponsesBody(StrictBody):
    """A request; unknown fields are refused by name."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str
    input: str | Annotated[list[Json], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    temperature: Annotated[Finite | None, Field(ge=0, le=100)] = None
    top_p: Annotated[Finite | None, Field(gt=0, le=1)] = None
    tools: Annotated[list[Json] | None, Field(max_length=256)] = None
    tool_choice: Json | Literal["none", "auto", "required"] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = False
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def to_chat(self) -> ChatBody:
        """The same request as a chat completion."""
        refuse_extra(self.model_extra, _UNSUPPORTED, _INSTEAD)
        chat: Json = {
            "model": self.model,
            "messages": _messages(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "tools": [_tool(tool) for tool in self.tools] if self.tools else None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _format(self.text.format if self.text else None),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "stream": self.stream,
            "seed": self.seed,
        }
        try:
            return ChatBody.model_validate(chat)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ConfigError.of(place, str(first.get("input"))[:100], first["msg"]) from None


def _messages(instructions: str | None, given: str | list[Json]) -> list[Json]:
    """Items of the input as messages; calls of one turn are one message."""
    messages: list[Json] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in given:
        kind = item.get("type", "message")
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": _text(item.get("content"))})
        elif kind == "function_call":
            if messages and messages[-1]["role"] == "assistant":
                calls = messages[-1].setdefault("tool_calls", [])
            else:
                calls = []
                messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            called = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not all(isinstance(value, str) for value in called.values()):
                fix = "must have a name and arguments, both text"
                raise ConfigError.of("input.function_call", str(called)[:100], fix)
            calls.append({"id": item.get("call_id"), "type": "function", "function": called})
        elif kind == "function_call_output":
            output = _text(item.get("output"))
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            )
        elif kind != "reasoning":  # this service never writes reasoning items
            raise RefusedError(f"input: items of type {str(kind)[:50]!r} are not supported here")
    return messages


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        known = kind in ("input_text", "output_text", "text")
        if not known or not isinstance(part.get("text"), str):
            fix = "must be text, or parts of type input_text or output_text"
            raise ConfigError.of("input.content", str(part)[:50], fix)
    return "".join(part["text"] for part in parts)


def _tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise RefusedError(f"tools: {str(tool.get('type'))[:50]!r} is not supported; use functions")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _choice(choice: Json | str | None) -> Any:
    if isinstance(choice, dict):
        return {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    return choice


def _format(wanted: Json | None) -> Json | None:
    if wanted is None or wanted.get("type") != "json_schema":
        return wanted
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in wanted.items() if name != "type"},
    }


class ResponseAnswers(ChatAnswers):
    """A chat's answer as a response object, or as its typed events."""

    def __init__(
        self,
        body: ResponsesBody,
        chat: ChatBody,
        codec: TextCodec,
        prompts: Sequence[Sequence[int]],
        plan: ToolPlan | None = None,
    ) -> None:
        super().__init__(chat, codec, prompts, plan)
        self._request = body
        self._id = f"resp_{secrets.token_hex(16)}"
        self._sequence = 0
        self._output: list[Json] = []
        self._text: Json | None = None  # the message that is being streamed

    def whole(self, results: Sequence[TurnResult]) -> Json:
        answer = super().whole(results)
        choice = answer["choices"][0]
        message, cut = choice["message"], choice["finish_reason"] == "length"
        output = []
        if message["content"] or not message.get("tool_calls"):
            output.append(_message(message["content"] or "", cut=cut))
        output += [_function_call(call) for call in message.get("tool_calls", ())]
        return self._response(output, _status(cut), answer["usage"])

    def opening(self) -> list[Json]:
        begun = self._response([], "in_progress", None)
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
        ]

    def plain_piece(self, event: ChoiceDelta) -> bytes | None:
        return None

    def piece(self, event: ChoiceDelta) -> list[Json]:
        return [each for chunk in super().piece(event) for each in self._chunk_events(chunk)]

    def end(self, event: FinishedChoice) -> list[Json]:
        events, cut = list[Json](), event.result.reason.value == "length"
        for chunk in super().end(event):
            events += self._chunk_events(chunk)
        if self._text is None and not self._output:
            events += self._begin_text()
        events += self._end_text(cut=cut)
        status = _status(cut)
        whole = self._response(self._output, status, self._usage([len(event.result.tokens)]))
        return [*events, self._event(f"response.{status}", response=whole)]

    def closing(self) -> list[Json]:
        return []

    def _chunk_events(self, chunk: Json) -> list[Json]:
        """The events of one chunk of the chat's stream."""
        events: list[Json] = []
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if text := delta.get("content"):
                events += [] if self._text is not None else self._begin_text()
                assert self._text is not None
                self._text["content"][0]["text"] += text
                events.append(self._part_event("response.output_text.delta", delta=text))
            for call in delta.get("tool_calls", ()):
                events += self._end_text(cut=False)
                events += self._call(_function_call(call))
        return events

    def _begin_text(self) -> list[Json]:
        self._text = _message("")
        place = len(self._output)
        begun = {**self._text, "status": "in_progress", "content": []}
        part = dict(self._text["content"][0])
        return [
            self._event("response.output_item.added", output_index=place, item=begun),
            self._part_event("response.content_part.added", part=part),
        ]

    def _end_text(self, *, cut: bool) -> list[Json]:
        if self._text is None:
            return []
        item = {**self._text, "status": _status(cut)}
        part = item["content"][0]
        events = [
            self._part_event("response.output_text.done", text=part["text"]),
            self._part_event("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=len(self._output), item=item),
        ]
        self._output.append(item)
        self._text = None
        return events

    def _call(self, item: Json) -> list[Json]:
        place = {"output_index": len(self._output)}
        named = {**place, "item_id": item["id"]}
        begun = {**item, "arguments": "", "status": "in_progress"}
        written = item["arguments"]
        self._output.append(item)
        return [
            self._event("response.output_item.added", **place, item=begun),
            self._event("response.function_call_arguments.delta", **named, delta=written),
            self._event(
                "response.function_call_arguments.done",
                **named,
                name=item["name"],
                arguments=written,
            ),
            self._event("response.output_item.done", **place, item=item),
        ]

    def _part_event(self, kind: str, **fields: Any) -> Json:
        assert self._text is not None
        at = {"item_id": self._text["id"], "output_index": len(self._output), "content_index": 0}
        if kind.startswith("response.output_text"):
            at["logprobs"] = []
        return self._event(kind, **at, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _response(self, output: list[Json], status: str, usage: dict[str, int] | None) -> Json:
        asked = self._request
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": asked.model,
            "output": list(output),
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": asked.reasoning.effort if asked.reasoning else None,
                "summary": None,
            },
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": (asked.text.format if asked.text else None) or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": asked.user,
            "metadata": asked.metadata or {},
        }


def _status(cut: bool) -> str:
    return "incomplete" if cut else "completed"


def _message(text: str, *, cut: bool = False) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{secrets.token_hex(16)}",
        "type": "message",
        "status": _status(cut),
        "role": "assistant",
        "content": [part],
    }


def _function_call(call: Json) -> Json:
    return {
        "id": f"fc_{secrets.token_hex(16)}",
        "type": "function_call",
        "status": "completed",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
    }


def _usage(chat: dict[str, int]) -> Json:
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": chat["total_tokens"],
    }
