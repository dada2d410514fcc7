"""Answers of the OpenAI API: the same choices as one object, or as chunks of a stream."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from slackwater.runtime.executors.engines import TurnResult
from slackwater.serve.openai.bodies import GenerationBody
from slackwater.serve.openai.generation import ChoiceDelta, FinishedChoice
from slackwater.serve.openai.text import TextCodec, TextStream
from slackwater.serve.openai.token_offsets import TokenOffsets

Top = Sequence[tuple[int, float]]

_PLACEHOLDER = "\x00text\x00"  # which no model's name holds


class ResponseWriter(ABC):
    """What completions and chat share; subclasses say how a choice looks."""

    prefix = ""
    object_whole = ""
    object_chunk = ""

    def __init__(
        self, body: GenerationBody, codec: TextCodec, prompts: Sequence[Sequence[int]]
    ) -> None:
        self._asked = body
        self.codec = codec
        self.prompts = prompts
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model,
        }
        keep, special = bool(body.include_stop_str_in_output), body.skip_special_tokens is False
        self._streams = [
            TextStream(codec, body.stop_strings, keep_stop=keep, special=special) for _ in prompts
        ]
        self._streamed = [0] * len(prompts)
        self._spellings = [TokenOffsets(codec) for _ in prompts]
        self._forms: dict[int, tuple[bytes, bytes]] = {}

    # ---- how a choice looks ----
    @abstractmethod
    def choice(self, place: int, result: TurnResult, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def delta(self, place: int, text: str, logprobs: Any) -> dict[str, Any]: ...

    @abstractmethod
    def logprobs(
        self, place: int, tokens: Sequence[int], values: Sequence[Any], tops: Sequence[Top]
    ) -> Any:
        """Of the tokens that follow those it was called with before."""

    @property
    @abstractmethod
    def wants_logprobs(self) -> bool: ...

    def shows(self, choice: dict[str, Any]) -> bool:
        """Whether a streamed choice says anything."""
        return bool(choice.get("text") or choice.get("delta"))

    def last_delta(self, place: int) -> dict[str, Any]:
        """What a stream's choice ends with."""
        return self.delta(place, "", None)

    def reason(self, place: int, result: TurnResult) -> str:
        """Why a streamed choice ended."""
        return result.reason.value

    def add_ids(self, choice: dict[str, Any], place: int, result: TurnResult) -> dict[str, Any]:
        """Token ids and the prompt's scores, where they were asked for."""
        if self._asked.return_token_ids:
            choice["token_ids"] = list(result.tokens)
            choice["prompt_token_ids"] = list(self.prompts[place])
        if self._asked.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_scores(place, result)
        return choice

    def _prompt_scores(self, place: int, result: TurnResult) -> list[dict[str, Any] | None]:
        """One entry per prompt token: itself and the likeliest others by id, in vLLM's format."""
        scores = result.prompt_logprobs or []
        shown: list[dict[str, Any] | None] = []
        tops = [*result.prompt_topk, *[None] * (len(scores) - len(result.prompt_topk))]
        for token, score, top in zip(self.prompts[place], scores, tops, strict=True):
            if score is None:
                shown.append(None)
                continue
            ranked: dict[int, tuple[float, int | None]] = {
                other: (value, rank) for rank, (other, value) in enumerate(top or (), 1)
            }
            kept = dict(list(ranked.items())[: self._asked.prompt_logprobs])
            kept.setdefault(token, ranked.get(token, (score, None)))
            shown.append(
                {
                    str(other): {
                        "logprob": value,
                        "rank": rank,
                        "decoded_token": self.codec.token_text(other),
                    }
                    for other, (value, rank) in kept.items()
                }
            )
        return shown

    # ---- whole ----
    def whole(self, results: Sequence[TurnResult]) -> dict[str, Any]:
        choices = []
        for place, result in enumerate(results):
            stream = self._streams[place]
            stream.feed(result.tokens)
            stream.finish()
            choices.append(self.choice(place, result, stream.text))
        usage = self._usage([len(result.tokens) for result in results])
        return {**self._head, "object": self.object_whole, "choices": choices, "usage": usage}

    def _usage(self, completed: Sequence[int]) -> dict[str, int]:
        prompt_tokens = sum(len(prompt) for prompt in self.prompts[:: self._asked.n])
        total = prompt_tokens + sum(completed)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sum(completed),
            "total_tokens": total,
        }

    # ---- streamed ----
    def opening(self) -> list[dict[str, Any]]:
        return []

    def echo(
        self, place: int, scores: Sequence[float | None] | None, tops: Sequence[Top | None]
    ) -> list[dict[str, Any]]:
        """What a streamed choice begins with, once its prompt is scored."""
        return []

    def piece(self, event: ChoiceDelta) -> list[dict[str, Any]]:
        place, more = event.choice, event.more
        first = (
            []
            if self._streamed[place]
            else self.echo(place, more.prompt_logprobs, more.prompt_topk)
        )
        text = self._streams[place].feed(more.tokens)
        return [*first, *self._delta(place, text, more.tokens, more.logprobs, more.topk)]

    def plain_piece(self, event: ChoiceDelta) -> bytes | None:
        """A text-only `piece` written into a prepared template; None if the piece holds more."""
        place, more = event.choice, event.more
        if not self.only_text:
            return None
        text = self._streams[place].feed(more.tokens)
        self._streamed[place] += len(more.tokens)
        if not text:
            return b""
        form = self._forms.get(place)
        if form is None:
            form = self._forms[place] = self._form(place)
        return form[0] + json.dumps(text).encode() + form[1]

    @property
    def only_text(self) -> bool:
        """Whether streamed pieces show text and nothing else."""
        return not self.wants_logprobs and not self._asked.return_token_ids

    def _form(self, place: int) -> tuple[bytes, bytes]:
        """What stands before and after the text of a piece."""
        written = json.dumps(self._chunk([self.delta(place, _PLACEHOLDER, None)])).encode()
        before, _, after = written.partition(json.dumps(_PLACEHOLDER).encode())
        return b"data: " + before, after + b"\n\n"

    def end(self, event: FinishedChoice) -> list[dict[str, Any]]:
        place, result = event.choice, event.result
        rest = result.tokens[self._streamed[place] :]
        values = result.logprobs[self._streamed[place] :]
        tops = result.topk[self._streamed[place] :]
        stream, chunks = self._streams[place], list[dict[str, Any]]()
        if not self._streamed[place]:
            chunks += self.echo(place, result.prompt_logprobs, result.prompt_topk)
        text = stream.feed(rest) + stream.finish()
        chunks += self._delta(place, text, rest, values, tops) if text or rest else []
        ending = self.last_delta(place) | {"finish_reason": self.reason(place, result)}
        return [*chunks, self._chunk([ending])]

    def closing(self) -> list[dict[str, Any]]:
        options = self._asked.stream_options
        if options is None or not options.include_usage:
            return []
        return [self._chunk([]) | {"usage": self._usage(self._streamed)}]

    def _delta(
        self,
        place: int,
        text: str,
        tokens: Sequence[int],
        values: Sequence[float],
        tops: Sequence[Top],
    ) -> list[dict[str, Any]]:
        self._streamed[place] += len(tokens)
        said = self.logprobs(place, tokens, values, tops) if self.wants_logprobs else None
        choice = self.delta(place, text, said)
        if self._asked.return_token_ids:
            choice["token_ids"] = list(tokens)
        elif said is None and not self.shows(choice):
            return []
        return [self._chunk([choice])]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.object_chunk, "choices": choices}
