"""Answers of the OpenAI API: the choices as one object or as chunks of a stream."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from slackwater.model.turn import FinishReason
from slackwater.runtime.executors.turn_results import TurnResult
from slackwater.serve.openai.bodies import ChatBody, CompletionBody, GenerationBody
from slackwater.serve.openai.generation import ChoiceDelta, FinishedChoice
from slackwater.serve.openai.text import TextCodec, TextStream, TokenOffsets
from slackwater.serve.openai.token_history import ConversationRecord
from slackwater.serve.openai.tools import CallStream, ToolPlan, read_calls

Top = Sequence[tuple[int, float]]

_PLACEHOLDER = "\x00text\x00"  # no model name contains it


class ResponseWriter(ABC):
    """Base of completions and chat; subclasses define the format of a choice."""

    prefix = ""
    object_whole = ""
    object_chunk = ""
    body: GenerationBody

    def __init__(
        self, body: GenerationBody, codec: TextCodec, prompts: Sequence[Sequence[int]]
    ) -> None:
        self.body = body
        self.codec = codec
        self.prompts = prompts
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model,
        }
        keep, special = bool(body.include_stop_str_in_output), body.skip_special_tokens is False
        # Created per choice with its first tokens: a request may ask for thousands of choices.
        self._streams = defaultdict[int, TextStream](
            lambda: TextStream(codec, body.stop_strings, keep_stop=keep, special=special)
        )
        self._streamed = [0] * len(prompts)
        self._offsets = defaultdict[int, TokenOffsets](lambda: TokenOffsets(codec.bytes))
        self._templates: dict[int, tuple[bytes, bytes]] = {}

    # ---- format of a choice ----
    @abstractmethod
    def choice(self, place: int, result: TurnResult, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def delta(self, place: int, text: str, logprobs: Any) -> dict[str, Any]: ...

    @abstractmethod
    def logprobs(
        self, place: int, tokens: Sequence[int], values: Sequence[Any], tops: Sequence[Top]
    ) -> Any:
        """Log-probs of the next tokens, after those of earlier calls."""

    @property
    @abstractmethod
    def wants_logprobs(self) -> bool: ...

    def last_delta(self, place: int) -> dict[str, Any]:
        return self.delta(place, "", None)

    def reason(self, place: int, result: TurnResult) -> str:
        """Why a streamed choice ended."""
        return result.reason.value

    def add_ids(self, choice: dict[str, Any], place: int, result: TurnResult) -> dict[str, Any]:
        """Add token ids and prompt scores if requested."""
        if self.body.return_token_ids:
            choice["token_ids"] = list(result.tokens)
            choice["prompt_token_ids"] = list(self.prompts[place])
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_scores(place, result)
        return choice

    def _prompt_scores(self, place: int, result: TurnResult) -> list[dict[str, Any] | None]:
        """One entry per prompt token: itself and the likeliest others by id, in vLLM's format."""
        scores = result.prompt_logprobs or []
        entries: list[dict[str, Any] | None] = []
        tops = [*result.prompt_topk, *[None] * (len(scores) - len(result.prompt_topk))]
        for token, score, top in zip(self.prompts[place], scores, tops, strict=True):
            if score is None:
                entries.append(None)
                continue
            ranked: dict[int, tuple[float, int | None]] = {
                other: (value, rank) for rank, (other, value) in enumerate(top or (), 1)
            }
            kept = dict(list(ranked.items())[: self.body.prompt_logprobs])
            kept.setdefault(token, ranked.get(token, (score, None)))
            entries.append(
                {
                    str(other): {
                        "logprob": value,
                        "rank": rank,
                        "decoded_token": self.codec.token_text(other),
                    }
                    for other, (value, rank) in kept.items()
                }
            )
        return entries

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
        prompt_tokens = sum(len(prompt) for prompt in self.prompts[:: self.body.n])
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
        """The first chunk of a streamed choice, once its prompt is scored."""
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
        """A text-only `piece` as bytes, from a template; None if the piece has more than text."""
        place, more = event.choice, event.more
        if not self.only_text:
            return None
        text = self._streams[place].feed(more.tokens)
        self._streamed[place] += len(more.tokens)
        if not text:
            return b""
        template = self._templates.get(place)
        if template is None:
            template = self._templates[place] = self._chunk_template(place)
        return template[0] + json.dumps(text).encode() + template[1]

    @property
    def only_text(self) -> bool:
        """Whether streamed pieces show text and nothing else."""
        return not (self.wants_logprobs or self.body.return_token_ids or self._has_running_usage)

    @property
    def _has_running_usage(self) -> bool:
        """Whether every chunk carries the token counts so far."""
        options = self.body.stream_options
        return options is not None and bool(options.continuous_usage_stats)

    def _chunk_template(self, place: int) -> tuple[bytes, bytes]:
        """The bytes before and after the text of a piece."""
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
        options = self.body.stream_options
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
        logprobs = self.logprobs(place, tokens, values, tops) if self.wants_logprobs else None
        choice = self.delta(place, text, logprobs)
        if self.body.return_token_ids:
            choice["token_ids"] = list(tokens)
        elif logprobs is None and not (choice.get("text") or choice.get("delta")):
            return []
        return [self._chunk([choice])]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": self._usage(self._streamed)} if self._has_running_usage else {}
        return {**self._head, "object": self.object_chunk, "choices": choices, **usage}


