"""Tool use in chats: prompts, grammars, and the format of calls.

Hermes and Qwen write `<tool_call>{"name": ..., "arguments": ...}</tool_call>`; Llama writes the
bare object with `parameters`. The chat template tells which. For a template without tools, a system
message describes the first format.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slackwater.model.errors import ConfigError, RefusedError
from slackwater.model.sampling import Grammar

Form = Literal["hermes", "llama"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_CALLS = 16
_INSTRUCTIONS = (
    "You may call functions to help with the user's request. Their signatures, as JSON:\n<tools>\n"
    "{tools}\n</tools>\nTo call one, answer with a JSON object inside tags:\n"
    '<tool_call>\n{{"name": NAME, "arguments": OBJECT}}\n</tool_call>'
)
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"


class ToolBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Function(ToolBody):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The schema of its arguments: those that it names, unless it says that it takes others."""
        schema = self.parameters or {"type": "object"}
        if "properties" in schema or not self.parameters:
            return {"additionalProperties": False, **schema}
        return schema


class Tool(ToolBody):
    type: Literal["function"]
    function: Function


class ChosenFunction(ToolBody):
    name: str


class ToolChoice(ToolBody):
    type: Literal["function"]
    function: ChosenFunction


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How one request uses tools; if `forced`, the answer is a call, of `only` if given."""

    tools: Sequence[Tool]
    form: Form
    forced: bool = False
    only: str | None = None
    parallel: bool = True

    @classmethod
    def create(
        cls,
        tools: Sequence[Tool],
        choice: ToolChoice | str | None,
        form: Form,
        parallel: bool | None,
    ) -> "ToolPlan | None":
        """None if no tool may be called."""
        if not tools or choice == "none":
            return None
        only = None
        if isinstance(choice, ToolChoice):
            only = choice.function.name
            names = [tool.function.name for tool in tools]
            if only not in names:
                raise ConfigError.of("tool_choice", only, f"must be one of {', '.join(names)}")
        forced = only is not None or choice == "required"
        return cls(tools, form, forced, only, parallel is not False and only is None)

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """The output's grammar: calls if forced, else calls or the requested answer format."""
        strict = any(tool.function.strict for tool in self.tools)
        if not self.forced and answer is None and not strict:
            return None
        calls = self._calls()
        if self.forced:
            return Grammar("lark", f"%llguidance {{}}\nstart: calls\n{calls}")
        if answer is not None:
            if answer.kind not in ("json_schema", "json_object"):
                raise RefusedError("tools: can be combined with a JSON response_format only")
            schema = json.loads(answer.source) if answer.source else {"type": "object"}
            return Grammar(
                "lark", f"%llguidance {{}}\nstart: calls | answer\nanswer: {_json(schema)}\n{calls}"
            )
        if self.form == "llama":
            raise RefusedError("tools: strict needs tool_choice 'required' with this model's form")
        text = "start: called* TEXT\nTEXT: /(.|\\n)*/\n"
        head = f"head[lazy]: TEXT {json.dumps(OPEN)}\n"
        body = (
            f"called: head /\\n?/ object /\\n?/ {json.dumps(CLOSE)}\nobject: "
            f"{self._objects('arguments')}\n"
        )
        return Grammar("lark", f"%llguidance {{}}\n{text}{head}{body}")

    def _calls(self) -> str:
        if self.form == "llama":
            return f"calls: object\nobject: {self._objects('parameters')}\n"
        more = f" (/\\n/ call){{0,{_MAX_CALLS - 1}}}" if self.parallel else ""
        return (
            f'calls: call{more}\ncall: "<tool_call>\\n" object "\\n</tool_call>"\n'
            f"object: {self._objects('arguments')}\n"
        )

    def _objects(self, key: str) -> str:
        """One alternative for every tool that may be called."""
        wanted = [t.function for t in self.tools if self.only in (None, t.function.name)]
        return " | ".join(
            _json(
                {
                    "type": "object",
                    "properties": {"name": {"const": one.name}, key: one.arguments},
                    "required": ["name", key],
                    "additionalProperties": False,
                }
            )
            for one in wanted
        )


def _json(schema: dict[str, Any]) -> str:
    lifted = _lift_definitions(schema)
    return "%json " + json.dumps({**lifted, "x-guidance": _JSON_STYLE})


def _lift_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    """Move the definitions of the properties' schemas to the top, where `#/$defs/...` points."""
    found: dict[str, Any] = {}
    properties = dict(schema.get("properties", {}))
    for name, inner in properties.items():
        if isinstance(inner, dict) and ("$defs" in inner or "definitions" in inner):
            inner = dict(inner)
            for key in ("$defs", "definitions"):
                if key in inner:
                    found.setdefault(key, {}).update(inner.pop(key))
            properties[name] = inner
    return {**schema, **found, "properties": properties} if properties else schema


