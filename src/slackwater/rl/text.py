"""Turns an interaction into one growing list of tokens."""

from collections.abc import Sequence
from typing import Any, Literal, cast

from slackwater.model.errors import ConfigError

_ANSWER = "\x00answer\x00"
Observation = str | list[dict[str, str]]  # text, or a conversation's messages


class PlainText:
    """Observations as plain text; an answer ends with the tokenizer's end token."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._end = int(tokenizer.eos_token_id)
        self.stop: tuple[int, ...] = (self._end,)

    def first(self, observation: Observation) -> list[int]:
        """The prompt of the first turn."""
        if not isinstance(observation, str):
            raise ConfigError.of("model.text", "plain", 'has no messages; write text = "chat"')
        return _encode(self._tokenizer, observation)

    def next(self, observation: str, ended: bool) -> list[int]:
        """The tokens between two answers; `ended` if the first one had its end token."""
        tokens = _encode(self._tokenizer, observation)
        return tokens if ended else [self._end, *tokens]

    def answer(self, tokens: Sequence[int]) -> str:
        """The answer without its end token."""
        content = [token for token in tokens if token != self._end]
        return cast(str, self._tokenizer.decode(content))

    def encode_answer(self, text: str) -> list[int]:
        """An answer as the model would sample it, with its end token."""
        return [*_encode(self._tokenizer, text), self._end]


class ChatText(PlainText):
    """Observations as user turns of the model's chat template."""

    def first(self, observation: Observation) -> list[int]:
        single_turn = [{"role": "user", "content": observation}]
        messages = single_turn if isinstance(observation, str) else observation
        return _encode(self._tokenizer, self._render(messages))

    def next(self, observation: str, ended: bool) -> list[int]:
        messages = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": observation},
        ]
        suffix = self._render(messages).split(_ANSWER, 1)[1]
        end_text = cast(str, self._tokenizer.eos_token)
        if ended and suffix.lstrip().startswith(end_text):
            suffix = suffix.lstrip()[len(end_text) :]
        return _encode(self._tokenizer, suffix)

    def _render(self, messages: Any) -> str:
        rendered = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return cast(str, rendered)


def text_of(kind: Literal["plain", "chat"], tokenizer: Any) -> PlainText:
    """The text format that a recipe names."""
    return PlainText(tokenizer) if kind == "plain" else ChatText(tokenizer)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return cast(list[int], tokenizer.encode(text, add_special_tokens=False))
