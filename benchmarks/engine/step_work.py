"""The work of one RL step, and what its parts do alone: the ceilings that the whole service is held
to.

`python -m benchmarks.engine.step_work PART MODEL` measures the engine, the trainer, or how far
their log-probs are apart, by itself, in a process that gives the device back when it ends, and
prints one JSON object.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from slackwater.engine.config import EngineConfig
from slackwater.engine.engine import Engine
from slackwater.engine.request import GenerationRequest
from slackwater.model.sampling import Sampling
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net
from slackwater.nets.lora import LoraAdapter, LoraSpec
from slackwater.training.datum import Datum
from slackwater.training.trainer import DTYPES, Trainer
from slackwater.worker.engine_worker import new_engine


@dataclass(frozen=True, slots=True)
class StepWork:
    """Groups of samples of one prompt each; all of them are sampled, the first `trained` groups are
    trained on.
    """

    groups: int = 16
    samples: int = 16
    prompt_tokens: int = 512
    new_tokens: int = 256
    trained: int = 4
    kv_mb: int = 40_000

    @property
    def turns(self) -> int:
        return self.groups * self.samples

    @property
    def trained_rows(self) -> int:
        """Tokens that a pass over the trained groups computes, each prompt once."""
        own = self.prompt_tokens + self.samples * self.new_tokens
        return self.trained * own

    def prompts(self, vocab_size: int, seed: int = 0) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        shape = (self.groups, self.prompt_tokens)
        found: list[list[int]] = rng.integers(0, vocab_size, shape).tolist()
        return found


SMALL = StepWork(groups=2, samples=2, prompt_tokens=24, new_tokens=8, trained=2, kv_mb=64)


def device_name() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def engine_alone(model: Path, work: StepWork, rank: int) -> dict[str, float]:
    """New tokens per second of all turns, from the first to the last, with the adapter that a LoRA
    job samples from.
    """
    engine = new_engine(
        model,
        device=device_name(),
        kv_mb=work.kv_mb,
        max_running=work.turns,
        base_version="base",
    )
    config, version = NetConfig.from_directory(model), "base"
    if rank:
        spec = LoraSpec(rank)
        version = "adapter"
        engine.versions.put(version, LoraAdapter.create(spec, config).tensors, lora=spec)
    # Other prompts each time, as after a new version: none of them is in the prefix cache.
    took_s = min(_rollout_s(engine, work, config, version, seed) for seed in range(3))
    return {"tokens_per_s": work.turns * work.new_tokens / took_s}


def _rollout_s(engine: Engine, work: StepWork, config: NetConfig, version: str, seed: int) -> float:
    prompts = work.prompts(config.vocab_size, seed)
    began_s = time.perf_counter()
    for number in range(work.turns):
        prompt = tuple(prompts[number // work.samples])
        params = Sampling(max_tokens=work.new_tokens, seed=number)
        engine.add(GenerationRequest(number, prompt, params, version))
    while engine.busy:
        engine.step()
    return time.perf_counter() - began_s


def training_data(work: StepWork, vocab_size: int) -> list[Datum]:
    """The trained groups with random answers."""
    rng = np.random.default_rng(1)
    data = []
    for prompt in work.prompts(vocab_size)[: work.trained]:
        for _ in range(work.samples):
            answer = rng.integers(0, vocab_size, work.new_tokens)
            whole = np.concatenate([np.array(prompt), answer])
            data.append(datum(whole, work.prompt_tokens, rng))
    return data


def datum(whole: NDArray[np.int64], prompt_tokens: int, rng: np.random.Generator) -> Datum:
    """A sequence shifted by one, with an advantage on what was sampled."""
    ids = whole.astype(np.int64)
    sampled = np.arange(1, len(ids)) >= prompt_tokens
    advantage = np.where(sampled, rng.choice([-1.0, 1.0]), 0.0).astype(np.float32)
    logprobs = np.where(sampled, -np.log(150_000), 0.0).astype(np.float32)
    inputs: dict[str, NDArray[np.generic]] = {
        "target_tokens": ids[1:],
        "logprobs": logprobs,
        "advantages": advantage,
    }
    return Datum(ids[:-1], inputs)


def trainer_alone(model: Path, work: StepWork, rank: int) -> dict[str, float]:
    """Rows per second of forward and backward over the trained groups."""
    dtype = "bfloat16" if device_name() == "cuda" else "float32"
    lora = LoraSpec(rank) if rank else None
    trainer = Trainer.create(model, lora, dtype=dtype, device=device_name())
    data = training_data(work, NetConfig.from_directory(model).vocab_size)
    took_s = 0.0
    for _ in range(2):
        began_s = time.perf_counter()
        trainer.forward_backward(data, "importance_sampling", {})
        took_s = time.perf_counter() - began_s
    return {"rows_per_s": work.trained_rows / took_s, "pass_s": took_s}


def gap(model: Path, work: StepWork, rank: int) -> dict[str, float]:
    """How far the trainer's log-probs of sampled tokens are from the sampler's, plain and
    batch-invariant, and what the latter costs.
    """
    del rank
    config, device = NetConfig.from_directory(model), device_name()
    dtype = "bfloat16" if device == "cuda" else "float32"
    trainer = Trainer.create(model, LoraSpec(8), dtype=dtype, device=device)
    figures: dict[str, float] = {}
    for name, invariant in (("plain", False), ("invariant", True)):
        settings = EngineConfig(
            kv_bytes=work.kv_mb << 19, page_bytes=32 << 20, max_running=64, max_step_tokens=8192,
            max_context=min(4096, config.max_positions), batch_invariant=invariant,
        )  # fmt: skip
        engine = Engine(load_net(model, dtype=DTYPES[dtype], device=device), settings)
        data, drawn, took_s = _sampled(engine, work, config.vocab_size)
        passed = trainer.forward_backward(data, "importance_sampling", {}, forward_only=True)
        pairs = zip(passed.logprobs, drawn, strict=True)
        gaps = np.concatenate([np.abs(one[-len(own) :] - own) for one, own in pairs])
        figures |= {f"{name}.gap_mean": float(gaps.mean()), f"{name}.gap_max": float(gaps.max())}
        figures[f"{name}.tokens_per_s"] = sum(map(len, drawn)) / took_s
        engine.close()
    return figures


def _sampled(
    engine: Engine, work: StepWork, vocab_size: int
) -> tuple[list[Datum], list[NDArray[np.float32]], float]:
    """The second of two rollouts of the trained groups: as data, with the sampler's log-probs, and
    how long it took.
    """
    for seed in (5, 6):
        tokens: dict[int, list[int]] = {}
        logprobs: dict[int, list[float]] = {}
        prompts = work.prompts(vocab_size, seed)[: work.trained]
        began_s = time.perf_counter()
        for number in range(work.trained * work.samples):
            params = Sampling(max_tokens=work.new_tokens, seed=number, ignore_eos=True)
            prompt = tuple(prompts[number // work.samples])
            engine.add(GenerationRequest(number, prompt, params, "base"))
            tokens[number], logprobs[number] = [], []
        while engine.busy:
            out = engine.step()
            rows = zip(out.request_ids.tolist(), out.tokens, out.logprobs, strict=True)
            for number, token, logprob in rows:
                tokens[number].append(int(token))
                logprobs[number].append(float(logprob))
        took_s = time.perf_counter() - began_s
    rng = np.random.default_rng(1)
    data = [
        datum(np.array([*prompts[n // work.samples], *drawn]), work.prompt_tokens, rng)
        for n, drawn in tokens.items()
    ]
    return data, [np.array(each, np.float32) for each in logprobs.values()], took_s


PARTS = {"engine": engine_alone, "trainer": trainer_alone, "gap": gap}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    work = SMALL if options.small else StepWork()
    with torch.enable_grad() if options.part == "trainer" else torch.no_grad():
        found = PARTS[options.part](options.model, work, options.rank)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
