"""Tokens of conversations as the model read and wrote them, so that no later turn changes them.

A client sends an answer back as text, and its text may tokenize otherwise than it was sampled. A
request with `continuous_tokens` keeps the tokens of the turns before it and only appends.
"""

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MOST_TOKENS = 4_000_000  # 16 MB
_EACH_TOKENS = 100  # what an answer's key and place take, beside its tokens


class TokenHistory:
    """The tokens after each answer by its conversation's key; the oldest are forgotten."""

    def __init__(self, most_tokens: int = _MOST_TOKENS) -> None:
        self._most = most_tokens
        self._held: OrderedDict[str, array[int]] = OrderedDict()
        self._count = 0
        self._lock = threading.Lock()  # answers are written in several threads

    def remember(self, key: str, tokens: Sequence[int]) -> None:
        """These are the tokens of a conversation up to the end of an answer."""
        with self._lock:
            if (known := self._held.pop(key, None)) is not None:
                self._count -= _EACH_TOKENS + len(known)
            self._count += _EACH_TOKENS + len(tokens)
            self._held[key] = array("I", tokens)
            while self._count > self._most:
                self._count -= _EACH_TOKENS + len(self._held.popitem(last=False)[1])

    def longest(self, keys: Sequence[str]) -> tuple[int, list[int]] | None:
        """How many messages of a conversation are known, and their tokens."""
        with self._lock:
            for place in range(len(keys) - 1, -1, -1):
                if keys[place] in self._held:
                    self._held.move_to_end(keys[place])
                    return place + 1, self._held[keys[place]].tolist()
        return None


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """One request's conversation, whose answers are remembered with their tokens."""

    history: TokenHistory
    owner: str
    options: object
    messages: Sequence[Mapping[str, Any]]

    def known(self) -> tuple[int, list[int]] | None:
        """How many of its messages have been answered here, and their tokens."""
        keys = conversation_keys(self.owner, self.messages, self.options)
        return self.history.longest(keys[:-1])  # something must follow the last answer

    def answered(self, message: Mapping[str, Any], tokens: Sequence[int]) -> None:
        """The conversation with this answer to it has these tokens."""
        keys = conversation_keys(self.owner, [*self.messages, message], self.options)
        self.history.remember(keys[-1], tokens)


def conversation_keys(
    owner: str, messages: Sequence[Mapping[str, Any]], options: object = None
) -> list[str]:
    """A key for every beginning of a conversation of one owner, rendered with these options."""
    digest = hashlib.sha256(json.dumps([owner, options], sort_keys=True, default=str).encode())
    keys = []
    for message in messages:
        said = json.dumps(_identity(message), ensure_ascii=True, sort_keys=True, default=str)
        digest.update(hashlib.sha256(said.encode()).digest())
        keys.append(digest.hexdigest())
    return keys


def _identity(message: Mapping[str, Any]) -> Any:
    """What makes a message another one; clients add empty fields, and ids are drawn anew."""
    content = message.get("content") or ""
    calls = []
    given = message.get("tool_calls")
    for call in given if isinstance(given, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        named = function if isinstance(function, Mapping) else {}
        calls.append([named.get("name"), named.get("arguments")])
    if calls and isinstance(content, str):
        content = content.strip()  # streamed and whole answers differ in blanks before a call
    return [message.get("role"), content, calls]
