"""What an operator can alarm on: Prometheus counters and histograms per tenant and model."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from slackwater.model.ids import TenantId
from slackwater.model.turn import TurnSpec

_REQUEST_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
_TOKEN_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)


class Meters:
    """One registry; every series is labelled with whose it is."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels, registry = ["tenant", "model"], self.registry
        self._turns = Counter(
            "slackwater_turns", "Turns that ended.", [*labels, "outcome"], registry=registry
        )
        self._prompt_tokens = Counter(
            "slackwater_prompt_tokens", "Tokens of prompts.", labels, registry=registry
        )
        self._tokens = Counter(
            "slackwater_generated_tokens", "Tokens made.", labels, registry=registry
        )
        self._turn_s = Histogram(
            *("slackwater_turn_seconds", "From a request's arrival to a turn's end.", labels),
            buckets=_REQUEST_S,
            registry=registry,
        )
        self._first_s = Histogram(
            *(
                "slackwater_first_token_seconds",
                "From a request's arrival to a streamed turn's first tokens.",
                labels,
            ),
            buckets=_REQUEST_S,
            registry=registry,
        )
        self._token_s = Histogram(
            *("slackwater_token_seconds", "Time per token of a turn, waits included.", labels),
            buckets=_TOKEN_S,
            registry=registry,
        )
        self._requests_s = Histogram(
            *("slackwater_request_seconds", "From acceptance of a request to its durable outcome."),
            ["tenant", "kind", "outcome"],
            buckets=_REQUEST_S,
            registry=registry,
        )

    def first_token(self, spec: TurnSpec, seconds: float) -> None:
        """The first tokens of a streamed turn were passed on."""
        self._first_s.labels(spec.owner, spec.base_model).observe(seconds)

    def turn_ended(self, spec: TurnSpec, seconds: float, tokens: int, outcome: str) -> None:
        """A turn is over: completed, failed or cancelled."""
        whose = (spec.owner, spec.base_model)
        self._turns.labels(*whose, outcome).inc()
        self._prompt_tokens.labels(*whose).inc(len(spec.prompt))
        self._turn_s.labels(*whose).observe(seconds)
        if tokens:
            self._tokens.labels(*whose).inc(tokens)
            self._token_s.labels(*whose).observe(seconds / tokens)

    def settled(self, tenant: TenantId, kind: str, seconds: float, failed: bool) -> None:
        """A sample request or a training operation has its outcome."""
        outcome = "failed" if failed else "done"
        self._requests_s.labels(tenant, kind, outcome).observe(seconds)
