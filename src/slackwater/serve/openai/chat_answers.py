"""Answers of `/v1/chat/completions`."""

from collections.abc import Sequence
from typing import Any

from slackwater.runtime.executors.engines import TurnResult
from slackwater.serve.openai.answers import ResponseWriter, Top
from slackwater.serve.openai.bodies import ChatBody
from slackwater.serve.openai.text import TextCodec
from slackwater.serve.openai.tool_calls import CallStream, read_calls
from slackwater.serve.openai.tools import ToolPlan


class ChatAnswers(ResponseWriter):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def __init__(
        self,
        body: ChatBody,
        codec: TextCodec,
        prompts: Sequence[Sequence[int]],
        plan: ToolPlan | None = None,
    ) -> None:
        super().__init__(body, codec, prompts)
        self.body = body
        self._plan = plan
        self._calls = [] if plan is None else [CallStream(plan) for _ in prompts]

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.body.logprobs)

    def choice(self, place: int, result: TurnResult, text: str) -> dict[str, Any]:
        said = None
        if self.wants_logprobs:
            said = self.logprobs(place, result.tokens, result.logprobs, result.topk)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        reason = result.reason.value
        if self._plan is not None:
            content, calls = read_calls(text, self._plan)
            if calls:
                message["content"] = content or None
                message["tool_calls"] = [call.shown() for call in calls]
                reason = self._reason_of_calls(reason)
        choice: dict[str, Any] = {
            "index": place,
            "message": message,
            "finish_reason": reason,
            "logprobs": said,
        }
        return self.add_ids(choice, place, result)

    def _reason_of_calls(self, reason: str) -> str:
        """A call that was asked for by name ends as any answer, says OpenAI."""
        assert self._plan is not None
        return "tool_calls" if self._plan.only is None and reason == "stop" else reason

    @property
    def only_text(self) -> bool:
        return super().only_text and self._plan is None

    def last_delta(self, place: int) -> dict[str, Any]:
        return self._cut(place, "", None, final=True)

    def reason(self, place: int, result: TurnResult) -> str:
        called = self._plan is not None and self._calls[place].count
        return self._reason_of_calls(result.reason.value) if called else result.reason.value

    def _cut(self, place: int, text: str, logprobs: Any, *, final: bool) -> dict[str, Any]:
        """A delta with what is said and the calls that are complete."""
        delta: dict[str, Any] = {}
        if self._plan is not None:
            first = self._calls[place].count
            text, calls = self._calls[place].feed(text, final=final)
            if calls:
                numbered = enumerate(calls, first)
                delta["tool_calls"] = [{"index": at, **call.shown()} for at, call in numbered]
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
        text, spelled = self.codec.token_text(token), self.codec.token_bytes(token)
        return {"token": text, "logprob": value, "bytes": list(spelled)}
