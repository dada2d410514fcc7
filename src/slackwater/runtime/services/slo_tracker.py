"""Tracks whether a served model meets its SLO as its users see it."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from slackwater.model.ids import TurnId
from slackwater.model.serving import ServingSlo
from slackwater.policy.serving.overload import Overload

_MINUTE_S = 60.0
_KEPT_MINUTES = 60
_NEVER_S = float("inf")
_MANY_LATE = 2  # one late request says nothing about a share of many


@dataclass(slots=True)
class _OpenRequest:
    arrived_s: float
    prompt_tokens: int
    first_s: float = _NEVER_S


@dataclass(frozen=True, slots=True)
class _Answer:
    at_s: float
    ttft_s: float
    tpot_s: float


@dataclass(slots=True)
class ServedMinute:
    """Latencies of the requests that ended in a minute, the `number`-th of the service."""

    number: int
    met: int = 0
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Figures of the minute; failed requests have no times."""
        requests = len(self.ttft_s)
        return {
            "minute": float(self.number),
            "requests": float(requests),
            "attainment": self.met / requests if requests else 1.0,
            "ttft_p50_s": _quantile(self.ttft_s, 0.5),
            "ttft_p99_s": _quantile(self.ttft_s, 0.99),
            "tpot_p50_s": _quantile(self.tpot_s, 0.5),
            "tpot_p99_s": _quantile(self.tpot_s, 0.99),
        }


class SloTracker:
    """Follows the requests for one served model; `since_s` is when it started.

    A failed request misses the SLO. One that its user cancels counts only if it was late by then.
    `on_answer` gets the time of each answer, its prompt tokens and its output tokens.
    """

    def __init__(
        self,
        model: str,
        slo: ServingSlo,
        since_s: float,
        on_answer: Callable[[float, int, int], None] = lambda took_s, prompt, output: None,
    ) -> None:
        self.model, self.slo = model, slo
        self._since_s = since_s
        self._open_requests: dict[TurnId, _OpenRequest] = {}
        self._recent: deque[_Answer] = deque()
        self._minutes: deque[ServedMinute] = deque(maxlen=_KEPT_MINUTES)
        self._overload = Overload(slo.share)
        self._on_answer = on_answer

    def record_arrival(self, turn: TurnId, at_s: float, prompt_tokens: int = 0) -> None:
        self._open_requests[turn] = _OpenRequest(at_s, prompt_tokens)

    def record_first_token(self, turn: TurnId, now_s: float) -> None:
        request = self._open_requests.get(turn)
        if request is not None and request.first_s == _NEVER_S:
            request.first_s = now_s

    def record_answer(self, turn: TurnId, now_s: float, tokens: int) -> None:
        request = self._open_requests.pop(turn, None)
        if request is not None:
            first_s = min(request.first_s, now_s)
            tpot_s = (now_s - first_s) / max(tokens - 1, 1)
            self._count_answer(_Answer(now_s, first_s - request.arrived_s, tpot_s))
            self._on_answer(now_s - request.arrived_s, request.prompt_tokens, tokens)

    def record_failure(self, turn: TurnId, now_s: float) -> None:
        if self._open_requests.pop(turn, None) is not None:
            self._count_answer(_Answer(now_s, _NEVER_S, _NEVER_S))

    def record_cancel(self, turn: TurnId, now_s: float) -> None:
        """The user of a turn has left."""
        request = self._open_requests.pop(turn, None)
        if request is None:
            return
        waited_s = min(request.first_s, now_s) - request.arrived_s
        if waited_s > self.slo.ttft_s:
            self._count_answer(_Answer(now_s, waited_s, 0.0))

    def is_met(self, now_s: float) -> bool:
        """Whether recent requests met the SLO: answered ones, and ones that still wait, in the
        control plane or at a worker.
        """
        late = sum(
            request.first_s == _NEVER_S and now_s - request.arrived_s > self.slo.ttft_s
            for request in self._open_requests.values()
        )
        return late < _MANY_LATE and not self._overload.is_broken(now_s)

    def gauges(self, now_s: float) -> dict[str, float]:
        self._drop_old(now_s)
        recent = self._recent
        met = sum(self.slo.is_met(answer.ttft_s, answer.tpot_s) for answer in recent)
        return {
            "serving_requests_last_minute": float(len(recent)),
            "serving_slo_attainment_last_minute": met / len(recent) if recent else 1.0,
            "serving_ttft_p99_last_minute_s": _quantile([answer.ttft_s for answer in recent], 0.99),
            "serving_tpot_p99_last_minute_s": _quantile([answer.tpot_s for answer in recent], 0.99),
            "serving_requests_under_way": float(len(self._open_requests)),
        }

    def minutes(self) -> list[dict[str, float]]:
        """The last hour by minute, oldest first, without minutes that had no request."""
        return [minute.figures() for minute in self._minutes]

    def _count_answer(self, answered: _Answer) -> None:
        self._drop_old(answered.at_s)
        self._recent.append(answered)
        number = int((answered.at_s - self._since_s) // _MINUTE_S)
        if not self._minutes or self._minutes[-1].number != number:
            self._minutes.append(ServedMinute(number))
        minute, met = self._minutes[-1], self.slo.is_met(answered.ttft_s, answered.tpot_s)
        self._overload.record_answer(answered.at_s, kept=met)
        minute.met += met
        minute.ttft_s.append(answered.ttft_s)
        minute.tpot_s.append(answered.tpot_s)

    def _drop_old(self, now_s: float) -> None:
        while self._recent and self._recent[0].at_s < now_s - _MINUTE_S:
            self._recent.popleft()


def _quantile(values: Sequence[float], share: float) -> float:
    """A quantile of the finite values; 0 if there is none."""
    known = [value for value in values if value != _NEVER_S]
    return float(np.quantile(known, share)) if known else 0.0
