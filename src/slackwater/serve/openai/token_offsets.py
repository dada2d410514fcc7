"""Token spelling: the bytes of each token and its offset in the joined text."""

import codecs
import json
import re
from typing import Any, Protocol

from tokenizers import Tokenizer

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of every token; part of a character has bytes but no text of its own."""

    def __init__(self, tokenizer: Tokenizer, description: dict[str, Any]) -> None:
        """`description` is the tokenizer's own JSON, which names how its tokens are written."""
        self._tokenizer = tokenizer
        self._added = {int(item["id"]) for item in description.get("added_tokens", [])}
        decoder = json.dumps(description.get("decoder"))
        self._byte_level = "ByteLevel" in decoder
        self._fallback = "ByteFallback" in decoder
        self._known: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """The bytes of one token; none for an id that the tokenizer does not have."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._spell(token)
        return found

    def _spell(self, token: int) -> bytes:
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return b""
        if token in self._added:
            return str(written).encode()
        if self._byte_level and all(character in _BYTES for character in written):
            return bytes(_BYTES[character] for character in written)
        if self._fallback and (match := _FALLBACK.fullmatch(written)):
            return bytes([int(match[1], 16)])
        if self._fallback:
            return str(written).replace("\u2581", " ").encode()
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text.encode()


class TokenSpeller(Protocol):
    """Whoever knows the bytes of tokens."""

    def token_bytes(self, token: int) -> bytes: ...


class TokenOffsets:
    """Where each token begins in the text of those before it, counted in characters."""

    def __init__(self, codec: TokenSpeller) -> None:
        self._codec = codec
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def offset_of(self, token: int) -> int:
        """Where the next token starts; a continuation byte starts where its character does."""
        at = self._length
        self._length += len(self._decoder.decode(self._codec.token_bytes(token)))
        return at


def _byte_characters() -> dict[str, int]:
    """The characters that byte-level tokenizers use for bytes: printable ones, else from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    written = {chr(byte): byte for byte in seen}
    return written | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTES = _byte_characters()
