"""How an interaction becomes one growing list of tokens."""

from collections.abc import Sequence
from typing import Any, Literal, cast

from slackwater.model.errors import ConfigError

_ANSWER = "\x00answer\x00"
Observation = str | list[dict[str, str]]  # text, or a conversation's messages


class PlainText:
    """Observations as they are; an answer ends with the tokenizer's end token; a turn appends."""

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
        """What follows an answer, before the next one; `ended` if the answer had its end token."""
        tokens = _encode(self._tokenizer, observation)
        return tokens if ended else [self._end, *tokens]

    def answer(self, tokens: Sequence[int]) -> str:
        """The answer without its end token."""
        kept = [token for token in tokens if token != self._end]
        return cast(str, self._tokenizer.decode(kept))

    def spoken(self, text: str) -> list[int]:
        """An answer as the model would have sampled it, its end token with it."""
        return [*_encode(self._tokenizer, text), self._end]


class ChatText(PlainText):
    """Observations as a user's turns, by the model's own chat template."""

    def first(self, observation: Observation) -> list[int]:
        told = [{"role": "user", "content": observation}]
        messages = told if isinstance(observation, str) else observation
        return _encode(self._tokenizer, self._render(messages))

    def next(self, observation: str, ended: bool) -> list[int]:
        messages = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": observation},
        ]
        after = self._render(messages).split(_ANSWER, 1)[1]
        end_text = cast(str, self._tokenizer.eos_token)
        if ended and after.lstrip().startswith(end_text):
            after = after.lstrip()[len(end_text) :]
        return _encode(self._tokenizer, after)

    def _render(self, messages: Any) -> str:
        rendered = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return cast(str, rendered)


def text_of(kind: Literal["plain", "chat"], tokenizer: Any) -> PlainText:
    """The way of putting text that a recipe asks for."""
    return PlainText(tokenizer) if kind == "plain" else ChatText(tokenizer)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return cast(list[int], tokenizer.encode(text, add_special_tokens=False))