class CompletionAnswers(ResponseWriter):
    """`/v1/completions`."""

    prefix = "cmpl"
    object_whole = object_chunk = "text_completion"
    body: CompletionBody

    @property
    def wants_logprobs(self) -> bool:
        return self.body.logprobs is not None

    @property
    def only_text(self) -> bool:
        return super().only_text and not self.body.echo

    def whole(self, results: Sequence[TurnResult]) -> dict[str, Any]:
        return super().whole([self._drop_unwanted_token(result) for result in results])

    def piece(self, event: ChoiceDelta) -> list[dict[str, Any]]:
        return [] if self.body.only_prompt else super().piece(event)

    def end(self, event: FinishedChoice) -> list[dict[str, Any]]:
        return super().end(replace(event, result=self._drop_unwanted_token(event.result)))

    def _drop_unwanted_token(self, result: TurnResult) -> TurnResult:
        """Drop the token that the engine must draw even if only the prompt is to be scored."""
        if not self.body.only_prompt:
            return result
        return structs.replace(result, tokens=[], logprobs=[], topk=[], reason=FinishReason.LENGTH)

    def choice(self, place: int, result: TurnResult, text: str) -> dict[str, Any]:
        tokens, tops = list(result.tokens), list(result.topk)
        values: list[float | None] = list(result.logprobs)
        if self.body.echo:
            prompt, scores, rows = self._echo_columns(
                place, result.prompt_logprobs, result.prompt_topk
            )
            text = self.codec.decode(prompt, special=True) + text
            tokens, values, tops = prompt + tokens, scores + values, rows + tops
        choice: dict[str, Any] = {
            "index": place,
            "text": text,
            "finish_reason": result.reason.value,
            "logprobs": self.logprobs(place, tokens, values, tops) if self.wants_logprobs else None,
        }
        return self.add_ids(choice, place, result)

    def _echo_columns(
        self, place: int, scores: Sequence[float | None] | None, tops: Sequence[Top | None]
    ) -> tuple[list[int], list[float | None], list[Top]]:
        """The prompt's tokens, their scores, and the requested number of alternatives."""
        prompt = list(self.prompts[place])
        rows: list[Top] = [(row or ())[: self.body.logprobs] for row in tops]
        rows += [()] * (len(prompt) - len(rows))
        return prompt, list(scores or [None] * len(prompt)), rows

    def echo(
        self, place: int, scores: Sequence[float | None] | None, tops: Sequence[Top | None]
    ) -> list[dict[str, Any]]:
        if not self.body.echo:
            return []
        prompt, values, rows = self._echo_columns(place, scores, tops)
        logprobs = self.logprobs(place, prompt, values, rows) if self.wants_logprobs else None
        return [self._chunk([self.delta(place, self.codec.decode(prompt, special=True), logprobs)])]

    def delta(self, place: int, text: str, logprobs: Any) -> dict[str, Any]:
        return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": None}

    def logprobs(
        self, place: int, tokens: Sequence[int], values: Sequence[Any], tops: Sequence[Top]
    ) -> Any:
        label, offsets = self.codec.token_label, self._offsets[place]
        top = [{label(token): value for token, value in row} for row in tops]
        return {
            "tokens": [label(token) for token in tokens],
            "token_logprobs": list(values),
            "top_logprobs": top if any(top) else None,
            "text_offset": [offsets.offset_of(token) for token in tokens],
        }


