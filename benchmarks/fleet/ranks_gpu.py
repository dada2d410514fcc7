"""Two ranks on one GPU against one: `python -m benchmarks.fleet.ranks_gpu` prints one JSON object.

Trains (all parameters, and an adapter) and generates with a model of Qwen3-1.7B's shape and random
bf16 weights, on one rank, under `dp=2` (FSDP) and under `tp=2`, whose two processes share the GPU
over gloo. `mean_abs` is the mean difference of log-probs from those of one rank; `noise` is how far
one rank in bf16 is from one rank in fp32. Ranks are within tolerance where they differ by at most
twice the noise. Needs PyTorch, Triton, NumPy, safetensors and cuda-bindings only. With `--device
cpu --shape tiny` the same runs anywhere, in fp32.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.engine.shapes import QWEN3_1_7B
from harness.rank_processes import rank_environment
from slackwater.engine.config import EngineConfig
from slackwater.engine.engine import Engine, default_executor
from slackwater.engine.ranked_executor import RankedExecutor, RankFollower, RankSlices
from slackwater.engine.request import GenerationRequest
from slackwater.model.adam import Adam
from slackwater.model.sampling import Sampling
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net, save_net
from slackwater.nets.lora import LoraSpec
from slackwater.nets.ranks import RankPlan, Ranks
from slackwater.training.datum import Datum
from slackwater.training.trainer import DTYPES, Trainer
from slackwater.weights.plan.layout import Layout
from slackwater.weights.plan.shard_map import ShardMap

Floats = NDArray[np.float32]
TINY = NetConfig(
    family="qwen3", qk_norm=True, vocab_size=300, hidden_size=64, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=32, ffn_size=96, max_positions=1024, init_std=0.1,
)  # fmt: skip
SHAPES = {"1.7b": QWEN3_1_7B, "tiny": TINY}
LORA = LoraSpec(32, seed=2)
WORK = ("full", "lora", "engine")
_STEPS = 3
_SEQUENCES, _TOKENS = 8, 512
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 8, 256, 16
_ADAM = Adam(learning_rate=1e-5, eps=1e-8, grad_clip_norm=1.0)
_TOLERATED = 2.0  # times the noise of bf16
_ASSUMED_NOISE = 0.02  # of a log-prob at this shape, where fp32 does not run
_LIMIT_S = 300.0
_DEADLINE_S = 120.0


def draw_tokens(shape: NetConfig, seed: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, shape.vocab_size, count)


def train(model: Path, lora: LoraSpec | None, ranks: Ranks | None, where: dict[str, str]) -> Any:
    """Log-probs of every step, and the seconds of the last one."""
    trainer = Trainer.create(model, lora, 1, ranks=ranks, **where)
    shape = NetConfig.from_directory(model)
    found: list[Floats] = []
    for step in range(_STEPS):
        data = []
        for number in range(_SEQUENCES):
            tokens = draw_tokens(shape, 100 * step + number, _TOKENS + 1)
            weights = np.ones(_TOKENS, np.float32)
            inputs: dict[str, NDArray[Any]] = {"target_tokens": tokens[1:], "weights": weights}
            data.append(Datum(tokens[:-1], inputs))
        began_s = time.perf_counter()
        output = trainer.forward_backward(data, "cross_entropy", {})
        trainer.optim_step(_ADAM)
        took_s = time.perf_counter() - began_s
        found += output.logprobs
    return np.concatenate(found), took_s


def adapter_slices(shape: NetConfig, ranks: Ranks | None) -> Mapping[str, Tensor]:
    """An adapter that changes something, or what a rank holds of it."""
    drawn = torch.Generator().manual_seed(7)
    shapes = LORA.tensor_shapes(shape)
    whole = {name: torch.randn(each, generator=drawn) * 0.01 for name, each in shapes.items()}
    if ranks is None:
        return whole
    held = ShardMap(shapes, shape.head_dim, ranks.layout).rank(ranks.rank)
    return RankSlices(
        "adapter",
        {
            piece.tensor: whole[piece.tensor][tuple(map(slice, piece.box.start, piece.box.stop))]
            for piece in held.pieces
        },
    )


def generate(model: Path, ranks: Ranks | None, where: dict[str, str]) -> Any:
    """Log-probs of prompts, of the base and of an adapter; and the seconds of a decode step."""
    shape, dtype, device = NetConfig.from_directory(model), DTYPES[where["dtype"]], where["device"]
    config = EngineConfig(
        kv_bytes=1 << (32 if device == "cuda" else 24),
        page_bytes=(32 if device == "cuda" else 2) << 20,
        max_running=_PROMPTS,
        max_step_tokens=2048,
        max_context=_PROMPT_TOKENS + _NEW_TOKENS,
    )
    executor = None
    if ranks is None:
        engine = Engine(load_net(model, dtype=dtype, device=device), config)
    else:
        from slackwater.training.sharding import load_sharded_net

        net, _ = load_sharded_net(model, ranks, frozen=True, dtype=dtype, device=device, seed=0)
        if not ranks.leads:
            inner = default_executor(net, config)
            RankFollower(net, inner, ranks, lambda _: adapter_slices(shape, ranks)).run()
            return None
        executor = RankedExecutor(default_executor(net, config), ranks)
        engine = Engine(net, config, executor=executor)
    engine.versions.put("adapter", adapter_slices(shape, ranks), lora=LORA)
    scores: dict[int, Floats] = {}
    for number in range(_PROMPTS):
        prompt = tuple(draw_tokens(shape, number, _PROMPT_TOKENS).tolist())
        params = Sampling(max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True)
        version = "base" if number % 2 else "adapter"
        engine.add(GenerationRequest(number, prompt, params, version, scores_prompt=True))
    steps_s = []
    while engine.busy:
        began_s = time.perf_counter()
        output = engine.step()
        if len(output.tokens) == _PROMPTS:
            steps_s.append(time.perf_counter() - began_s)
        for each in output.prompt_scores:
            scores[each.request_id] = each.logprobs[1:]
    if executor is not None:
        executor.close()
    return np.concatenate([scores[number] for number in range(_PROMPTS)]), min(steps_s)


def run_rank(options: argparse.Namespace) -> None:
    """One process: write what it found to `--out`, if it is rank 0."""
    torch.set_num_threads(1 if options.device == "cpu" else 4)
    plan = RankPlan.from_environment(os.environ)
    ranks = None if plan is None else Ranks.join(plan, options.device)
    where = {"dtype": options.dtype, "device": options.device}
    if options.work == "engine":
        result = generate(options.model, ranks, where)
    else:
        lora = LORA if options.work == "lora" else None
        result = train(options.model, lora, ranks, where)
    if result is not None and (ranks is None or ranks.leads):
        peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else 0
        with options.out.open("wb") as file:
            np.savez(file, logprobs=result[0], seconds=result[1], peak_bytes=peak)
    sys.stdout.flush()
    os._exit(0)


class Measurement:
    """Runs work on ranks, each a process, and keeps what rank 0 found."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        self._count = 0

    def run(self, work: str, layout: str, dtype: str) -> dict[str, Any]:
        """`logprobs`, `seconds`, `peak_bytes`; or `error`."""
        parsed = Layout.parse(layout)
        self._count += 1
        out, log = (self._folder / f"{self._count}.{end}" for end in ("npz", "log"))
        processes = []
        for rank in range(parsed.ranks):
            meeting = f"file://{self._folder}/rendezvous-{self._count}"
            plan = RankPlan(rank, parsed, meeting, _DEADLINE_S, backend="gloo")
            command = [sys.executable, "-m", "benchmarks.fleet.ranks_gpu", "--work", work]
            command += ["--device", self._options.device, "--dtype", dtype, "--out", str(out)]
            command += ["--model", str(self._folder / "model")]
            variables = os.environ | (rank_environment(plan) if parsed.ranks > 1 else {})
            with log.open("ab") as file:
                processes.append(subprocess.Popen(command, env=variables, stdout=file, stderr=file))
        try:
            until_s = time.monotonic() + _LIMIT_S
            for process in processes:
                process.wait(max(0.1, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {_LIMIT_S:g} s: {_end(log)}"}
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if not out.exists():
            return {"error": _end(log)}
        with np.load(out) as stored:
            return dict(stored)


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:]


def measure(run: Measurement, work: str, dtype: str) -> dict[str, Any]:
    """One kind of work on one rank and on two."""
    one = run.run(work, "tp=1", dtype)
    exact = one if dtype == "float32" else run.run(work, "tp=1", "float32")
    if "error" in one:
        return {"error": one["error"], "within": False}
    noise = _ASSUMED_NOISE
    if "error" not in exact:
        noise = float(np.abs(one["logprobs"] - exact["logprobs"]).mean()) or 1e-5
    found: dict[str, Any] = {"noise": noise, "one_rank_s": float(one["seconds"]), "within": True}
    if "error" in exact:
        found["noise_assumed_because"] = exact["error"]
    for layout in ("tp=2",) if work == "engine" else ("dp=2", "tp=2"):
        together = run.run(work, layout, dtype)
        if "error" in together:
            found[layout] = together
            found["within"] = False
            continue
        apart = np.abs(together["logprobs"] - one["logprobs"])
        found[layout] = {
            "mean_abs": float(apart.mean()),
            "max_abs": float(apart.max()),
            "over_noise": float(apart.mean()) / noise,
            "seconds": float(together["seconds"]),
            "peak_over_one_rank": float(together["peak_bytes"]) / max(float(one["peak_bytes"]), 1),
        }
        found["within"] = found["within"] and float(apart.mean()) <= _TOLERATED * noise
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="1.7b", choices=sorted(SHAPES))
    parser.add_argument("--only", choices=WORK, action="append")
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    for hidden in ("--work", "--model", "--out"):
        kind = str if hidden == "--work" else Path
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        run_rank(options)
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    with tempfile.TemporaryDirectory(prefix="slackwater-ranks-") as made:
        net = load_net(SHAPES[options.shape], dtype=DTYPES[dtype], device=options.device, seed=1)
        save_net(net, Path(made) / "model")
        del net
        if options.device == "cuda":
            torch.cuda.empty_cache()
        run = Measurement(Path(made), options)
        result: dict[str, Any] = {"shape": options.shape, "torch": str(torch.__version__)}
        for work in options.only or WORK:
            print(f"{work} ...", file=sys.stderr, flush=True)
            result[work] = measure(run, work, dtype)
    result["within"] = all(result[work]["within"] for work in options.only or WORK)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