def describe_tools_in_messages(
    messages: list[dict[str, Any]], tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """Describe tools, calls and results as plain text for a template without tools."""
    signatures = "\n".join(json.dumps(tool.model_dump(exclude_none=True)) for tool in tools)
    described = [_as_text(message) for message in messages]
    if tools:
        instructions = _INSTRUCTIONS.format(tools=signatures)
        if described and described[0]["role"] == "system":
            instructions = f"{described.pop(0)['content']}\n\n{instructions}"
        described.insert(0, {"role": "system", "content": instructions})
    return described


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    calls = message.get("tool_calls")
    if not calls:
        return message
    calls_text = [
        f"{OPEN}\n{json.dumps({key: call[key] for key in ('name', 'arguments')})}\n{CLOSE}"
        for call in (each["function"] for each in calls)
    ]
    text = [message["content"]] if message["content"] else []
    return {"role": message["role"], "content": "\n".join([*text, *calls_text])}


def parse_call_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Earlier calls with their arguments parsed: templates expect objects."""
    return [_parse_arguments_of(message) for message in messages]


def _parse_arguments_of(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    try:
        read = [
            {**call, "function": {**call["function"], "arguments": _read(call["function"])}}
            for call in calls
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError.of("messages: tool_calls", calls, f"cannot be read: {error!r}") from None
    return {**message, "tool_calls": read}


def _read(function: dict[str, Any]) -> Any:
    arguments = function["arguments"]
    return json.loads(arguments) if isinstance(arguments, str) and arguments else arguments or {}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model made; `arguments` is JSON text, as clients expect."""

    name: str
    arguments: str
    call_id: str

    def to_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


def read_calls(text: str, plan: ToolPlan) -> tuple[str, list[ToolCall]]:
    """The text before the calls, and the calls; anything but a valid call stays text."""
    known = {tool.function.name for tool in plan.tools}
    if plan.form == "llama":
        body = text.strip().removeprefix(_PYTHON_TAG).strip()
        calls = [_call(part, known) for part in body.split(";")] if body.startswith("{") else []
        if not calls or None in calls:
            calls = [_call(body, known)]
        found = [call for call in calls if call is not None]
        return ("", found) if found else (text, [])
    matches = (_call(match[1], known) for match in _CALL.finditer(text))
    found = [call for call in matches if call is not None]
    if not found:
        return text, []
    if not plan.parallel:
        found = found[:1]
    return text[: text.index(OPEN)].rstrip(), found


def _call(text: str, known: set[str]) -> ToolCall | None:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if name not in known:
        return None
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name, written, f"call_{secrets.token_hex(12)}")


class CallStream:
    """Splits streamed text into plain text and complete tool calls."""

    def __init__(self, plan: ToolPlan) -> None:
        self._plan = plan
        self._buffer = ""
        self._calling = False
        self._is_text = False
        self.count = 0

    def feed(self, text: str, *, final: bool = False) -> tuple[str, list[ToolCall]]:
        """New plain text and newly completed calls."""
        self._buffer += text
        if self._plan.form == "llama":
            return self._feed_llama(final)
        plain_text = ""
        calls: list[ToolCall] = []
        while True:
            if not self._calling:
                plain_text += self._take_text(final)
                if not self._calling:
                    return plain_text, calls
            end = self._buffer.find(CLOSE)
            if end < 0 and not final:
                return plain_text, calls
            whole = self._buffer if end < 0 else self._buffer[: end + len(CLOSE)]
            rest = "" if end < 0 else self._buffer[end + len(CLOSE) :]
            left, found = read_calls(whole, self._plan)
            calls += found if self._plan.parallel or not self.count else []
            plain_text += left
            self.count += len(found)
            self._buffer, self._calling = rest.lstrip("\n"), False
            if not self._buffer:
                return plain_text, calls

    def _take_text(self, final: bool) -> str:
        start = self._buffer.find(OPEN)
        if start >= 0:
            self._calling = True
            plain_text, self._buffer = self._buffer[:start], self._buffer[start:]
            return plain_text.rstrip("\n") if plain_text.strip() else ""
        keep = 0 if final else _overlap(self._buffer, OPEN)
        cut = len(self._buffer) - keep
        plain_text, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return "" if self.count and not plain_text.strip() else plain_text

    def _feed_llama(self, final: bool) -> tuple[str, list[ToolCall]]:
        """The whole answer is one call or plain text; after any text the rest is text."""
        if self._is_text:
            plain_text, self._buffer = self._buffer, ""
            return plain_text, []
        looks = self._buffer.lstrip()
        maybe = not looks or looks.startswith("{") or _PYTHON_TAG.startswith(looks[:13])
        if maybe and not final:
            return "", []
        plain_text, calls = read_calls(self._buffer, self._plan) if maybe else (self._buffer, [])
        self._is_text = not calls
        self.count += len(calls)
        self._buffer = ""
        return plain_text, calls


def _overlap(text: str, tag: str) -> int:
    """The longest suffix of `text` that is a prefix of `tag`."""
    return next(
        (n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0
    )
