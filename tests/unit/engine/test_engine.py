"""The engine as its users see it."""

import os
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tiny_engine import (
    CONFIG,
    KV_BYTES_PER_BLOCK,
    VOCAB,
    Collected,
    engine,
    net,
    plain_logprobs,
    prompt,
    request,
    run,
)

from slackwater.engine.config import EngineConfig
from slackwater.engine.engine import Engine
from slackwater.engine.pages import HostPagePool
from slackwater.model.errors import ConfigError, NotFoundError, RefusedError
from slackwater.nets.loading import load_net, net_tensors
from slackwater.nets.lora import LoraAdapter, LoraSpec


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


def test_greedy_tokens_and_logprobs_are_those_of_a_plain_forward() -> None:
    source, model = engine(), net()
    for length in (1, 5, 16, 17, 130):
        found = run(source, request(1, prompt(length, length), temperature=0.0, max_tokens=30))
        rows = plain_logprobs(model, [*prompt(length, length), *found.tokens[1]])[length - 1 : -1]
        assert rows.argmax(-1).tolist() == found.tokens[1]
        picked = rows.gather(1, torch.tensor(found.tokens[1])[:, None])[:, 0]
        np.testing.assert_allclose(found.logprobs[1], picked, atol=1e-4)


def test_logprobs_are_at_the_temperature_that_was_sampled_with() -> None:
    found = run(engine(), request(1, prompt(1, 9), temperature=0.6, seed=3))
    rows = plain_logprobs(net(), [*prompt(1, 9), *found.tokens[1]])[8:-1]
    heated = torch.log_softmax(rows / 0.6, -1)
    picked = heated.gather(1, torch.tensor(found.tokens[1])[:, None])[:, 0]
    np.testing.assert_allclose(found.logprobs[1], picked, atol=1e-4)


@pytest.mark.parametrize("chunk", [7, 512])
def test_prompt_scores_are_those_of_a_plain_forward(chunk: int) -> None:
    source = engine(max_step_tokens=chunk)
    run(source, request(5, prompt(2, 50)))  # its prefix is in the cache; scores come all the same
    asked = request(1, prompt(2, 50), scores_prompt=True, topk_prompt_logprobs=3, max_tokens=2)
    mates = [request(i, prompt(i, 20)) for i in range(2, 5)]
    found = run(source, mates[0], asked, *mates[1:])
    reference = plain_logprobs(net(), list(prompt(2, 50)))
    scores = found.scores[1]
    assert np.isnan(scores.logprobs[0])
    picked = reference[:-1].gather(1, torch.tensor(prompt(2, 50)[1:])[:, None])[:, 0]
    np.testing.assert_allclose(scores.logprobs[1:], picked, atol=1e-4)
    assert scores.top is not None
    best = reference[:-1].topk(3)
    assert scores.top.tokens[1:].tolist() == best.indices.tolist()
    np.testing.assert_allclose(scores.top.logprobs[1:], best.values, atol=1e-4)
    assert scores.top.logprobs[0].tolist() == [-99999.0] * 3
    assert set(found.scores) == {1}


def test_a_request_for_no_tokens_scores_its_prompt_and_ends() -> None:
    found = run(engine(), request(1, prompt(2, 30), scores_prompt=True, max_tokens=0))
    assert found.tokens == {}
    assert len(found.scores[1].logprobs) == 30
    assert found.finished[1].reason == "length"
    assert run(engine(), request(1, prompt(2, 30), max_tokens=0)).finished[1].reason == "length"


def test_the_likeliest_tokens_come_with_each_token_that_asked() -> None:
    found = run(engine(), request(1, prompt(1, 9), topk_logprobs=4), request(2, prompt(2, 9)))
    assert set(found.top) == {1}
    assert len(found.top[1]) == len(found.tokens[1])
    rows = plain_logprobs(net(), [*prompt(1, 9), *found.tokens[1]])[8:-1]
    for top, row in zip(found.top[1], rows, strict=True):
        assert top.tokens[0].tolist() == row.topk(4).indices.tolist()


