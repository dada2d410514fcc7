"""What the ranks of an engine generate in tests and benchmarks, and one rank for comparison."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.rank_training import LORA, NET
from slackwater.engine.engine import Engine
from slackwater.engine.request import GenerationRequest
from slackwater.model.sampling import Sampling
from slackwater.nets.loading import load_net, net_tensors
from slackwater.nets.ranks import Ranks
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.worker.engine_worker import follow_engine, new_engine, new_ranked_engine
from slackwater.worker.weight_lane import RankLane, lora_meta

SIZE: dict[str, Any] = {"kv_mb": 4, "max_running": 8}


def publish(folder: Path) -> None:
    """The versions `new` (other weights) and `adapter`."""
    store = DirectoryWeightStore(folder / "weights")
    store.publish("new", net_tensors(load_net(NET, seed=4)), lora_meta(None))
    drawn = torch.Generator().manual_seed(5)
    shapes = LORA.tensor_shapes(NET)
    factors = {name: torch.randn(s, generator=drawn) * 0.05 for name, s in shapes.items()}
    store.publish("adapter", factors, lora_meta(LORA))


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
    engine = new_engine(folder / "base", device="cpu", base_version="base", **SIZE)
    return generate(engine, versions)


def generate_on_ranks(ranks: Ranks, folder: Path) -> None:
    """Every rank pulls its own slices; rank 0 writes `engine.json`."""
    store = DirectoryWeightStore(folder / "weights")
    if not ranks.leads:
        follow_engine(folder / "base", store, ranks, device="cpu", **SIZE)
        return
    engine, executor = new_ranked_engine(
        folder / "base", ranks, device="cpu", base_version="base", **SIZE
    )
    executor.beat()
    lane = RankLane(store, NET, ranks)
    found = generate(engine, {name: lane.take(name).tensors for name in ("new", "adapter")})
    executor.close()
    (folder / "engine.json").write_text(json.dumps(found))
