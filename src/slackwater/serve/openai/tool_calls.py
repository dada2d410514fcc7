"""Calls of tools in what a model wrote: read whole, or as it streams."""

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from slackwater.serve.openai.tools import CLOSE, OPEN, ToolPlan

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model made; `arguments` is JSON text, as clients expect."""

    name: str
    arguments: str
    call_id: str

    def shown(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


def read_calls(text: str, plan: ToolPlan) -> tuple[str, list[ToolCall]]:
    """The text before the calls, and the calls; anything that is no valid call stays text."""
    known = {tool.function.name for tool in plan.tools}
    if plan.form == "llama":
        body = text.strip().removeprefix(_PYTHON_TAG).strip()
        calls = [_call(part, known) for part in body.split(";")] if body.startswith("{") else []
        if not calls or None in calls:
            calls = [_call(body, known)]
        found = [call for call in calls if call is not None]
        return ("", found) if found else (text, [])
    found = []
    for match in _CALL.finditer(text):
        call = _call(match[1], known)
        if call is not None:
            found.append(call)
    if not found:
        return text, []
    if not plan.parallel:
        found = found[:1]
    return text[: text.index(OPEN)].rstrip(), found


def _call(text: str, known: set[str]) -> ToolCall | None:
    try:
        said = json.loads(text)
        name, arguments = said["name"], said.get("arguments", said.get("parameters", {}))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if name not in known:
        return None
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name, written, f"call_{secrets.token_hex(12)}")


class CallStream:
    """Text as it streams, cut into what is said and the calls that are complete."""

    def __init__(self, plan: ToolPlan) -> None:
        self._plan = plan
        self._held = ""
        self._calling = False
        self._is_text = False
        self.count = 0

    def feed(self, text: str, *, final: bool = False) -> tuple[str, list[ToolCall]]:
        """What can be said now, and the calls that were completed."""
        self._held += text
        if self._plan.form == "llama":
            return self._feed_llama(final)
        said = ""
        calls: list[ToolCall] = []
        while True:
            if not self._calling:
                said += self._say(final)
                if not self._calling:
                    return said, calls
            end = self._held.find(CLOSE)
            if end < 0 and not final:
                return said, calls
            whole = self._held if end < 0 else self._held[: end + len(CLOSE)]
            rest = "" if end < 0 else self._held[end + len(CLOSE) :]
            left, found = read_calls(whole, self._plan)
            calls += found if self._plan.parallel or not self.count else []
            said += left
            self.count += len(found)
            self._held, self._calling = rest.lstrip("\n"), False
            if not self._held:
                return said, calls

    def _say(self, final: bool) -> str:
        start = self._held.find(OPEN)
        if start >= 0:
            said, self._held, self._calling = self._held[:start], self._held[start:], True
            return said.rstrip("\n") if said.strip() else ""
        keep = 0 if final else _overlap(self._held, OPEN)
        cut = len(self._held) - keep
        said, self._held = self._held[:cut], self._held[cut:]
        return "" if self.count and not said.strip() else said

    def _feed_llama(self, final: bool) -> tuple[str, list[ToolCall]]:
        """The whole answer is one call or plain text; after any text the rest is text."""
        if self._is_text:
            said, self._held = self._held, ""
            return said, []
        looks = self._held.lstrip()
        maybe = not looks or looks.startswith("{") or _PYTHON_TAG.startswith(looks[:13])
        if maybe and not final:
            return "", []
        said, calls = read_calls(self._held, self._plan) if maybe else (self._held, [])
        self._is_text = not calls
        self.count += len(calls)
        self._held = ""
        return said, calls


def _overlap(text: str, tag: str) -> int:
    """How much of the end of `text` may be the beginning of `tag`."""
    return next(
        (n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0
    )