def test_a_stop_token_ends_the_output_and_is_in_it() -> None:
    free = run(engine(), request(1, prompt(1, 9), max_tokens=40)).tokens[1]
    stop = free[10]
    first = free.index(stop)
    found = run(engine(), request(1, prompt(1, 9), max_tokens=40, stop_token_ids=(stop,)))
    assert found.tokens[1] == free[: first + 1]
    assert found.finished[1].reason == "stop"
    many = (*range(100, 130), stop)
    wide = run(engine(), request(1, prompt(1, 9), max_tokens=40, stop_token_ids=many))
    assert wide.tokens[1] == free[: first + 1], "any number of stop tokens"


def test_the_models_end_token_stops_unless_it_is_ignored() -> None:
    free = run(engine(), request(1, prompt(1, 9), max_tokens=30)).tokens[1]
    stopped = run(engine(eos=(free[5],)), request(1, prompt(1, 9), max_tokens=30))
    assert stopped.tokens[1] == free[: free.index(free[5]) + 1]
    ignored = run(engine(eos=(free[5],)), request(1, prompt(1, 9), max_tokens=30, ignore_eos=True))
    assert ignored.tokens[1] == free
    assert ignored.finished[1].reason == "length"


def test_a_stop_string_ends_the_output_with_the_token_that_completes_it() -> None:
    free = run(engine(), request(1, prompt(1, 9), max_tokens=40)).tokens[1]
    text = letters(free)
    wanted = text[14:17]
    end = text.index(wanted) + 3
    source = engine(decode=letters)
    found = run(source, request(1, prompt(1, 9), max_tokens=40, stop_strings=("@@", wanted)))
    assert found.tokens[1] == free[:end]
    assert found.finished[1].reason == "stop"
    moved = request(
        1, prompt(1, 9), max_tokens=40, stop_strings=(wanted,), generated=tuple(free[: end - 1])
    )
    assert run(source, moved).tokens[1] == [free[end - 1]], "also across a move"


def test_an_aborted_request_gives_nothing_more_and_frees_its_blocks() -> None:
    source = engine(prefix_cache=False)
    collected = Collected()
    for number in range(4):
        source.add(request(number, prompt(number, 30), max_tokens=50))
    for _ in range(5):
        collected.take(source)
    assert source.abort(2)
    assert not source.abort(2)
    before = len(collected.tokens[2])
    while source.busy:
        collected.take(source)
    assert len(collected.tokens[2]) == before
    assert set(collected.finished) == {0, 1, 3}
    assert source.gauges()["kv_blocks_in_use"] == 0


def test_a_shared_prefix_is_computed_once() -> None:
    source = engine()
    shared = prompt(1, 64)
    run(source, request(1, shared + prompt(2, 5), max_tokens=4))
    first = source.gauges()["tokens_computed"]
    found = run(source, request(2, shared + prompt(3, 5), max_tokens=4))
    assert found.finished[2].prompt_cached_tokens == 64
    assert source.gauges()["tokens_computed"] - first == 5 + 3


def test_equal_prompts_that_come_together_wait_for_the_first_and_share_it() -> None:
    source = engine()
    group = [request(i, prompt(1, 65), max_tokens=8, seed=i) for i in range(8)]
    found = run(source, *group)
    assert source.gauges()["tokens_computed"] == 65 + 7 * 1 + 8 * 7
    cold = engine(prefix_cache=False, max_step_tokens=1000)
    assert run(cold, *group).tokens == found.tokens
    assert cold.gauges()["steps"] == 8, "without a cache nobody waits for anybody"


def test_a_second_turn_finds_the_first_ones_output_in_the_cache() -> None:
    source = engine()
    first = run(source, request(1, prompt(1, 20), max_tokens=30)).tokens[1]
    second = prompt(1, 20) + tuple(first) + prompt(2, 6)
    assert run(source, request(2, second)).finished[2].prompt_cached_tokens == 48


