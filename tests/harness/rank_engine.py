"""What the ranks of an engine generate in tests and benchmarks, and one rank for comparison."""

import json
import time
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
from slackwater.nets.lora import lora_meta
from slackwater.nets.ranks import RankPlan, Ranks
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.worker.engine_worker import follow_engine, new_engine, new_ranked_engine
from slackwater.worker.puller import RankLane

SIZE: dict[str, Any] = {"kv_mb": 4, "max_running": 8}
TURNS, TURN_TOKENS = 8, 32


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
    engine.versions.put("new", versions["new"])
    engine.versions.put("adapter", versions["adapter"], lora=LORA)
    found: dict[str, list[list[float]]] = {}
    for wave in range(2):
        for number, version in enumerate(("base", "new", "adapter")):
            prompt = tuple((7 * i + number) % NET.vocab_size for i in range(20 + wave * 5))
            params = Sampling(max_tokens=8, temperature=0.0)
            engine.add(GenerationRequest(10 * wave + number, prompt, params, version))
        found |= _run_out(engine)
    return {"turns": found, "cached": engine.gauges()["prompt_tokens_cached"]}


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
    executor.send_heartbeat()
    lane = RankLane(store, NET, ranks)
    found = generate(engine, {name: lane.take(name).tensors for name in ("new", "adapter")})
    executor.close()
    (folder / "engine.json").write_text(json.dumps(found))


def time_turns(plan: RankPlan | None, *, folder: str, name: str, resumed: str) -> None:
    """Sample turns after one that warms up, and write tokens, log-probs and seconds to `name`.json;
    from half way on of those that `resumed` names.
    """
    base, size = Path(folder) / "base", {"kv_mb": 128, "max_running": TURNS}
    executor = None
    if plan is None:
        engine = new_engine(base, device="cpu", base_version="base", **size)
    else:
        ranks = Ranks.join(plan)
        if not ranks.leads:
            store = DirectoryWeightStore(Path(folder) / "weights")
            follow_engine(base, store, ranks, device="cpu", **size)
            return
        engine, executor = new_ranked_engine(base, ranks, device="cpu", base_version="base", **size)
        executor.send_heartbeat()
    before = _turns_of(Path(folder) / f"{resumed}.json") if resumed else {}
    engine.add(GenerationRequest(TURNS, (1, 2, 3), Sampling(max_tokens=4), "base"))
    _run_out(engine)
    for turn in range(TURNS):
        prompt = tuple((7 * i + turn) % 500 for i in range(48))
        params = Sampling(max_tokens=TURN_TOKENS, seed=turn, ignore_eos=True)
        begun = tuple(int(token) for token, _ in before.get(str(turn), ())[: TURN_TOKENS // 2])
        engine.add(GenerationRequest(turn, prompt, params, "base", generated=begun))
    began_s = time.perf_counter()
    turns = _run_out(engine)
    took_s = time.perf_counter() - began_s
    if executor is not None:
        executor.close()
    found = {"turns": turns, "took_s": took_s, "tokens": sum(map(len, turns.values()))}
    (Path(folder) / f"{name}.json").write_text(json.dumps(found))


def _turns_of(path: Path) -> dict[str, list[list[float]]]:
    turns: dict[str, list[list[float]]] = json.loads(path.read_text())["turns"]
    return turns


def _run_out(engine: Engine) -> dict[str, list[list[float]]]:
    """By request, every token with its log-prob."""
    found: dict[str, list[list[float]]] = {}
    while engine.busy:
        out = engine.step()
        for request, token, logprob in zip(
            out.request_ids.tolist(), out.tokens, out.logprobs, strict=True
        ):
            found.setdefault(str(request), []).append([int(token), float(logprob)])
    return found
