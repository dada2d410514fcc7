"""A request goes on elsewhere, from its tokens, as if nothing had happened."""

import random

import pytest
from tiny_engine import engine, prompt, request, run

from slackwater.engine.request import GenerationRequest


def some_request(request_id: int, rng: random.Random) -> GenerationRequest:
    tokens = prompt(rng.randrange(10_000), rng.choice((1, 3, 15, 16, 17, 31, 48, 70)))
    if rng.random() < 0.3:
        tokens = prompt(7, 40) + tokens  # a prefix that others share
    return request(
        request_id,
        tokens,
        max_tokens=rng.randrange(2, 26),
        seed=rng.randrange(2**63),
        temperature=rng.choice((0.0, 0.7, 1.0, 1.0, 1.5)),
        top_p=rng.choice((1.0, 1.0, 0.8)),
        top_k=rng.choice((0, 0, 5)),
    )


def test_500_requests_cut_at_random_points_continue_on_a_second_engine_with_the_same_tokens() -> (
    None
):
    """Batches of 1 to 16 on either side, other batch mates, other chunk sizes, warm caches."""
    rng = random.Random(20261115)
    first, second = engine(max_step_tokens=64), engine(max_step_tokens=23)
    cases = 0
    while cases < 500:
        size = rng.randrange(1, 17)
        requests = [some_request(i, rng) for i in range(size)]
        whole = run(first, *requests)
        moved = []
        for one in requests:
            tokens = whole.tokens[one.request_id]
            cut = rng.randrange(len(tokens))
            resumed = GenerationRequest(
                one.request_id, one.prompt, one.params, one.version, tuple(tokens[:cut])
            )
            moved.append((resumed, tokens[cut:], whole.logprobs[one.request_id][cut:]))
        rng.shuffle(moved)
        while moved:
            batch = [moved.pop() for _ in range(min(len(moved), rng.randrange(1, 17)))]
            there = run(second, *(resumed for resumed, _, _ in batch))
            for resumed, tokens, logprobs in batch:
                assert there.tokens[resumed.request_id] == tokens, resumed
                assert there.logprobs[resumed.request_id] == logprobs, "the same bits"
                cases += 1


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_a_prompt_gives_the_same_bits_in_chunks_of_any_size(chunk: int) -> None:
    whole = run(engine(max_step_tokens=512), request(1, prompt(1, 150), max_tokens=20))
    pieces = run(engine(max_step_tokens=chunk), request(1, prompt(1, 150), max_tokens=20))
    assert pieces.tokens == whole.tokens
    assert pieces.logprobs == whole.logprobs


def test_batch_mates_change_nothing() -> None:
    one = request(99, prompt(1, 33), max_tokens=30, seed=5)
    alone = run(engine(), one)
    mates = [request(i, prompt(i, 5 * i + 1), max_tokens=3 * i + 1, seed=i) for i in range(15)]
    crowd = run(engine(), *mates[:7], one, *mates[7:])
    assert crowd.tokens[99] == alone.tokens[99]
    assert crowd.logprobs[99] == alone.logprobs[99]


def test_a_preempted_request_gives_the_tokens_it_would_have_given() -> None:
    requests = [request(i, prompt(i, 40), max_tokens=60, seed=i) for i in range(8)]
    roomy, tight = engine(), engine(blocks=14)
    expected = run(roomy, *requests)
    found = run(tight, *requests)
    assert tight.gauges()["preemptions"] > 0, "the cache was too small for all of them"
    assert found.tokens == expected.tokens
    assert found.logprobs == expected.logprobs


def test_tokens_given_as_generated_count_in_the_limit_and_are_not_given_again() -> None:
    whole = run(engine(), request(1, prompt(3, 20), max_tokens=10)).tokens[1]
    rest = run(engine(), request(1, prompt(3, 20), max_tokens=10, generated=tuple(whole[:9])))
    assert rest.tokens[1] == whole[9:]
    nothing = run(engine(), request(1, prompt(3, 20), max_tokens=10, generated=tuple(whole)))
    assert nothing.tokens == {}
    assert nothing.finished[1].reason == "length"


def test_a_prompt_extended_by_its_output_goes_on_the_same_way() -> None:
    """The stream is addressed by position in the whole sequence, so a second turn agrees too."""
    whole = run(engine(), request(1, prompt(3, 20), max_tokens=10, seed=4)).tokens[1]
    extended = request(1, prompt(3, 20) + tuple(whole[:6]), max_tokens=4, seed=4)
    assert run(engine(), extended).tokens[1] == whole[6:]