class ChatAnswers(ResponseWriter):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"
    body: ChatBody

    def __init__(
        self,
        body: ChatBody,
        codec: TextCodec,
        prompts: Sequence[Sequence[int]],
        plan: ToolPlan | None = None,
        record: ConversationRecord | None = None,
    ) -> None:
        super().__init__(body, codec, prompts)
        self._plan = plan
        self._record = record
        self._calls = [] if plan is None else [CallStream(plan) for _ in prompts]

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.body.logprobs)

    def choice(self, place: int, result: TurnResult, text: str) -> dict[str, Any]:
        logprobs = None
        if self.wants_logprobs:
            logprobs = self.logprobs(place, result.tokens, result.logprobs, result.topk)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        reason = result.reason.value
        if self._plan is not None:
            content, calls = read_calls(text, self._plan)
            if calls:
                message["content"] = content or None
                message["tool_calls"] = [call.to_json() for call in calls]
                reason = self._reason_of_calls(reason)
        self._remember(place, result, message)
        choice: dict[str, Any] = {
            "index": place,
            "message": message,
            "finish_reason": reason,
            "logprobs": logprobs,
        }
        return self.add_ids(choice, place, result)

    def end(self, event: FinishedChoice) -> list[dict[str, Any]]:
        chunks = super().end(event)
        if self._record is not None:
            text = self._streams[event.choice].text
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if self._plan is not None:
                content, calls = read_calls(text, self._plan)
                message |= {"content": content, "tool_calls": [call.to_json() for call in calls]}
            self._remember(event.choice, event.result, message)
        return chunks

    def _remember(self, place: int, result: TurnResult, message: dict[str, Any]) -> None:
        """Record the tokens of an answer that was not cut at a stop string."""
        if self._record is not None and result.tokens and not self._streams[place].is_cut:
            self._record.remember_answer(message, [*self.prompts[place], *result.tokens])

    def _reason_of_calls(self, reason: str) -> str:
        """The finish reason of an answer with calls; a call forced by name keeps its own."""
        assert self._plan is not None
        return "tool_calls" if self._plan.only is None and reason == "stop" else reason

    @property
    def only_text(self) -> bool:
        return super().only_text and self._plan is None

    def last_delta(self, place: int) -> dict[str, Any]:
        return self._cut(place, "", None, final=True)

    def reason(self, place: int, result: TurnResult) -> str:
        has_calls = self._plan is not None and self._calls[place].count
        return self._reason_of_calls(result.reason.value) if has_calls else result.reason.value

    def _cut(self, place: int, text: str, logprobs: Any, *, final: bool) -> dict[str, Any]:
        """A delta with text and complete tool calls."""
        delta: dict[str, Any] = {}
        if self._plan is not None:
            first = self._calls[place].count
            text, calls = self._calls[place].feed(text, final=final)
            if calls:
                numbered = enumerate(calls, first)
                delta["tool_calls"] = [{"index": at, **call.to_json()} for at, call in numbered]
        if text:
            delta["content"] = text
        return {"index": place, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def opening(self) -> list[dict[str, Any]]:
        first = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": place, "delta": first, "finish_reason": None}])
            for place in range(len(self.prompts))
        ]

    def delta(self, place: int, text: str, logprobs: Any) -> dict[str, Any]:
        return self._cut(place, text, logprobs, final=False)

    def logprobs(
        self, place: int, tokens: Sequence[int], values: Sequence[Any], tops: Sequence[Top]
    ) -> Any:
        rows = [*tops, *[()] * (len(tokens) - len(tops))]
        content = [
            self._token(token, value)
            | {"top_logprobs": [self._token(other, score) for other, score in row]}
            for token, value, row in zip(tokens, values, rows, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, value: float) -> dict[str, Any]:
        encoded = list(self.codec.bytes.lookup(token))
        return {"token": self.codec.token_text(token), "logprob": value, "bytes": encoded}
