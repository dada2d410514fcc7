"""What the ranks of an engine generate in tests and benchmarks, and one rank for comparison."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.rank_training import LORA, NET
from slackwater.engine.config import EngineConfig
from slackwater.engine.cpu.executor import CpuExecutor
from slackwater.engine.engine import Engine
from slackwater.engine.ranked_executor import RankedExecutor, RankFollower, RankSlices
from slackwater.engine.request import GenerationRequest
from slackwater.model.sampling import Sampling
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.loading import empty_net, load_net, net_shapes, net_tensors
from slackwater.nets.ranks import Ranks
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.weights.plan.shard_map import ShardMap

CONFIG = EngineConfig(kv_bytes=1 << 20, page_bytes=4096, max_running=8, max_step_tokens=16)


def publish(folder: Path) -> None:
    """The versions `base`, `new` (other weights) and `adapter`."""
    store = DirectoryWeightStore(folder / "weights")
    for seed, version in ((3, "base"), (4, "new")):
        store.publish(version, net_tensors(load_net(NET, seed=seed)), {})
    drawn = torch.Generator().manual_seed(5)
    shapes = LORA.tensor_shapes(NET)
    factors = {name: torch.randn(s, generator=drawn) * 0.05 for name, s in shapes.items()}
    store.publish("adapter", factors, {})


def generate(engine: Engine, versions: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    """Turns on three versions, two of them with a prefix that the cache has; greedy."""
    engine.put_version("new", versions["new"])
    engine.put_version("adapter", versions["adapter"], lora=LORA)
    found: dict[int, list[list[float]]] = {}
    for wave in range(2):
        for number, version in enumerate(("base", "new", "adapter")):
            prompt = tuple((7 * i + number) % NET.vocab_size for i in range(20 + wave * 5))
            params = Sampling(max_tokens=8, temperature=0.0)
            engine.add(GenerationRequest(10 * wave + number, prompt, params, version))
        while engine.busy:
            out = engine.step()
            rows = zip(out.request_ids.tolist(), out.tokens, out.logprobs, strict=True)
            for request, token, logprob in rows:
                found.setdefault(request, []).append([int(token), float(logprob)])
    cached = engine.gauges()["prompt_tokens_cached"]
    return {"turns": {str(key): value for key, value in found.items()}, "cached": cached}


def generate_alone(folder: Path) -> dict[str, Any]:
    store = DirectoryWeightStore(folder / "weights")
    versions = {name: store.pull(name) for name in ("new", "adapter")}
    return generate(Engine(load_net(NET, seed=3), CONFIG), versions)


def generate_on_ranks(ranks: Ranks, folder: Path) -> None:
    """Every rank pulls its own slices; rank 0 writes `engine.json`."""
    store = DirectoryWeightStore(folder / "weights")

    def fetch(version: str) -> RankSlices:
        shapes = LORA.tensor_shapes(NET) if version == "adapter" else net_shapes(NET)
        shards = ShardMap(shapes, NET.head_dim, ranks.layout).rank(ranks.rank)
        return RankSlices(version, store.pull_slices(version, shards)[0])

    net = _base(ranks, fetch("base"))
    inner = CpuExecutor(net.rank_config, CONFIG)
    if not ranks.leads:
        RankFollower(net, inner, ranks, fetch).run()
        return
    executor = RankedExecutor(inner, ranks)
    engine = Engine(net, CONFIG, executor=executor)
    executor.beat()
    found = generate(engine, {name: fetch(name) for name in ("new", "adapter")})
    executor.close()
    (folder / "engine.json").write_text(json.dumps(found))


def _base(ranks: Ranks, slices: Mapping[str, Tensor]) -> CausalLM:
    net = empty_net(NET, torch.float32, torch.device("cpu"), ranks.tp)
    for name, tensor in net_tensors(net).items():
        tensor.copy_(slices[name])
    return net
