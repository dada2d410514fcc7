"""What an engine keeps of its turns for the next control plane."""

import numpy as np

from slackwater.model.sampling import Sampling
from slackwater.wire.messages import Generate, HeldTurn
from slackwater.worker.turn_history import MAX_DELAY_S, STREAM_DELAY_S, TurnHistory


def order(
    request: int, turn: str, generated: list[int], *, topk: int = 0, stream: bool = False
) -> Generate:
    tokens = np.array(generated, "<u4").tobytes()
    logprobs = np.full(len(generated), -1.0, "<f4").tobytes()
    sampling = Sampling(max_tokens=9, topk_logprobs=topk)
    return Generate(
        request, "v", b"", tokens, sampling, turn=turn, logprobs=logprobs, stream=stream
    )


def tokens_of(held: HeldTurn) -> tuple[str, list[int], list[float]]:
    scores = np.frombuffer(held.logprobs, "<f4").tolist()
    return held.turn, np.frombuffer(held.tokens, "<u4").tolist(), scores


def test_a_report_has_all_tokens_of_live_turns_and_all_but_the_last_of_ended_ones() -> None:
    history = TurnHistory()
    history.begin(order(1, "moved", [5]))
    history.begin(order(2, "ended", []))
    history.begin(order(3, "aborted", []))
    history.begin(order(4, "alternatives", [], topk=2))
    history.append([1, 2, 3, 4], [6, 7, 8, 9], [-0.5, -0.25, -1.0, -1.0])
    history.append([2], [3], [-2.0])
    assert history.end(2) == 2
    history.drop(3)
    found = history.report()
    assert sorted(tokens_of(held) for held in found.turns) == [
        ("ended", [7], [-0.25]),
        ("moved", [5, 6], [-1.0, -0.5]),
    ]


def test_a_turn_is_reported_again_until_it_is_sent_again() -> None:
    history = TurnHistory()
    history.begin(order(1, "first", []))
    history.begin(order(2, "second", []))
    history.append([1, 2], [6, 7], [-0.5, -0.5])
    assert history.report() == history.report()
    history.begin(order(1, "first", [6]))
    history.append([1], [8], [-0.25])
    found = sorted(tokens_of(held) for held in history.report().turns)
    assert found == [("first", [6, 8], [-1.0, -0.25]), ("second", [7], [-0.5])]


def test_of_many_turns_that_ended_the_last_are_kept() -> None:
    history = TurnHistory()
    for request in range(9000):
        history.begin(order(request, f"t{request}", []))
        history.append([request], [1], [0.0])
        history.end(request)
    found = [held.turn for held in history.report().turns]
    assert found == [f"t{request}" for request in range(9000 - len(found), 9000)]
    assert 100 < len(found) < 9000


def columns_of(history: TurnHistory, now_s: float) -> dict[int, list[int]]:
    columns = history.take_unsent(now_s)
    tokens = iter(list(columns.tokens))
    rows = zip(list(columns.requests), columns.counts, strict=True)
    return {request: [next(tokens) for _ in range(count)] for request, count in rows}


def test_tokens_are_sent_once_and_those_of_a_turn_that_was_dropped_never() -> None:
    history = TurnHistory()
    history.begin(order(1, "moved", [5]))
    history.begin(order(2, "dropped", []))
    history.append([1, 2], [6, 7], [-0.5, -0.25])
    history.append([1], [8], [-0.5])
    history.drop(2)
    assert columns_of(history, 0.0) == {1: [6, 8]}
    assert columns_of(history, 0.0) == {}
    history.append([1], [9], [-0.5])
    assert columns_of(history, 0.0) == {1: [9]}


def test_tokens_wait_for_those_of_other_steps_but_a_streams_first_token_does_not() -> None:
    history = TurnHistory()
    history.begin(order(1, "quiet", []))
    assert columns_of(history, 10.0) == {}
    history.append([1], [6], [-0.5])
    assert not history.is_due(10.0 + MAX_DELAY_S / 2)
    assert history.is_due(10.0 + 1.01 * MAX_DELAY_S)
    history.begin(order(2, "streamed", [], stream=True))
    history.append([1, 2], [7, 8], [-0.5, -0.5])
    assert history.is_due(10.0)
    assert columns_of(history, 11.0) == {1: [6, 7], 2: [8]}
    history.append([1, 2], [7, 8], [-0.5, -0.5])
    assert not history.is_due(11.0 + STREAM_DELAY_S / 2)
    assert history.is_due(11.0 + 1.01 * STREAM_DELAY_S)
