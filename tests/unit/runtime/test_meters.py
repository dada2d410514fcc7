"""What `/metrics` shows of turns is what Prometheus' own client would count."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from slackwater.model.ids import JobId, TenantId, TrajectoryId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec
from slackwater.runtime.services.meters import Meters

REQUEST_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
TOKEN_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)

names = st.sampled_from(["a", "b"])
seconds = st.sampled_from([0.0, 0.01, 1.0, 3000.0]) | st.floats(0, 4000)
turns = st.tuples(
    names, names, st.integers(1, 5), seconds, st.integers(0, 4), st.sampled_from("xyz")
)


def spec_of(owner: str, model: str, prompt: int) -> TurnSpec:
    return TurnSpec(
        TurnId("t"),
        TrajectoryId("t"),
        JobId("j"),
        [1] * prompt,
        Sampling(1),
        "v",
        owner=TenantId(owner),
        base_model=model,
    )


def shown(metrics: list[Metric]) -> dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]]:
    """Values by sample and labels, of each metric; the library's creation times left out."""
    return {
        f"{metric.type} {metric.name}: {metric.documentation}": {
            (each.name, tuple(sorted(each.labels.items()))): each.value
            for each in metric.samples
            if not each.name.endswith("_created")
        }
        for metric in metrics
    }


@given(
    st.lists(turns, max_size=20),
    st.lists(st.tuples(names, names, seconds), max_size=5),
    st.lists(st.tuples(names, names, seconds, st.booleans()), max_size=5),
)
def test_turns_are_counted_as_the_client_library_counts(
    ended: list[tuple[str, str, int, float, int, str]],
    streamed: list[tuple[str, str, float]],
    requests: list[tuple[str, str, float, bool]],
) -> None:
    registry, labels, meters = CollectorRegistry(), ["tenant", "model"], Meters()

    def counter(name: str, about: str, *more: str) -> Counter:
        return Counter(name, about, [*labels, *more], namespace="slackwater", registry=registry)

    def histogram(
        name: str, about: str, labels: list[str], buckets: tuple[float, ...]
    ) -> Histogram:
        return Histogram(
            name, about, labels, namespace="slackwater", registry=registry, buckets=buckets
        )

    count = counter("turns", "Turns that ended.", "outcome")
    prompts = counter("prompt_tokens", "Tokens of prompts.")
    made = counter("generated_tokens", "Tokens made.")
    about = "From a request's arrival to a turn's end."
    turn_s = histogram("turn_seconds", about, labels, REQUEST_S)
    about = "From a request's arrival to a streamed turn's first tokens."
    first_s = histogram("first_token_seconds", about, labels, REQUEST_S)
    about = "Time per token of a turn, waits included."
    token_s = histogram("token_seconds", about, labels, TOKEN_S)
    about = "From acceptance of a request to its durable outcome."
    request_s = histogram("request_seconds", about, ["tenant", "kind", "outcome"], REQUEST_S)

    for owner, model, prompt, took_s, tokens, outcome in ended:
        meters.record_turn(spec_of(owner, model, prompt), took_s, tokens, outcome)
        count.labels(owner, model, outcome).inc()
        prompts.labels(owner, model).inc(prompt)
        turn_s.labels(owner, model).observe(took_s)
        if tokens:
            made.labels(owner, model).inc(tokens)
            token_s.labels(owner, model).observe(took_s / tokens)
    for owner, model, waited_s in streamed:
        meters.record_first_token(spec_of(owner, model, 1), waited_s)
        first_s.labels(owner, model).observe(waited_s)
    for owner, kind, took_s, failed in requests:
        meters.record_request(TenantId(owner), kind, took_s, failed)
        request_s.labels(owner, kind, "failed" if failed else "done").observe(took_s)

    assert shown(list(meters.collect())) == shown(list(registry.collect()))
