"""Answers of the OpenAI API: the same choices as one object, or as chunks of a stream."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from slackwater.runtime.bodies.rollout import TurnResult
from slackwater.serve.openai.bodies import ChatBody, CompletionBody, GenerationBody
from slackwater.serve.openai.generation import Piece, Whole
from slackwater.serve.openai.text import TextCodec, TextStream

Top = Sequence[tuple[int, float]]


class Answers(ABC):
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
        self._streams = [TextStream(codec, body.stop_strings) for _ in prompts]
        self._streamed = [0] * len(prompts)

    # ---- how a choice looks ----
    @abstractmethod
    def choice(self, place: int, result: TurnResult, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def delta(self, place: int, text: str, logprobs: Any) -> dict[str, Any]: ...

    @abstractmethod
    def logprobs(
        self, tokens: Sequence[int], values: Sequence[float], tops: Sequence[Top]
    ) -> Any: ...

    @property
    @abstractmethod
    def wants_logprobs(self) -> bool: ...

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

    def piece(self, event: Piece) -> list[dict[str, Any]]:
        text = self._streams[event.choice].feed(event.tokens)
        return self._delta(event.choice, text, event.tokens, event.logprobs)

    def end(self, event: Whole) -> list[dict[str, Any]]:
        place, result = event.choice, event.result
        rest = result.tokens[self._streamed[place] :]
        values = result.logprobs[self._streamed[place] :]
        stream = self._streams[place]
        text = stream.feed(rest) + stream.finish()
        chunks = self._delta(place, text, rest, values) if text or rest else []
        ending = self.delta(place, "", None) | {"finish_reason": result.reason.value}
        return [*chunks, self._chunk([ending])]

    def closing(self) -> list[dict[str, Any]]:
        options = self._asked.stream_options
        if options is None or not options.include_usage:
            return []
        return [self._chunk([]) | {"usage": self._usage(self._streamed)}]

    def _delta(
        self, place: int, text: str, tokens: Sequence[int], values: Sequence[float]
    ) -> list[dict[str, Any]]:
        self._streamed[place] += len(tokens)
        said = self.logprobs(tokens, values, ()) if self.wants_logprobs else None
        choice = self.delta(place, text, said)
        if self._asked.return_token_ids:
            choice["token_ids"] = list(tokens)
        elif not text and said is None:
            return []
        return [self._chunk([choice])]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.object_chunk, "choices": choices}


class CompletionAnswers(Answers):
    """`/v1/completions`."""

    prefix = "cmpl"
    object_whole = object_chunk = "text_completion"

    def __init__(
        self, body: CompletionBody, codec: TextCodec, prompts: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(body, codec, prompts)
        self.body = body

    @property
    def wants_logprobs(self) -> bool:
        return self.body.logprobs is not None

    def choice(self, place: int, result: TurnResult, text: str) -> dict[str, Any]:
        tokens, values, tops = list(result.tokens), list(result.logprobs), list(result.topk)
        if self.body.echo:
            prompt = list(self.prompts[place])
            text = self.codec.decode(prompt, special=True) + text
            scores: list[Any] = list(result.prompt_logprobs or [None] * len(prompt))
            tokens, values = prompt + tokens, scores + values
            tops = [row or () for row in result.prompt_topk] + tops
        choice: dict[str, Any] = {
            "index": place,
            "text": text,
            "finish_reason": result.reason.value,
            "logprobs": self.logprobs(tokens, values, tops) if self.wants_logprobs else None,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(result.tokens)
            choice["prompt_token_ids"] = list(self.prompts[place])
        return choice

    def delta(self, place: int, text: str, logprobs: Any) -> dict[str, Any]:
        return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": None}

    def logprobs(self, tokens: Sequence[int], values: Sequence[Any], tops: Sequence[Top]) -> Any:
        texts = [self.codec.token_text(token) for token in tokens]
        offsets, offset = [], 0
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        top = [{self.codec.token_text(token): value for token, value in row} for row in tops]
        return {
            "tokens": texts,
            "token_logprobs": list(values),
            "top_logprobs": top if any(top) else None,
            "text_offset": offsets,
        }


class ChatAnswers(Answers):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def __init__(self, body: ChatBody, codec: TextCodec, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__(body, codec, prompts)
        self.body = body

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.body.logprobs)

    def choice(self, place: int, result: TurnResult, text: str) -> dict[str, Any]:
        said = None
        if self.wants_logprobs:
            said = self.logprobs(result.tokens, result.logprobs, result.topk)
        choice: dict[str, Any] = {
            "index": place,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "finish_reason": result.reason.value,
            "logprobs": said,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(result.tokens)
            choice["prompt_token_ids"] = list(self.prompts[place])
        return choice

    def opening(self) -> list[dict[str, Any]]:
        first = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": place, "delta": first, "finish_reason": None}])
            for place in range(len(self.prompts))
        ]

    def delta(self, place: int, text: str, logprobs: Any) -> dict[str, Any]:
        content = {"content": text} if text else {}
        return {"index": place, "delta": content, "logprobs": logprobs, "finish_reason": None}

    def logprobs(self, tokens: Sequence[int], values: Sequence[Any], tops: Sequence[Top]) -> Any:
        rows = [*tops, *[()] * (len(tokens) - len(tops))]
        content = [
            self._token(token, value)
            | {"top_logprobs": [self._token(other, score) for other, score in row]}
            for token, value, row in zip(tokens, values, rows, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, value: float) -> dict[str, Any]:
        text = self.codec.token_text(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}