def test_the_context_ends_a_request_by_length() -> None:
    source = engine(max_context=40)
    found = run(source, request(1, prompt(1, 33), max_tokens=500))
    assert len(found.tokens[1]) == 7
    assert found.finished[1].reason == "length"


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"tokens": (0, VOCAB)}, "prompt token"),
        ({"tokens": (-1,)}, "prompt token"),
        ({"tokens": ()}, "prompt"),
        ({"tokens": prompt(1, 512)}, "context"),
        ({"tokens": prompt(1, 9), "max_tokens": -1}, "max_tokens"),
        ({"tokens": prompt(1, 9), "temperature": float("nan")}, "temperature"),
        ({"tokens": prompt(1, 9), "top_p": 0.0}, "top_p"),
        ({"tokens": prompt(1, 9), "top_k": -1}, "top_k"),
        ({"tokens": prompt(1, 9), "stop_strings": ("x",)}, "tokenizer"),
        ({"tokens": prompt(1, 9), "topk_logprobs": 1000}, "topk_logprobs"),
        ({"tokens": prompt(1, 9), "request_id": 2**32}, "request_id"),
        ({"tokens": prompt(1, 9), "request_id": 0}, "running already"),
        ({"tokens": prompt(1, 100), "max_tokens": 380}, "kv_bytes"),
    ],
)
def test_a_request_that_can_never_run_is_refused_and_loses_nothing(
    bad: dict[str, object], field: str
) -> None:
    source = engine(blocks=20)
    good = request(0, prompt(1, 9), max_tokens=5)
    expected = run(engine(blocks=20), good).tokens[0]
    source.add(good)
    with pytest.raises(ConfigError, match=field):
        source.add(request(bad.pop("request_id", 1), bad.pop("tokens"), **bad))  # type: ignore[arg-type]
    assert run(source).tokens[0] == expected


def test_an_unknown_version_is_refused_by_name() -> None:
    with pytest.raises(NotFoundError, match=r"'v9'.*held are: base"):
        engine().add(request(1, prompt(1, 9), version="v9"))


def trained(spec: LoraSpec, seed: int) -> LoraAdapter:
    adapter = LoraAdapter.create(spec, CONFIG)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in adapter.tensors.items():
        if "lora_B" in name:
            tensor.normal_(0, 0.3, generator=generator)
    return adapter


def engine_with(version: str, seed: int) -> Engine:
    source = engine()
    source.versions.put(version, trained(LoraSpec(4), seed).tensors, lora=LoraSpec(4))
    return source


def test_weights_of_another_type_are_taken_as_what_they_say() -> None:
    halves = {name: tensor.bfloat16() for name, tensor in net_tensors(net(5)).items()}
    source = engine()
    source.versions.put("halves", halves)
    source.versions.put("wide", {name: tensor.float() for name, tensor in halves.items()})
    found = run(
        source,
        request(1, prompt(1, 20), version="halves"),
        request(2, prompt(1, 20), version="wide"),
    )
    assert found.tokens[1] == found.tokens[2]


def test_versions_are_read_side_by_side_each_with_its_own_weights() -> None:
    """Full weights and adapters in one batch give what each gives alone, to the bit."""
    specs = {"small": LoraSpec(2), "large": LoraSpec(8, mlp=False)}
    source = engine()
    source.versions.put("full", net_tensors(net(5)))
    for number, (name, spec) in enumerate(specs.items()):
        source.versions.put(name, trained(spec, number).tensors, lora=spec)
    names = ("base", "full", "small", "large")
    requests = [
        request(i, prompt(i % 3, 40), max_tokens=15, seed=i, version=names[i % 4])
        for i in range(12)
    ]
    crowd = run(source, *requests)
    for one in requests:
        assert run(source, one).tokens[one.request_id] == crowd.tokens[one.request_id]
    other = Engine(net(5), EngineConfig(kv_bytes=1 << 20, page_bytes=4096))
    alone = run(other, request(1, prompt(1, 40), max_tokens=15, seed=1))
    assert alone.tokens[1] == crowd.tokens[1], "the full version is that model"
    assert crowd.tokens[0] != crowd.tokens[1]


