"""The engine on one GPU: `python -m benchmarks.engine.gpu` prints one JSON object.

Qwen3-8B's shape with random bfloat16 weights, 1k prompt and 1k output. Needs PyTorch, Triton,
NumPy and cuda-bindings only, so that it runs where nothing can be installed.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.engine.shapes import QWEN3_8B, read_bandwidth, roofline_s
from harness.packed_attention import PackedCausalAttention
from slackwater.engine.config import EngineConfig
from slackwater.engine.engine import Engine
from slackwater.engine.request import GenerationRequest
from slackwater.model.sampling import Sampling
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.loading import load_net, net_tensors

PROMPT_TOKENS = 1024
Prompt = tuple[int, ...]
Tokens = dict[int, list[int]]
Logprobs = dict[int, list[float]]


def run_batch(engine: Engine, batch: int, output: int) -> tuple[float, list[float]]:
    """Seconds until every request has its first token, and of each step after that."""
    rng = np.random.default_rng(batch)
    params = Sampling(max_tokens=output, seed=1, ignore_eos=True)
    for number in range(batch):
        prompt = tuple(rng.integers(0, QWEN3_8B.vocab_size, PROMPT_TOKENS).tolist())
        engine.add(GenerationRequest(number, prompt, params, "base"))
    began: set[int] = set()
    begin = time.perf_counter()
    while len(began) < batch:
        began.update(engine.step().request_ids.tolist())
    prefill_s = time.perf_counter() - begin
    steps = []
    while engine.busy:
        begin = time.perf_counter()
        count = len(engine.step().tokens)
        if count == batch:
            steps.append(time.perf_counter() - begin)
    return prefill_s, steps


def greedy(engine: Engine, prompts: Sequence[Prompt], output: int) -> tuple[Tokens, Logprobs]:
    """The likeliest continuation of every prompt, all in one batch, and its log-probs."""
    params = Sampling(max_tokens=output, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add(GenerationRequest(number, prompt, params, "base"))
    tokens: Tokens = {number: [] for number in range(len(prompts))}
    logprobs: Logprobs = {number: [] for number in range(len(prompts))}
    while engine.busy:
        out = engine.step()
        rows = zip(
            out.request_ids.tolist(), out.tokens.tolist(), out.logprobs.tolist(), strict=True
        )
        for number, token, logprob in rows:
            tokens[number].append(token)
            logprobs[number].append(logprob)
    return tokens, logprobs


@torch.inference_mode()
def plain(net: CausalLM, ids: Prompt, first: int) -> torch.Tensor:
    """Log-probs over the vocabulary for the positions from `first` on, by one plain forward."""
    tokens = torch.tensor(ids, device="cuda")
    attention = PackedCausalAttention((0, len(ids)), "cuda")
    hidden = net.run_layers(tokens, torch.arange(len(ids), device="cuda"), attention)
    return torch.log_softmax(net.logits(hidden[first - 1 : -1]).float(), -1)


def agreement(engine: Engine, net: CausalLM, output: int) -> dict[str, float]:
    """The engine, and a plain forward of the same bfloat16 weights, each against float32.

    The engine is right if it is as near to float32 as the plain forward is.
    """
    rng = np.random.default_rng(7)
    lengths = (37, 700, 1024, 1500)
    prompts = [tuple(rng.integers(0, QWEN3_8B.vocab_size, n).tolist()) for n in lengths]
    tokens, logprobs = greedy(engine, prompts, output)
    exact = load_net(QWEN3_8B, dtype=torch.float32, device="cuda")
    for name, tensor in net_tensors(exact).items():
        tensor.copy_(net_tensors(net)[name])
    gaps: dict[str, list[float]] = {"engine": [], "plain": []}
    same: dict[str, list[bool]] = {"engine": [], "plain": []}
    for number, prompt in enumerate(prompts):
        ids = (*prompt, *tokens[number])
        reference, rounded = plain(exact, ids, len(prompt)), plain(net, ids, len(prompt))
        picked = torch.tensor(tokens[number], device="cuda")[:, None]
        wanted = reference.gather(1, picked)[:, 0]
        gaps["engine"] += (torch.tensor(logprobs[number]) - wanted.cpu()).abs().tolist()
        gaps["plain"] += (rounded.gather(1, picked)[:, 0] - wanted).abs().tolist()
        same["engine"] += (reference.argmax(-1) == picked[:, 0]).tolist()
        same["plain"] += (reference.argmax(-1) == rounded.argmax(-1)).tolist()
    return {
        "agreement.engine_logprob_gap": float(np.mean(gaps["engine"])),
        "agreement.plain_logprob_gap": float(np.mean(gaps["plain"])),
        "agreement.engine_greedy_share": float(np.mean(same["engine"])),
        "agreement.plain_greedy_share": float(np.mean(same["plain"])),
    }


def measure(batches: list[int], output: int, invariant: bool) -> dict[str, float]:
    """All figures of one engine."""
    bandwidth = read_bandwidth()
    net = load_net(QWEN3_8B, dtype=torch.bfloat16, device="cuda")
    config = EngineConfig(
        kv_bytes=60 << 30,
        page_bytes=32 << 20,
        max_running=max(batches),
        max_step_tokens=8192,
        max_context=4096,
        batch_invariant=invariant,
        prefix_cache=False,
    )
    engine = Engine(net, config)
    figures = {"read_tb_per_s": bandwidth / 1e12}
    for batch in batches:
        run_batch(engine, batch, 8)  # compile and capture
        prefill_s, steps = run_batch(engine, batch, output)
        step_s = float(np.mean(steps))
        floor_s = roofline_s(QWEN3_8B, batch, PROMPT_TOKENS + output / 2, bandwidth)
        figures[f"prefill_tokens_per_s_{batch}"] = batch * PROMPT_TOKENS / prefill_s
        figures[f"decode_tokens_per_s_{batch}"] = batch / step_s
        figures[f"step_ms_{batch}"] = 1e3 * step_s
        figures[f"roofline_ms_{batch}"] = 1e3 * floor_s
        figures[f"roofline_share_{batch}"] = floor_s / step_s
        sys.stderr.write(f"batch {batch}: {1e3 * step_s:.2f} ms a step\n")
    return figures | agreement(engine, net, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--output", type=int, default=1024, help="tokens per request")
    parser.add_argument("--invariant", action="store_true", help="batch-invariant arithmetic")
    options = parser.parse_args()
    figures = measure(options.batches, options.output, options.invariant)
    device = torch.cuda.get_device_name(0)
    sys.stdout.write(
        json.dumps({"name": "engine_gpu", "device": device, "figures": figures}) + "\n"
    )


if __name__ == "__main__":
    main()
