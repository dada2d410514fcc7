"""Renders a conversation to tokens: chat template, tools, variables, start of the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slackwater.model.errors import ConfigError
from slackwater.serve.openai.text import TextCodec
from slackwater.serve.openai.tools import Tool, told_by_message, with_read_arguments


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, tools and options for the chat template."""

    messages: list[dict[str, Any]]
    tools: Sequence[Tool] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    generation_prompt: bool = True
    continued: bool = False
    special: bool = False

    def tokens(self, codec: TextCodec, max_chars: int = 1 << 22) -> list[int]:
        """Render with the chat template, up to where the answer starts or continues."""
        messages = with_read_arguments(self.messages)
        variables = dict(self.variables)
        if codec.knows("tools"):
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools] or None
        else:
            messages = told_by_message(messages, self.tools)
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
        return codec.encode(text, special=self.special)


def _cut(text: str, last: str) -> str:
    """Cut after the last message's text, so that the answer continues it."""
    place = text.rfind(last.rstrip()) if last.strip() else -1
    if place < 0:
        fix = "cannot be continued: it is empty, or the chat template changes it"
        raise ConfigError.of("continue_final_message: the last message", last[:50], fix)
    return text[: place + len(last.rstrip())]