def test_weights_rewritten_in_place_serve_running_requests_and_hide_old_prefixes() -> None:
    source = engine()
    source.versions.put("live", net_tensors(net(5)))
    before = run(source, request(1, prompt(1, 40), version="live")).tokens[1]
    source.add(request(2, prompt(2, 10), max_tokens=30, version="live"))
    collected = Collected()
    for _ in range(10):
        collected.take(source)
    source.versions.put("live", net_tensors(net(6)))
    while source.busy:
        collected.take(source)
    assert len(collected.tokens[2]) == 30
    after = run(source, request(3, prompt(1, 40), version="live"))
    fresh = run(engine(seed=6), request(3, prompt(1, 40)))
    assert after.tokens[3] == fresh.tokens[3]
    assert after.tokens[3] != before
    assert after.finished[3].prompt_cached_tokens == 0


def test_an_adapter_rewritten_in_place_serves_running_requests() -> None:
    spec = LoraSpec(4)
    source = engine()
    source.versions.put("live", trained(spec, 1).tensors, lora=spec)
    source.add(request(1, prompt(1, 10), max_tokens=20, temperature=0.0, version="live"))
    collected = Collected()
    for _ in range(5):
        collected.take(source)
    source.versions.put("live", trained(spec, 2).tensors, lora=spec)
    collected.take(source)
    before, after = collected.logprobs[1][4], collected.logprobs[1][5]
    same = run(engine_with("live", 1), request(1, prompt(1, 10), temperature=0.0, version="live"))
    assert same.logprobs[1][4] == before
    assert same.logprobs[1][5] != after, "the sixth token came from the new adapter"
    with pytest.raises(ConfigError, match="another rank"):
        source.versions.put("live", trained(LoraSpec(8), 2).tensors, lora=LoraSpec(8))


def test_versions_are_bounded_dropped_and_their_memory_reused() -> None:
    source = engine(max_full_versions=2, max_adapters=1)
    source.versions.put("one", net_tensors(net(5)))
    with pytest.raises(RefusedError, match="drop a version first"):
        source.versions.put("two", net_tensors(net(6)))
    source.add(request(1, prompt(1, 9), version="one"))
    with pytest.raises(RefusedError, match="1 requests"):
        source.versions.drop("one")
    run(source)
    source.versions.drop("one")
    source.versions.put("two", net_tensors(net(6)))
    found = run(source, request(1, prompt(1, 9), version="two")).tokens[1]
    assert found == run(engine(seed=6), request(1, prompt(1, 9))).tokens[1]
    spec = LoraSpec(2)
    source.versions.put("adapter", trained(spec, 1).tensors, lora=spec)
    with pytest.raises(RefusedError, match="max_adapters"):
        source.versions.put("another", trained(spec, 2).tensors, lora=spec)
    with pytest.raises(RefusedError, match="base"):
        source.versions.drop("base")
    with pytest.raises(ConfigError, match="missing or not of this model"):
        source.versions.put("bad", {"x": torch.zeros(1)})


def test_a_tied_embedding_follows_a_rewrite() -> None:
    from dataclasses import replace

    tied = replace(CONFIG, tied=True)
    config = EngineConfig(kv_bytes=1 << 20, page_bytes=4096)
    source = Engine(load_net(tied, seed=1), config)
    source.versions.put("next", net_tensors(load_net(tied, seed=2)))
    found = run(source, request(1, prompt(1, 20), version="next"))
    fresh = run(Engine(load_net(tied, seed=2), config), request(1, prompt(1, 20)))
    assert found.tokens == fresh.tokens


