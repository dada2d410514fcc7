"""Text to tokens and back for one base model: encoding, chat templates, streamed text."""

import asyncio
import codecs
import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from slackwater.model.byte_level import byte_characters
from slackwater.model.errors import ConfigError, RefusedError
from slackwater.runtime.store.base_models import BaseModel

_BYTES = byte_characters()
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BROKEN = "\ufffd"  # how a decoder shows bytes that are not yet a character
_LONGEST_CHARACTER = 8  # tokens; a longer run without a whole character is broken
_CONTEXT_TOKENS, _LONGEST_CONTEXT = 6, 24  # cut to the first number when longer than the second


class TokenBytes:
    """The bytes of each token; a token may be part of a character and so have no text."""

    def __init__(self, tokenizer: Tokenizer, description: dict[str, Any]) -> None:
        """`description` is the tokenizer's own JSON."""
        self._tokenizer = tokenizer
        added = description.get("added_tokens", [])
        self._added = {int(item["id"]) for item in added}
        self._special = {int(item["id"]) for item in added if item.get("special")}
        decoder = json.dumps(description.get("decoder"))
        self._byte_level = "ByteLevel" in decoder
        # With such a tokenizer a text is the concatenated bytes of its tokens.
        self.are_text = (description.get("decoder") or {}).get("type") == "ByteLevel"
        self._fallback = "ByteFallback" in decoder
        self._known: dict[int, bytes] = {}

    def lookup(self, token: int) -> bytes:
        """The bytes of one token; none for an id that the tokenizer does not have."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._spell_token(token)
        return found

    def concat(self, tokens: Sequence[int], *, special: bool) -> bytes:
        """The bytes of all tokens; those of special tokens only if `special`."""
        hidden = () if special else self._special
        return b"".join([self.lookup(token) for token in tokens if token not in hidden])

    def _spell_token(self, token: int) -> bytes:
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


class TokenOffsets:
    """Where each token begins in the text of those before it, counted in characters."""

    def __init__(self, spelled: TokenBytes) -> None:
        self._bytes = spelled
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def offset_of(self, token: int) -> int:
        """Where `token` starts; a continuation byte starts where its character does."""
        at = self._length
        self._length += len(self._decoder.decode(self._bytes.lookup(token)))
        return at


class TextCodec:
    """A model directory's tokenizer and chat template."""

    def __init__(self, directory: Path) -> None:
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise RefusedError("this model has no tokenizer.json; send token ids")
        self._tokenizer = Tokenizer.from_file(str(file))
        self.bytes = TokenBytes(self._tokenizer, _json(file))
        self._config = _json(directory / "tokenizer_config.json")
        self._variables: Collection[str] = ()
        self.tool_form: Literal["hermes", "llama"] = "hermes"
        self._template = self._chat_template(directory)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        (tokens,) = self.encode_all([text], special=special)
        return tokens

    def encode_all(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """Tokenize in one batch: this call releases the GIL, the one for a single text does not."""
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        return [encoded.ids for encoded in found]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=not special)
        return text

    def token_text(self, token: int) -> str:
        """One token, special or not, as text."""
        return self.decode([token], special=True)

    def is_special(self, token: int) -> bool:
        """Whether a token is not text, such as the end of a turn."""
        return not self.decode([token]) and bool(self.token_text(token))

    def token_label(self, token: int) -> str:
        """A token as text, or `bytes:\\x..` for part of a character; labels stay distinct."""
        spelled = self.bytes.lookup(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def knows(self, variable: str) -> bool:
        """Whether the chat template reads a variable."""
        return variable in self._variables

    def chat_text(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Render a conversation with the model's template, up to where the answer begins."""
        if self._template is None:
            raise RefusedError("this model has no chat template; use /v1/completions")
        try:
            return self._template.render(
                **(variables or {}),
                messages=messages,
                add_generation_prompt=generation_prompt,
                bos_token=_token(self._config.get("bos_token")),
                eos_token=_token(self._config.get("eos_token")),
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ConfigError.of(
                "messages",
                f"{len(messages)} of them",
                f"do not fit this model's chat template: {error}",
            ) from None

    def _chat_template(self, directory: Path) -> jinja2.Template | None:
        file = directory / "chat_template.jinja"
        source = file.read_text() if file.is_file() else self._config.get("chat_template")
        if isinstance(source, list):
            named = {item["name"]: item["template"] for item in source}
            source = named.get("default")
        if not source:
            return None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
        environment.filters["tojson"] = _tojson
        self._variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        self.tool_form = "llama" if _writes_llama_calls(source) else "hermes"
        return environment.from_string(source)


def check_length(text: str, max_chars: int) -> None:
    """Refuse a text that cannot fit, before time and memory are spent on it."""
    if len(text) > max_chars:
        fix = f"must be at most {max_chars} for this model's context"
        raise ConfigError.of("prompt", f"{len(text)} characters", fix)


def _writes_llama_calls(template: str) -> bool:
    """Whether tool calls are bare objects with `parameters`, as Llama 3 and later write them."""
    return "<tool_call>" not in template and (
        "<|python_tag|>" in template or '"parameters": ' in template
    )


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as transformers writes it in templates: not ASCII-escaped, not HTML-escaped."""
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent, **options})


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    return found if isinstance(found, dict) else {}


def _token(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


class TextCodecs:
    """The tokenizer of every base model, each loaded once."""

    def __init__(self) -> None:
        self._codecs: dict[str, TextCodec] = {}

    async def load(self, base: BaseModel) -> TextCodec:
        if base.name not in self._codecs:
            self._codecs[base.name] = await asyncio.to_thread(TextCodec, base.directory)
        return self._codecs[base.name]


class TextStream:
    """Incremental text that holds back partial characters and possible stop strings.

    If tokens are bytes, each is decoded once. Otherwise the last few are decoded again with every
    feed, so that the cost per token stays constant.
    """

    def __init__(
        self,
        codec: TextCodec,
        stops: Sequence[str],
        *,
        keep_stop: bool = False,
        special: bool = False,
    ) -> None:
        """`keep_stop`: the text ends with the stop string; `special`: special tokens are shown."""
        self._keep_stop = keep_stop
        self._special = special
        self._codec = codec
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(stops)
        self._longest_stop = max((len(stop) for stop in stops), default=1)
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._decoded = ""
        self._shown = 0
        self._cut: int | None = None

    @property
    def text(self) -> str:
        """The text shown so far."""
        return self._decoded[: self._shown]

    @property
    def is_cut(self) -> bool:
        """Whether a stop string ended the text before its tokens did."""
        return self._cut is not None

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that can be shown now."""
        if self._codec.bytes.are_text:
            added = self._codec.bytes.concat(tokens, special=self._special)
            self._decoded += self._utf8.decode(added)
            return self._show(final=False)
        if len(tokens) > 1 and not self._pending and self._decode_whole(list(tokens)):
            return self._show(final=False)
        for token in tokens:
            self._pending.append(token)
            self._decode_pending(final=False)
        return self._show(final=False)

    def finish(self) -> str:
        """The remaining text."""
        if self._codec.bytes.are_text:
            self._decoded += self._utf8.decode(b"", final=True)
        else:
            self._decode_pending(final=True)
        return self._show(final=True)

    def _decode_pending(self, *, final: bool) -> None:
        """Turn pending tokens into text, unless they end inside a character."""
        both = self._codec.decode(self._context + self._pending, special=self._special)
        grown = both[len(self._context_text) :]
        if grown.endswith(_BROKEN) and not final and len(self._pending) < _LONGEST_CHARACTER:
            return
        self._append_text(self._pending, both)
        self._pending = []

    def _decode_whole(self, tokens: list[int]) -> bool:
        """Decode many tokens at once if they form whole characters."""
        both = self._codec.decode(self._context + tokens, special=self._special)
        whole = _BROKEN not in both[len(self._context_text) :]
        if whole:
            self._append_text(tokens, both)
        return whole

    def _append_text(self, tokens: list[int], both: str) -> None:
        """Append the text of `tokens`; `both` is their text together with the context."""
        self._decoded += both[len(self._context_text) :]
        self._context += tokens
        self._context_text = both
        if len(self._context) > _LONGEST_CONTEXT:
            self._context = self._context[-_CONTEXT_TOKENS:]
            self._context_text = self._codec.decode(self._context, special=self._special)

    def _show(self, *, final: bool) -> str:
        if self._cut is None:
            start = max(self._shown - self._longest_stop, 0)
            found = [(self._decoded.find(stop, start), stop) for stop in self._stops]
            first = min(((at, stop) for at, stop in found if at >= 0), default=None)
            if first is not None:
                self._cut = first[0] + (len(first[1]) if self._keep_stop else 0)
        if self._cut is not None:
            end = self._cut
        else:
            end = len(self._decoded) - (0 if final else self._longest_stop - 1)
        end = max(end, self._shown)
        shown = self._decoded[self._shown : end]
        self._shown = end
        return shown
