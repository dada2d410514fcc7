"""Replay a serving trace against an OpenAI endpoint over HTTP, and judge its answers by a promise:
`slackwater bench replay`.

Requests are sent when the trace says, whether or not earlier ones were answered; `late_p99_ms` says
how far behind the trace this process itself was. Times are the user's: from the moment of sending
to the tokens of the stream.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import numpy as np

from benchmarks.options import BenchOptions, ReplayOptions
from benchmarks.serving.replay_trace import Cut, ReplayedRequest, prompt_of, read_replay
from slackwater.model.errors import ConfigError, UnavailableError

_DRAIN_S = 120.0
_PROGRESS_S = 0.5


@dataclass(slots=True)
class Answer:
    """What one request got; moments are on this process's clock, and without an end it failed."""

    sent_s: float
    late_s: float
    first_s: float | None = None
    end_s: float | None = None
    tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return float("inf") if self.first_s is None else self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        if self.end_s is None or self.first_s is None:
            return float("inf")
        return (self.end_s - self.first_s) / max(self.tokens - 1, 1)


@dataclass(slots=True)
class Replay:
    """`run` sends everything and waits for the last answer."""

    options: ReplayOptions
    seed: int
    answers: list[Answer] = field(default_factory=list)

    async def run(self, bench: BenchOptions) -> None:
        options = self.options
        cut = Cut(
            options.from_s,
            options.duration_s * options.speed,
            options.most_prompt,
            options.most_output,
        )
        requests = read_replay(options.trace, cut, self.seed)
        headers = {"authorization": f"Bearer {options.key}", "x-api-key": options.key}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(
            base_url=options.url, headers=headers, limits=limits, timeout=_DRAIN_S
        ) as client:
            model = options.model or await self._first_model(client)
            began_s = time.perf_counter()
            tasks = []
            shown_s = 0.0
            for number, request in enumerate(requests):
                due_s = began_s + request.at_s / options.speed
                while (wait_s := due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(min(wait_s, _PROGRESS_S))
                    if time.perf_counter() - shown_s > _PROGRESS_S:
                        shown_s = time.perf_counter()
                        self._show(bench, shown_s - began_s, len(requests))
                late_s = time.perf_counter() - due_s
                tasks.append(asyncio.create_task(self._ask(client, model, request, number, late_s)))
            bench.progress("waiting for the last answers", 0.99)
            _, left = await asyncio.wait(tasks, timeout=_DRAIN_S)
            for task in left:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _show(self, bench: BenchOptions, now_s: float, requests: int) -> None:
        done = sum(answer.end_s is not None for answer in self.answers)
        said = f"{len(self.answers)} of {requests} sent, {done} answered"
        bench.progress(said, min(now_s / self.options.duration_s, 0.99))

    async def _first_model(self, client: httpx.AsyncClient) -> str:
        """The endpoint's first model, which also says whether anybody answers there."""
        answer = await client.get("/v1/models")
        if answer.status_code in (401, 403):
            raise ConfigError(f"--key: it is not known at {self.options.url}")
        if answer.is_error:
            said = f"{self.options.url} answers {answer.status_code} to /v1/models"
            raise UnavailableError(f"--url: {said}; name an OpenAI endpoint without its /v1")
        return str(answer.json()["data"][0]["id"])

    async def _ask(
        self,
        client: httpx.AsyncClient,
        model: str,
        request: ReplayedRequest,
        number: int,
        late_s: float,
    ) -> None:
        body = {
            "model": model,
            "prompt": prompt_of(request, number, self.seed),
            "max_tokens": request.output_tokens,
            "seed": self.seed + number,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = Answer(time.perf_counter(), late_s)
        self.answers.append(answer)
        try:
            async with client.stream("POST", "/v1/completions", json=body) as stream:
                if stream.is_error:
                    said = (await stream.aread()).decode(errors="replace")
                    answer.error = f"{stream.status_code} {said}"
                    return
                async for line in stream.aiter_lines():
                    _read(line, answer)
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__} {error}"
            return
        if not answer.error:
            answer.end_s = time.perf_counter() if answer.end_s is None else answer.end_s


def _read(line: str, answer: Answer) -> None:
    """One line of an event stream."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    chunk = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        answer.error = str(chunk["error"])
    if chunk.get("usage"):
        answer.tokens = int(chunk["usage"]["completion_tokens"])
    if chunk.get("choices"):
        answer.end_s = time.perf_counter()
        if answer.first_s is None:
            answer.first_s = answer.end_s


def run(options: BenchOptions) -> dict[str, object]:
    """Replay, and judge."""
    asked = options.replay
    if asked is None:
        raise ConfigError.of("--trace", None, "is needed: a file such as azure2023_conv_dev.csv.gz")
    replay = Replay(asked, options.seed)
    try:
        asyncio.run(replay.run(options))
    except httpx.HTTPError as error:
        raise UnavailableError(f"--url: {asked.url} does not answer ({error})") from None
    return figures_of(replay.answers, asked)


def figures_of(answers: Sequence[Answer], asked: ReplayOptions) -> dict[str, object]:
    """Attainment over all and by minute of sending; percentiles of those that were answered."""
    began_s = min(answer.sent_s for answer in answers)
    done = [answer for answer in answers if answer.end_s is not None and not answer.error]
    met = [answer for answer in done if asked.slo.is_met(answer.ttft_s, answer.tpot_s)]
    kept = {id(answer) for answer in met}
    minutes: dict[int, list[bool]] = {}
    for answer in answers:
        minute = int((answer.sent_s - began_s) // 60.0)
        minutes.setdefault(minute, []).append(id(answer) in kept)
    errors = [answer.error for answer in answers if answer.error]
    span_s = max((answer.end_s or answer.sent_s) for answer in answers) - began_s
    figures: dict[str, object] = {
        "requests": len(answers),
        "failed": len(answers) - len(done),
        "tokens": sum(answer.tokens for answer in done),
        "tokens_per_s": sum(answer.tokens for answer in done) / max(span_s, 1e-9),
        "attainment": len(met) / len(answers),
        "late_p99_ms": _ms([answer.late_s for answer in answers], 0.99),
    }
    for name, values in (
        ("ttft", [answer.ttft_s for answer in done]),
        ("tpot", [answer.tpot_s for answer in done if answer.tokens > 1]),
    ):
        figures |= {f"{name}_p{round(100 * q)}_ms": _ms(values, q) for q in (0.5, 0.99) if values}
    figures["attainment_by_minute"] = [
        sum(minutes.get(minute, ())) / max(len(minutes.get(minute, ())), 1)
        for minute in range(max(minutes) + 1)
        if minutes.get(minute)
    ]
    if errors:
        figures["first_error"] = errors[0][:300]
    return figures


def _ms(seconds: Sequence[float], share: float) -> float:
    return 1e3 * float(np.quantile(seconds, share))
