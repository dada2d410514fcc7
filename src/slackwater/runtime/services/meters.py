"""Prometheus counters and histograms per tenant and model, for an operator's alerts.

Every turn is counted and few scrapes come, so a turn adds to plain numbers; a scrape makes metrics
of them.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from slackwater.model.ids import TenantId
from slackwater.model.turn import TurnSpec

_REQUEST_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
_TOKEN_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_PER_MODEL = ("tenant", "model")


class _Histogram:
    """How many values fell into each bucket, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds and cumulative counts, as Prometheus has them."""
        names = map(floatToGoString, (*self.bounds, float("inf")))
        return list(zip(names, accumulate(self.counts), strict=True))


@dataclass(slots=True)
class _TurnTotals:
    """The turns of one tenant and model."""

    ended: Counter[str] = field(default_factory=Counter)  # by outcome
    prompt_tokens: int = 0
    tokens: int = 0
    turn_s: _Histogram = field(default_factory=lambda: _Histogram(_REQUEST_S))
    first_s: _Histogram = field(default_factory=lambda: _Histogram(_REQUEST_S))
    token_s: _Histogram = field(default_factory=lambda: _Histogram(_TOKEN_S))


class Meters:
    """Every series has its tenant as a label."""

    def __init__(self) -> None:
        self._turns: dict[tuple[str, ...], _TurnTotals] = {}
        self._requests_s: dict[tuple[str, ...], _Histogram] = {}

    def record_first_token(self, spec: TurnSpec, seconds: float) -> None:
        """The first tokens of a streamed turn were passed on."""
        self._totals_of(spec).first_s.observe(seconds)

    def record_turn(self, spec: TurnSpec, seconds: float, tokens: int, outcome: str) -> None:
        """A turn is over: completed, failed or cancelled."""
        totals = self._totals_of(spec)
        totals.ended[outcome] += 1
        totals.prompt_tokens += len(spec.prompt)
        totals.turn_s.observe(seconds)
        if tokens:
            totals.tokens += tokens
            totals.token_s.observe(seconds / tokens)

    def record_request(self, tenant: TenantId, kind: str, seconds: float, failed: bool) -> None:
        """A sample request or a training operation has its outcome."""
        key = (tenant, kind, "failed" if failed else "done")
        found = self._requests_s.get(key)
        if found is None:
            found = self._requests_s[key] = _Histogram(_REQUEST_S)
        found.observe(seconds)

    def _totals_of(self, spec: TurnSpec) -> _TurnTotals:
        key = (spec.owner, spec.base_model)
        totals = self._turns.get(key)
        if totals is None:
            totals = self._turns[key] = _TurnTotals()
        return totals

    def collect(self) -> Iterator[Metric]:
        """All series with a value, as a registry of Prometheus' client gives them."""
        turns = self._turns.items()
        ended = [((*key, how), n) for key, one in turns for how, n in one.ended.items()]
        yield _counter("turns", "Turns that ended.", (*_PER_MODEL, "outcome"), ended)
        prompts = [(key, one.prompt_tokens) for key, one in turns]
        yield _counter("prompt_tokens", "Tokens of prompts.", _PER_MODEL, prompts)
        tokens = [(key, one.tokens) for key, one in turns]
        yield _counter("generated_tokens", "Tokens made.", _PER_MODEL, tokens)
        about = "From a request's arrival to a turn's end."
        each = [(key, one.turn_s) for key, one in turns]
        yield _histogram("turn_seconds", about, _PER_MODEL, each)
        about = "From a request's arrival to a streamed turn's first tokens."
        each = [(key, one.first_s) for key, one in turns]
        yield _histogram("first_token_seconds", about, _PER_MODEL, each)
        about = "Time per token of a turn, waits included."
        each = [(key, one.token_s) for key, one in turns]
        yield _histogram("token_seconds", about, _PER_MODEL, each)
        about, labels = "From acceptance of a request to its durable outcome.", ("tenant", "kind")
        requests = self._requests_s.items()
        yield _histogram("request_seconds", about, (*labels, "outcome"), requests)


def _counter(
    name: str, about: str, labels: Sequence[str], series: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    family = CounterMetricFamily(f"slackwater_{name}", about, labels=labels)
    for values, total in series:
        if total:
            family.add_metric(values, total)
    return family


def _histogram(
    name: str, about: str, labels: Sequence[str], series: Iterable[tuple[Sequence[str], _Histogram]]
) -> Metric:
    family = HistogramMetricFamily(f"slackwater_{name}", about, labels=labels)
    for values, found in series:
        if any(found.counts):
            family.add_metric(values, found.buckets(), found.total)
    return family
