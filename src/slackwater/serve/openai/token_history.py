"""The tokens of earlier answers, so that later turns reuse them unchanged.

Clients send an answer back as text, which may tokenize differently from the sampled tokens. A
request with `continuous_tokens` keeps the tokens of earlier turns and appends to them.
"""

import hashlib
import json
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_TOKENS = 4_000_000  # 16 MB
_OVERHEAD_TOKENS = 100  # memory of an entry beside its tokens, in tokens


class TokenHistory:
    """Tokens up to the end of each answer, by owner and conversation key.

    When they take too much, the owner with most of them loses the oldest: nobody's conversations
    push out another's.
    """

    def __init__(self, most_tokens: int = _MAX_TOKENS) -> None:
        self._most = most_tokens
        self._owners: dict[str, OrderedDict[str, array[int]]] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()  # answers are written in several threads

    def remember(self, owner: str, key: str, tokens: Sequence[int]) -> None:
        """Store the tokens of a conversation up to the end of an answer."""
        with self._lock:
            entries = self._owners.setdefault(owner, OrderedDict())
            if (known := entries.pop(key, None)) is not None:
                self._counts[owner] -= _OVERHEAD_TOKENS + len(known)
            self._counts[owner] += _OVERHEAD_TOKENS + len(tokens)
            entries[key] = array("I", tokens)
            while self._counts.total() > self._most:
                self._evict(max(self._counts, key=self._counts.__getitem__))

    def _evict(self, owner: str) -> None:
        _, tokens = self._owners[owner].popitem(last=False)
        self._counts[owner] -= _OVERHEAD_TOKENS + len(tokens)
        if not self._owners[owner]:
            del self._owners[owner], self._counts[owner]

    def find_longest(self, owner: str, keys: Sequence[str]) -> tuple[int, list[int]] | None:
        """The longest stored prefix: its number of messages and their tokens."""
        with self._lock:
            entries = self._owners.get(owner, OrderedDict())
            for place in range(len(keys) - 1, -1, -1):
                if keys[place] in entries:
                    entries.move_to_end(keys[place])
                    return place + 1, entries[keys[place]].tolist()
        return None


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """The conversation of one request; its answers are stored with their tokens."""

    history: TokenHistory
    owner: str
    options: object
    messages: Sequence[Mapping[str, Any]]

    def find_known_prefix(self) -> tuple[int, list[int]] | None:
        """The longest prefix that this service answered: message count and tokens."""
        keys = conversation_keys(self.owner, self.messages, self.options)
        before_last = keys[:-1]  # something must follow the last answer
        return self.history.find_longest(self.owner, before_last)

    def remember_answer(self, message: Mapping[str, Any], tokens: Sequence[int]) -> None:
        """Store the tokens of the conversation with this answer appended."""
        keys = conversation_keys(self.owner, [*self.messages, message], self.options)
        self.history.remember(self.owner, keys[-1], tokens)


def conversation_keys(
    owner: str, messages: Sequence[Mapping[str, Any]], options: object = None
) -> list[str]:
    """A key for every prefix of a conversation of one owner, rendered with these options."""
    digest = hashlib.sha256(json.dumps([owner, options], sort_keys=True, default=str).encode())
    keys = []
    for message in messages:
        text = json.dumps(_identity(message), ensure_ascii=True, sort_keys=True, default=str)
        digest.update(hashlib.sha256(text.encode()).digest())
        keys.append(digest.hexdigest())
    return keys


def _identity(message: Mapping[str, Any]) -> Any:
    """The parts of a message that identify it; clients add empty fields and change call ids."""
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
