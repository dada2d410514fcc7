"""Renders a conversation to tokens: chat template, tools, variables, start of the answer."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slackwater.model.errors import ConfigError
from slackwater.serve.openai.text import TextCodec
from slackwater.serve.openai.tools import Tool, describe_tools_in_messages, parse_call_arguments


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, tools and options for the chat template."""

    messages: list[dict[str, Any]]
    tools: Sequence[Tool] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    generation_prompt: bool = True
    continued: bool = False
    special: bool = False
    effort: str | None = None

    def tokens(self, codec: TextCodec, max_chars: int = 1 << 22) -> list[int]:
        """Render with the chat template, up to where the answer starts or continues."""
        return codec.encode(self.text(codec, max_chars), special=self.special)

    def tokens_after(
        self, codec: TextCodec, known: Sequence[int], count: int, max_chars: int = 1 << 22
    ) -> list[int]:
        """The `known` tokens of the first `count` messages, followed by those of the rest.

        The last known message is an answer. A marker in its place shows what the template writes
        after it.
        """
        marker = f"\x00{secrets.token_hex(8)}\x00"
        answer = {"role": self.messages[count - 1].get("role"), "content": marker}
        marked = [*self.messages[: count - 1], answer, *self.messages[count:]]
        _, found, after = replace(self, messages=marked).text(codec, max_chars).partition(marker)
        if not found:
            fix = "is not possible: this model's chat template changes the text of an answer"
            raise ConfigError.of("continuous_tokens", True, fix)
        end = codec.token_text(known[-1]) if codec.is_special(known[-1]) else ""
        if end and after.lstrip().startswith(end):  # the model ended its answer itself
            after = after.lstrip()[len(end) :]
        return [*known, *codec.encode(after, special=False)]

    def text(self, codec: TextCodec, max_chars: int = 1 << 22) -> str:
        """The rendered conversation."""
        messages = parse_call_arguments(self.messages)
        variables = {**self._effort_variables(codec), **self.variables}
        if codec.knows("tools"):
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools] or None
        else:
            messages = describe_tools_in_messages(messages, self.tools)
        reserved = variables.keys() & {
            "messages",
            "add_generation_prompt",
            "bos_token",
            "eos_token",
        }
        if reserved:
            fix = "are set by the service; leave them out"
            raise ConfigError.of("chat_template_kwargs", sorted(reserved), fix)
        unknown = [name for name in self.variables if not codec.knows(name) and name != "documents"]
        if unknown:
            fix = "are not variables of this model's chat template"
            raise ConfigError.of("chat_template_kwargs", unknown, fix)
        text = codec.chat_text(
            messages, variables, generation_prompt=self.generation_prompt and not self.continued
        )
        if self.continued:
            text = _cut(text, str(messages[-1]["content"]))
        if len(text) > max_chars:
            fix = f"must be at most {max_chars} for this model's context"
            raise ConfigError.of("messages", f"{len(text)} characters", fix)
        return text

    def _effort_variables(self, codec: TextCodec) -> dict[str, Any]:
        """The reasoning effort in the variable that the chat template has, if any."""
        if self.effort is None:
            return {}
        if codec.knows("reasoning_effort"):
            return {"reasoning_effort": self.effort}
        if codec.knows("enable_thinking"):
            return {"enable_thinking": self.effort not in ("none", "minimal")}
        return {}


def _cut(text: str, last: str) -> str:
    """Cut after the last message's text, so that the answer continues it."""
    place = text.rfind(last.rstrip()) if last.strip() else -1
    if place < 0:
        fix = "cannot be continued: it is empty, or the chat template changes it"
        raise ConfigError.of("continue_final_message: the last message", last[:50], fix)
    return text[: place + len(last.rstrip())]
