"""Prometheus counters and histograms per tenant and model, for an operator's alerts."""

from collections.abc import Callable
from functools import cache, partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram

from slackwater.model.ids import TenantId
from slackwater.model.turn import TurnSpec

_REQUEST_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
_TOKEN_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)

M = TypeVar("M", Counter, Histogram)


class Meters:
    """One registry; every series has its tenant as a label."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counters = partial(Counter, namespace="slackwater", registry=self.registry)
        histograms = partial(Histogram, namespace="slackwater", registry=self.registry)
        labels = ["tenant", "model"]
        self._turns = _series_of(counters("turns", "Turns that ended.", [*labels, "outcome"]))
        self._prompt_tokens = _series_of(counters("prompt_tokens", "Tokens of prompts.", labels))
        self._tokens = _series_of(counters("generated_tokens", "Tokens made.", labels))
        about = "From a request's arrival to a turn's end."
        self._turn_s = _series_of(histograms("turn_seconds", about, labels, buckets=_REQUEST_S))
        about = "From a request's arrival to a streamed turn's first tokens."
        self._first_s = _series_of(
            histograms("first_token_seconds", about, labels, buckets=_REQUEST_S)
        )
        about = "Time per token of a turn, waits included."
        self._token_s = _series_of(histograms("token_seconds", about, labels, buckets=_TOKEN_S))
        about, labels = "From acceptance of a request to its durable outcome.", ["tenant", "kind"]
        labels.append("outcome")
        self._requests_s = _series_of(
            histograms("request_seconds", about, labels, buckets=_REQUEST_S)
        )

    def record_first_token(self, spec: TurnSpec, seconds: float) -> None:
        """The first tokens of a streamed turn were passed on."""
        self._first_s(spec.owner, spec.base_model).observe(seconds)

    def record_turn(self, spec: TurnSpec, seconds: float, tokens: int, outcome: str) -> None:
        """A turn is over: completed, failed or cancelled."""
        labels = (spec.owner, spec.base_model)
        self._turns(*labels, outcome).inc()
        self._prompt_tokens(*labels).inc(len(spec.prompt))
        self._turn_s(*labels).observe(seconds)
        if tokens:
            self._tokens(*labels).inc(tokens)
            self._token_s(*labels).observe(seconds / tokens)

    def record_request(self, tenant: TenantId, kind: str, seconds: float, failed: bool) -> None:
        """A sample request or a training operation has its outcome."""
        outcome = "failed" if failed else "done"
        self._requests_s(tenant, kind, outcome).observe(seconds)


def _series_of(metric: M) -> Callable[..., M]:
    """The metric's series by label values; there are few, so all are cached."""
    return cache(metric.labels)