def test_prompts_may_run_alone_while_other_requests_wait() -> None:
    source, found = engine(max_step_tokens=16), Collected()
    short, long = request(1, prompt(1, 5), max_tokens=9), request(2, prompt(2, 40), max_tokens=4)
    source.add(short)
    found.take(source)
    source.add(long)
    for _ in range(3):  # 16, 16 and 8 tokens
        assert 2 not in found.tokens
        found.take(source, decode=False)
    assert {number: len(tokens) for number, tokens in found.tokens.items()} == {1: 1, 2: 1}
    while source.busy:
        found.take(source, decode=False)  # there are no prompts any more
    assert found.tokens == run(engine(), short, long).tokens


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_under_pressure_keeps_every_request_exact(seed: int) -> None:
    """Arrivals, aborts and a cache far too small: no request is lost, mixed up or changed."""
    rng = random.Random(seed)
    tight = engine(blocks=18, max_running=6, max_step_tokens=rng.choice((9, 40)))
    collected, requests, aborted = Collected(), {}, set()
    for number in range(40):
        one = request(
            number,
            prompt(rng.randrange(4), rng.choice((3, 17, 60, 90))),
            max_tokens=rng.randrange(1, 50),
            seed=number,
        )
        requests[number] = one
        tight.add(one)
        for _ in range(rng.randrange(6)):
            if tight.busy:
                collected.take(tight, decode=rng.random() < 0.7)
        victim = rng.randrange(number + 1)
        if rng.random() < 0.15 and victim not in collected.finished and tight.abort(victim):
            aborted.add(victim)
            tight.check_integrity()
    while tight.busy:
        collected.take(tight)
    assert set(collected.finished) == set(requests) - aborted
    assert tight.gauges()["kv_blocks_in_use"] == 0
    roomy = engine()
    expected = run(roomy, *(requests[number] for number in collected.finished))
    for number in collected.finished:
        assert collected.tokens[number] == expected.tokens[number], number
        assert collected.logprobs[number] == expected.logprobs[number]


def test_pages_of_forgotten_prefixes_go_back_to_the_pool() -> None:
    source = engine()
    run(source, *(request(i, prompt(i, 100)) for i in range(6)))
    mapped = source.gauges()["kv_pages_mapped"]
    assert source.reclaim_pages(10_000) > 0
    assert source.gauges()["kv_pages_mapped"] < mapped
    again = run(source, request(1, prompt(1, 100)))
    assert again.tokens == run(engine(), request(1, prompt(1, 100))).tokens


def cache_memory_bytes(source: Engine) -> int:
    """What the system holds for the cache's pages."""
    pool = source.arena.pool
    assert isinstance(pool, HostPagePool)
    return os.fstat(pool._file).st_blocks * 512


def test_a_cache_that_nobody_uses_gives_its_memory_back() -> None:
    """As a worker asks for it: prefixes that were not used for a while go, the others stay."""
    source = engine(blocks=2000)
    start = cache_memory_bytes(source)
    for number in range(40):
        source.evict_and_release(float(number), before_s=float(number) - 10)
        run(source, request(number, prompt(number, 100)))
    assert cache_memory_bytes(source) - start <= 13 * (200 // 16 + 1) * KV_BYTES_PER_BLOCK
    before = source.gauges()["prompt_tokens_cached"]
    again = run(source, request(100, prompt(39, 100)))
    assert source.gauges()["prompt_tokens_cached"] > before, "a prefix in use lately is kept"
    late = run(source, request(101, prompt(0, 100)))
    source.evict_and_release(1000.0, before_s=1000.0)
    assert cache_memory_bytes(source) <= start
    once_more = run(source, request(102, prompt(0, 100)), request(103, prompt(39, 100)))
    assert once_more.tokens[102] == late.tokens[101]
    assert once_more.tokens[103] == again.tokens[100]
