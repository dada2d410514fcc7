"""Decoding with adapters on one GPU: `python -m benchmarks.engine.adapters_gpu` prints one JSON
object.

A step of the base alone, of one adapter, and of 16 different ones in one batch, on the shapes of
Qwen3-8B and 1.7B with random weights; rank 32 on every linear layer and the unembedding. Needs
PyTorch, Triton, NumPy and cuda-bindings only.
"""

import argparse
import gc
import json
import sys
import time

import numpy as np
import torch

from benchmarks.engine.shapes import SHAPES, read_bandwidth, roofline_s
from slackwater.engine.config import EngineConfig
from slackwater.engine.cuda.executor import CudaExecutor
from slackwater.engine.engine import Engine
from slackwater.engine.request import GenerationRequest
from slackwater.model.sampling import Sampling
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net
from slackwater.nets.lora import LoraSpec

RANK = 32
_PROMPT_TOKENS = 512
_IGNORED_STEPS = 8  # captures and first touches


def adapter_tensors(config: NetConfig, seed: int) -> dict[str, torch.Tensor]:
    """An adapter that changes something, drawn on the device."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    tensors = {}
    for layer, (rows, columns) in LoraSpec(RANK).shapes(config).items():
        for factor, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
            drawn = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            drawn.normal_(0, 0.01, generator=generator)
            tensors[f"base_model.model.{layer}.lora_{factor}.weight"] = drawn
    return tensors


def step_ms(engine: Engine, batch: int, versions: list[str], steps: int) -> float:
    """Median of the steps in which all of the batch decode; the rows share the versions evenly."""
    rng = np.random.default_rng(batch)
    for number in range(batch):
        prompt = tuple(rng.integers(0, 150_000, _PROMPT_TOKENS).tolist())
        params = Sampling(max_tokens=steps + _IGNORED_STEPS, seed=number, ignore_eos=True)
        version = versions[number * len(versions) // batch]
        engine.add(GenerationRequest(number, prompt, params, version))
    took = []
    while engine.busy:
        begin = time.perf_counter()
        if len(engine.step().tokens) == batch:
            took.append(time.perf_counter() - begin)
    return 1e3 * float(np.median(took[_IGNORED_STEPS:]))


def new_engine(config: NetConfig, batch: int) -> tuple[Engine, CudaExecutor]:
    net = load_net(config, dtype=torch.bfloat16, device="cuda")
    settings = EngineConfig(
        kv_bytes=40 << 30,
        page_bytes=32 << 20,
        max_running=batch,
        max_step_tokens=8192,
        max_context=4096,
        prefix_cache=False,
    )
    executor = CudaExecutor(net, settings)
    return Engine(net, settings, executor=executor), executor


def measure(shape: str, batches: list[int], steps: int, bandwidth: float) -> dict[str, float]:
    """All figures of one shape."""
    config, figures = SHAPES[shape], {}
    engine, executor = new_engine(config, max(batches))
    names = [f"adapter-{number}" for number in range(16)]
    spec = LoraSpec(RANK)
    for count in (0, 1, 16):
        for name in names[:count]:
            if name not in engine.versions.names():
                engine.versions.put(name, adapter_tensors(config, count), lora=spec)
        for batch in batches:
            key = f"{shape}.batch_{batch}"
            versions = names[:count] or ["base"]
            took_ms = step_ms(engine, batch, versions, steps)
            label = "base" if not count else f"adapters_{count}"
            figures[f"{key}.{label}_ms"] = took_ms
            if not count:
                context = _PROMPT_TOKENS + _IGNORED_STEPS + steps / 2
                floor_ms = 1e3 * roofline_s(config, batch, context, bandwidth)
                figures[f"{key}.roofline_ms"] = floor_ms
                figures[f"{key}.roofline_share"] = floor_ms / took_ms
            else:
                figures[f"{key}.{label}_over_base"] = took_ms / figures[f"{key}.base_ms"]
            sys.stderr.write(f"{key} {label}: {took_ms:.3f} ms a step\n")
    step_ms(engine, batches[0], names[:1], 4)
    before = len(executor._graphs._captured)
    begin = time.perf_counter()
    engine.versions.put(names[0], adapter_tensors(config, 99), lora=spec)
    torch.cuda.synchronize()
    figures[f"{shape}.rewrite_ms"] = 1e3 * (time.perf_counter() - begin)
    step_ms(engine, batches[0], names[:1], 4)
    figures[f"{shape}.captures_after_rewrite"] = len(executor._graphs._captured) - before
    del engine, executor
    gc.collect()
    torch.cuda.empty_cache()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["1.7b", "8b"], choices=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--steps", type=int, default=32, help="steps that count, of each kind")
    options = parser.parse_args()
    bandwidth = read_bandwidth()
    figures = {"read_tb_per_s": bandwidth / 1e12}
    for shape in options.shapes:
        figures |= measure(shape, options.batches, options.steps, bandwidth)
    device = torch.cuda.get_device_name(0)
    named = {"name": "adapters_gpu", "device": device, "figures": figures}
    sys.stdout.write(json.dumps(named) + "\n")


if __name__ == "__main__":
    main()
