"""Answers of `/v1/completions`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slackwater.model.turn import FinishReason
from slackwater.runtime.executors.engines import TurnResult
from slackwater.serve.openai.answers import ResponseWriter, Top
from slackwater.serve.openai.bodies import CompletionBody
from slackwater.serve.openai.generation import ChoiceDelta, FinishedChoice
from slackwater.serve.openai.text import TextCodec


class CompletionAnswers(ResponseWriter):
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

    @property
    def only_text(self) -> bool:
        return super().only_text and not self.body.echo

    def whole(self, results: Sequence[TurnResult]) -> dict[str, Any]:
        return super().whole([self._wanted(result) for result in results])

    def piece(self, event: ChoiceDelta) -> list[dict[str, Any]]:
        return [] if self.body.only_prompt else super().piece(event)

    def end(self, event: FinishedChoice) -> list[dict[str, Any]]:
        return super().end(replace(event, result=self._wanted(event.result)))

    def _wanted(self, result: TurnResult) -> TurnResult:
        """Without the token that was drawn where none was wanted."""
        if not self.body.only_prompt:
            return result
        return replace(result, tokens=[], logprobs=[], topk=[], reason=FinishReason.LENGTH)

    def choice(self, place: int, result: TurnResult, text: str) -> dict[str, Any]:
        tokens, tops = list(result.tokens), list(result.topk)
        values: list[float | None] = list(result.logprobs)
        if self.body.echo:
            prompt, scores, rows = self._scored(place, result.prompt_logprobs, result.prompt_topk)
            text = self.codec.decode(prompt, special=True) + text
            tokens, values, tops = prompt + tokens, scores + values, rows + tops
        choice: dict[str, Any] = {
            "index": place,
            "text": text,
            "finish_reason": result.reason.value,
            "logprobs": self.logprobs(place, tokens, values, tops) if self.wants_logprobs else None,
        }
        return self.add_ids(choice, place, result)

    def _scored(
        self, place: int, scores: Sequence[float | None] | None, tops: Sequence[Top | None]
    ) -> tuple[list[int], list[float | None], list[Top]]:
        """The prompt's tokens, their scores, and as many alternatives as were asked for."""
        prompt = list(self.prompts[place])
        rows: list[Top] = [(row or ())[: self.body.logprobs] for row in tops]
        rows += [()] * (len(prompt) - len(rows))
        return prompt, list(scores or [None] * len(prompt)), rows

    def echo(
        self, place: int, scores: Sequence[float | None] | None, tops: Sequence[Top | None]
    ) -> list[dict[str, Any]]:
        if not self.body.echo:
            return []
        prompt, values, rows = self._scored(place, scores, tops)
        said = self.logprobs(place, prompt, values, rows) if self.wants_logprobs else None
        return [self._chunk([self.delta(place, self.codec.decode(prompt, special=True), said)])]

    def delta(self, place: int, text: str, logprobs: Any) -> dict[str, Any]:
        return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": None}

    def logprobs(
        self, place: int, tokens: Sequence[int], values: Sequence[Any], tops: Sequence[Top]
    ) -> Any:
        label, spelling = self.codec.token_label, self._spellings[place]
        top = [{label(token): value for token, value in row} for row in tops]
        return {
            "tokens": [label(token) for token in tokens],
            "token_logprobs": list(values),
            "top_logprobs": top if any(top) else None,
            "text_offset": [spelling.offset_of(token) for token in tokens],
        }
