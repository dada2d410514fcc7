"""The engine on a GPU. Skipped where there is none."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from harness.packed_attention import PackedCausalAttention
from slackwater.engine.request import GenerationRequest
from slackwater.model.sampling import Sampling
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net, net_tensors
from slackwater.nets.lora import LoraAdapter, LoraSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = NetConfig(
    family="qwen3",
    qk_norm=True,
    vocab_size=5000,
    hidden_size=256,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    ffn_size=512,
    max_positions=4096,
    init_std=0.08,
    tied=False,
)
SETTINGS: dict[str, Any] = {
    "kv_bytes": 512 << 20,
    "max_running": 32,
    "max_step_tokens": 1000,
    "max_context": 4000,
}


@pytest.fixture(scope="module")
def net() -> Iterator[CausalLM]:
    yield load_net(CONFIG, dtype=torch.bfloat16, device="cuda")


def plain_logprobs(
    net: CausalLM, tokens: list[int], adapter: LoraAdapter | None = None
) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.tensor(tokens, device="cuda")
        attention = PackedCausalAttention((0, len(tokens)), "cuda")
        places = torch.arange(len(tokens), device="cuda")
        hidden = net.run_layers(ids, places, attention, adapter=adapter)
        return torch.log_softmax(net.logits(hidden, adapter=adapter).float(), -1)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 5000, length).tolist())


def requests(count: int, **params: Any) -> list[GenerationRequest]:
    lengths = (1, 5, 63, 64, 65, 130, 511, 512, 513, 1500, 2900)
    settings = {"max_tokens": 70} | params
    return [
        GenerationRequest(
            i,
            prompt(i, lengths[i % len(lengths)]),
            Sampling(seed=i, **settings),
            "base",
            scores_prompt=i % 3 == 0,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_a_plain_forward(net: CausalLM, temperature: float) -> None:
    from tiny_engine import run

    from slackwater.engine.config import EngineConfig
    from slackwater.engine.engine import Engine

    engine = Engine(net, EngineConfig(**SETTINGS))
    wanted = requests(22, temperature=temperature)
    found = run(engine, *wanted)
    for request in wanted:
        ids = [*request.prompt, *found.tokens[request.request_id]]
        first = len(request.prompt)
        reference = plain_logprobs(net, ids)
        rows = reference[first - 1 : -1]
        picked = torch.tensor(ids[first:], device="cuda")
        expected = rows.gather(1, picked[:, None])[:, 0].cpu().numpy()
        given = np.array(found.logprobs[request.request_id])
        assert np.abs(given - expected).mean() < 0.03
        assert np.abs(given - expected).max() < 0.25
        if temperature == 0:
            slack = rows.max(-1).values - rows.gather(1, picked[:, None])[:, 0]
            assert slack.max() < 0.25, "a greedy token is the likeliest but for rounding"
        if request.scores_prompt and first > 1:
            scores = found.scores[request.request_id].logprobs[1:]
            told = torch.tensor(ids[1:first], device="cuda")
            wanted_scores = reference[: first - 1].gather(1, told[:, None])[:, 0].cpu().numpy()
            assert np.abs(scores - wanted_scores).mean() < 0.03


def test_invariant_mode_gives_the_same_bits_alone_in_a_crowd_and_continued(net: CausalLM) -> None:
    from dataclasses import replace

    from tiny_engine import run

    from slackwater.engine.config import EngineConfig
    from slackwater.engine.engine import Engine

    engine = Engine(net, EngineConfig(**SETTINGS, batch_invariant=True))
    wanted = [replace(request, scores_prompt=False) for request in requests(22)]
    crowd = run(engine, *wanted)
    for request in wanted[:11]:
        number = request.request_id
        alone = run(engine, request)
        assert alone.tokens[number] == crowd.tokens[number]
        assert alone.logprobs[number] == crowd.logprobs[number]
        moved = replace(request, generated=tuple(crowd.tokens[number][:31]))
        assert run(engine, moved).tokens[number] == crowd.tokens[number][31:]


def test_top_k_and_top_p_keep_to_their_tokens(net: CausalLM) -> None:
    from tiny_engine import run

    from slackwater.engine.config import EngineConfig
    from slackwater.engine.engine import Engine

    # Batch-invariant, or a near tie may fall otherwise where a prefix was cached.
    engine = Engine(net, EngineConfig(**SETTINGS, batch_invariant=True))
    only = run(engine, *requests(8, top_k=1, max_tokens=8))
    greedy = run(engine, *requests(8, temperature=0.0, max_tokens=8))
    assert only.tokens == greedy.tokens
    few = run(engine, *requests(8, top_p=0.0001, max_tokens=8))
    assert few.tokens == greedy.tokens


def test_adapters_and_full_versions_give_their_own_outputs(net: CausalLM) -> None:
    from tiny_engine import run

    from slackwater.engine.config import EngineConfig
    from slackwater.engine.engine import Engine

    engine = Engine(net, EngineConfig(**SETTINGS))
    spec = LoraSpec(8)
    adapter = LoraAdapter.create(spec, CONFIG, dtype=torch.bfloat16, device="cuda")
    for name, tensor in adapter.tensors.items():
        if "lora_B" in name:
            tensor.normal_(0, 0.02)
    engine.versions.put("tuned", adapter.tensors, lora=spec)
    other = load_net(CONFIG, dtype=torch.bfloat16, device="cuda", seed=9)
    engine.versions.put("other", net_tensors(other))
    params = Sampling(max_tokens=20, seed=3)
    names = ("base", "tuned", "other")
    found = run(
        engine, *(GenerationRequest(i, prompt(1, 90), params, v) for i, v in enumerate(names))
    )
    for number, (model, own) in enumerate(((net, None), (net, adapter), (other, None))):
        ids = [*prompt(1, 90), *found.tokens[number]]
        reference = plain_logprobs(model, ids, own)[89:-1]
        picked = torch.tensor(found.tokens[number], device="cuda")
        expected = reference.gather(1, picked[:, None])[:, 0].cpu().numpy()
        assert np.abs(np.array(found.logprobs[number]) - expected).mean() < 0.03


def test_memory_that_is_set_aside_is_the_devices_again_until_it_is_back() -> None:
    from slackwater.engine.cuda.pages import CudaPagePool
    from slackwater.engine.pages import PageArena

    page = 64 << 20
    pool = CudaPagePool(4 * page, page, torch.device("cuda"))
    arena = PageArena(pool, 4 * page)
    assert arena.hold(0, 4 * page)
    free, _ = torch.cuda.mem_get_info()
    assert not pool.set_aside(1), "all pages are in use"
    arena.release(0, 2 * page)
    assert arena.reclaim(2) == 2
    assert pool.set_aside(2)
    assert torch.cuda.mem_get_info()[0] >= free + 2 * page
    assert not arena.hold(0, page)
    assert pool.set_aside(0)
    assert arena.hold(0, 2 * page)


def test_pages_keep_their_contents_when_they_move() -> None:
    from slackwater.engine.cuda.pages import CudaPagePool, device_view
    from slackwater.engine.pages import PageArena

    page = 2 << 20
    pool = CudaPagePool(4 * page, page, torch.device("cuda"))
    first, second = PageArena(pool, 4 * page), PageArena(pool, 4 * page)
    assert first.hold(0, 4 * page)
    assert not second.hold(0, page), "all pages are taken"
    view = device_view(first, torch.device("cuda"))
    view.fill_(7)
    first.release(2 * page, 4 * page)
    assert first.reclaim(2) == 2
    assert second.hold(0, 2 * page)
    moved = device_view(second, torch.device("cuda"))
    assert int(moved[: page // 2].min()) == 7, "the same physical page"
    moved[: page // 2].fill_(9)
    assert int(view[: page // 2].max()) == 7, "another page than the first arena's"
