"""Co-serving on one GPU: `python -m slackwater.bench.serving.coserving_gpu --trace conv=FILE` prints one JSON object.

An 8B-shape service under a trace's arrivals, another 8B-shape model rolling out beside it, in every mode; and the costs
of moving pages and of activating a rollout model. Needs PyTorch, Triton, NumPy and cuda-bindings only.
"""

import argparse
import gc
import json
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from slackwater.bench.engine.shapes import LLAMA_8B, QWEN3_8B
from slackwater.engine.config import EngineConfig
from slackwater.engine.coserving.executor import CoservingExecutor
from slackwater.engine.coserving.staged_weights import StagedWeights
from slackwater.engine.coserving.step_profile import measure_step_cost
from slackwater.engine.coserving.token_times import ServedTimes
from slackwater.engine.cuda.executor import CudaExecutor
from slackwater.engine.cuda.pages import CudaPagePool
from slackwater.engine.engine import Engine
from slackwater.engine.pages import PageArena
from slackwater.engine.request import GenerationRequest
from slackwater.model.sampling import Sampling
from slackwater.model.serving import ServingSlo
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net
from slackwater.policy.serving.arbiter import Arbiter
from slackwater.policy.serving.modes import mode_of
from slackwater.policy.serving.step_cost import StepCost
from slackwater.sim.serving.serving_trace import Arrival, read_serving_trace, scaled

SLO = ServingSlo(0.5, 0.15)
_PAGE = 16 << 20  # of the pool: what a page costs to map is the same for all sizes
_KV_BYTES = 48 << 30
_CONFIG = EngineConfig(
    kv_bytes=_KV_BYTES,
    page_bytes=_PAGE,
    max_running=64,
    max_step_tokens=2048,
    max_context=16384,
    steps_ahead=False,
)
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_CONTEXTS = (200, 400, 900, 1900, 3900, 7900, 15900)


def pages_ms(page_bytes: int, rounds: int = 5) -> dict[str, float]:
    """1 GB of pages from one range to another and back, medians, with the parts of it."""
    count = (1 << 30) // page_bytes
    pool = CudaPagePool(1 << 30, page_bytes, torch.device("cuda"))
    one, other = (PageArena(pool, 1 << 30) for _ in range(2))
    begin = time.perf_counter()
    one.hold(0, 1 << 30)
    create_s = time.perf_counter() - begin
    moves: list[float] = []
    unmaps: list[float] = []
    for _ in range(rounds):
        for source, target in ((one, other), (other, one)):
            source.let_go(0, 1 << 30)
            begin = time.perf_counter()
            source.reclaim(count)
            unmaps.append(time.perf_counter() - begin)
            target.hold(0, 1 << 30)
            moves.append(time.perf_counter() - begin)
    one.close()
    other.close()
    pool.close()
    return {
        f"pages_{page_bytes >> 20}mb.move_1gb_ms": 1e3 * float(np.median(moves)),
        f"pages_{page_bytes >> 20}mb.unmap_1gb_ms": 1e3 * float(np.median(unmaps)),
        f"pages_{page_bytes >> 20}mb.create_and_map_1gb_ms": 1e3 * create_s,
    }


@dataclass(slots=True)
class Rollouts:
    """Keeps `many` turns of trajectories under way; each turn goes on where the last of its trajectory ended."""

    executor: CoservingExecutor
    many: int
    seed: int
    made: int = 0
    given_back: int = 0
    numbers: int = 0
    waiting: deque[GenerationRequest] = field(default_factory=deque)
    running: dict[int, GenerationRequest] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def feed(self) -> None:
        """Bring the number of turns up again."""
        rng = np.random.default_rng(self.seed + self.numbers)
        while len(self.running) < self.many:
            if self.waiting:
                request = self.waiting.popleft()
            else:
                self.numbers += 1
                prompt = rng.integers(0, LLAMA_8B.vocab_size, int(rng.integers(800, 2400)))
                params = Sampling(
                    max_tokens=int(rng.integers(100, 400)), seed=self.numbers, ignore_eos=True
                )
                request = GenerationRequest(self.numbers, tuple(prompt.tolist()), params, "base")
            self.running[request.request_id] = request
            self.tokens[request.request_id] = list(request.generated)
            self.executor.roll_out(request)

    def take(self, ids: list[int], tokens: list[int]) -> None:
        self.made += len(ids)
        for request, token in zip(ids, tokens, strict=True):
            self.tokens[request].append(token)

    def end(self, request_id: int) -> None:
        """The environment answers at once: the next turn's prompt is all that was said, and 200 tokens more."""
        request, tokens = self.running.pop(request_id), self.tokens.pop(request_id)
        if len(request.prompt) + len(tokens) < 6000:
            self.numbers += 1
            said = (*request.prompt, *tokens, *range(200))
            params = Sampling(max_tokens=200, seed=self.numbers, ignore_eos=True)
            self.waiting.append(GenerationRequest(self.numbers, said, params, "base"))

    def give_back(self, request_id: int) -> None:
        """It moves elsewhere; here another takes its place."""
        self.given_back += 1
        self.running.pop(request_id)
        self.tokens.pop(request_id)


class Machine:
    """Both models on the device, profiled and warmed up once."""

    def __init__(self) -> None:
        device = torch.device("cuda")
        self.pool = CudaPagePool(_KV_BYTES, _PAGE, device)
        net = load_net(QWEN3_8B, dtype=torch.bfloat16, device="cuda")
        self.service = self._engine(net)
        rollout_net = load_net(LLAMA_8B, dtype=torch.bfloat16, device="cuda", seed=1)
        self.staged = StagedWeights.of(rollout_net, device)
        del rollout_net
        _empty()
        self.figures: dict[str, float] = {}
        self.rollout = self._activated()
        self.service_cost = self._profiled(self.service, QWEN3_8B, "service", _ROWS)
        self.rollout_cost = self._profiled(self.rollout, LLAMA_8B, "rollout", _ROWS[:-2])

    def _engine(self, net: CausalLM) -> Engine:
        executor = CudaExecutor(net, _CONFIG, self.pool)
        return Engine(net, _CONFIG, executor=executor)

    def _activated(self) -> Engine:
        """Measure: activate, put away, activate again."""
        free_before, _ = torch.cuda.mem_get_info()
        seconds: list[float] = []
        engine: Engine | None = None
        for _ in range(2):
            if engine is not None:
                engine.close()
                engine = None
                _empty()
                free_idle, _ = torch.cuda.mem_get_info()
                self.figures["idle_runtime_gb"] = (free_before - free_idle) / 1e9
            begin = time.perf_counter()
            engine = self._engine(self.staged.on_device())
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        self.figures["activation_first_s"], self.figures["activation_s"] = seconds
        assert engine is not None
        return engine

    def _profiled(
        self, engine: Engine, config: NetConfig, name: str, rows: tuple[int, ...]
    ) -> StepCost:
        begin = time.perf_counter()
        engine.warm_decode(rows, _CONTEXTS)
        self.figures[f"{name}_graphs_s"] = time.perf_counter() - begin
        sizes = (16, 64, 128, 256, 512, 1024, 2048)
        measure_step_cost(
            engine, config.vocab_size, sizes
        )  # compiles what is compiled when first run
        cost = measure_step_cost(engine, config.vocab_size, sizes)
        for kind, curve in (("prompt", cost.prompt), ("decode", cost.decode)):
            for size, seconds in zip(curve.rows, curve.seconds, strict=True):
                self.figures[f"{name}_{kind}_{size}_ms"] = 1e3 * seconds
        self.figures[f"{name}_pair_ns"] = 1e9 * cost.pair_s
        self.figures[f"{name}_prompt_pair_ns"] = 1e9 * cost.prompt_pair_s
        return cost

    def executor(self, mode: str) -> CoservingExecutor:
        self.service.reclaim_pages(1 << 20)
        self.rollout.reclaim_pages(1 << 20)
        arbiter = Arbiter(
            mode_of(mode),
            SLO,
            self.service_cost,
            self.rollout_cost,
            capacity=self.pool.capacity,
            step_tokens=_CONFIG.max_step_tokens,
        )
        executor = CoservingExecutor(self.service, arbiter, time.perf_counter)
        if mode_of(mode).lends:
            executor.lend(self.rollout)
        return executor

    def clear(self, executor: CoservingExecutor) -> None:
        """Abort what is left of both, and keep the engines."""
        for engine in (self.service, self.rollout):
            while (youngest := engine.youngest()) is not None:
                engine.abort(youngest)
        executor.rollout = None

    def play(
        self, mode: str, arrivals: list[Arrival], seconds: float, many: int
    ) -> tuple[dict[str, float], list[ServedTimes]]:
        """One mode against the trace in real time; what the service's users saw, and what was rolled out."""
        executor = self.executor(mode)
        rollouts = Rollouts(executor, many, 7)
        ended: list[ServedTimes] = []
        rng = np.random.default_rng(3)
        prompts = [
            tuple(rng.integers(0, QWEN3_8B.vocab_size, one.prompt_tokens).tolist())
            for one in arrivals
        ]
        place = 0
        begin = time.perf_counter()
        while (now_s := time.perf_counter() - begin) < seconds:
            while place < len(arrivals) and arrivals[place].at_s <= now_s:
                one = arrivals[place]
                params = Sampling(max_tokens=one.output_tokens, seed=place, ignore_eos=True)
                executor.serve(GenerationRequest(place, prompts[place], params, "base"))
                place += 1
            if executor.rollout is not None:
                rollouts.feed()
            step = executor.step()
            ended += step.ended
            if step.rolled_out is not None:
                out = step.rolled_out
                rollouts.take(out.request_ids.tolist(), out.tokens.tolist())
                for done in out.finished:
                    rollouts.end(done.request_id)
            for request in step.given_back:
                rollouts.give_back(request)
            if step.served is None and step.rolled_out is None:
                time.sleep(0.0005)
        under_way = (
            executor.under_way()
        )  # judged as they stand; who has waited for less than the promise met it
        times = [*ended, *under_way]
        self.clear(executor)
        figures = {
            "requests": float(place),
            "attainment": sum(SLO.met(t.ttft_s, t.tpot_s) for t in times) / max(place, 1),
            "under_way": float(len(under_way)),
            "ttft_p99_ms": 1e3 * float(np.quantile([t.ttft_s for t in times], 0.99)),
            "ttft_p50_ms": 1e3 * float(np.quantile([t.ttft_s for t in times], 0.5)),
            "tpot_p99_ms": 1e3 * float(np.quantile([t.tpot_s for t in times], 0.99)),
            "serving_share": executor.serving_s / seconds,
            "rollout_share": executor.rollout_s / seconds,
            "rollout_tokens_per_s": rollouts.made / seconds,
            "given_back": float(rollouts.given_back),
            "cuts": float(executor.cuts),
        }
        return figures, ended

    def alone(self, seconds: float, many: int) -> float:
        """Rollout tokens a second when the service has nothing to do."""
        executor = self.executor("prefix")
        rollouts = Rollouts(executor, many, 7)
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            rollouts.feed()
            out = executor.step().rolled_out
            if out is not None:
                rollouts.take(out.request_ids.tolist(), out.tokens.tolist())
                for done in out.finished:
                    rollouts.end(done.request_id)
        self.clear(executor)
        return rollouts.made / (time.perf_counter() - begin)


def _empty() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=FILE[@DENSITY]")
    parser.add_argument("--modes", default="none,ours,dual,ttft,tpot,prefix,static")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument(
        "--start", type=float, default=0.0, help="seconds of the trace to pass over"
    )
    parser.add_argument("--rollouts", type=int, default=32)
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for size in (2, 8, 16, 32):
        figures |= pages_ms(size << 20)
    machine = Machine()
    figures |= machine.figures
    alone = machine.alone(5.0, options.rollouts)
    figures["rollout_alone_tokens_per_s"] = alone
    for given in options.trace:
        name, _, rest = given.partition("=")
        file, _, density = rest.partition("@")
        end_s = options.start + options.seconds
        whole = read_serving_trace(Path(file), seconds=end_s, max_tokens=15_000)
        window = [
            Arrival(one.at_s - options.start, one.prompt_tokens, one.output_tokens)
            for one in whole
            if one.at_s >= options.start
        ]
        arrivals = scaled(window, float(density or 1.0), options.seconds, 0)
        kept: dict[str, float] = {}
        for mode in options.modes.split(","):
            found, _ = machine.play(mode, arrivals, options.seconds, options.rollouts)
            if mode == "none":
                kept = found
            idle = max(1.0 - kept["serving_share"], 1e-3)
            found["attainment_lost_points"] = 100 * (kept["attainment"] - found["attainment"])
            found["over_alone"] = found["rollout_tokens_per_s"] / alone
            found["harvest"] = found["rollout_tokens_per_s"] / (idle * alone)
            figures |= {f"{name}.{mode}.{key}": value for key, value in found.items()}
            shown = {key: round(value, 3) for key, value in found.items()}
            sys.stderr.write(f"{name} {mode} {shown}\n")
    result = {
        "name": "coserving_gpu",
        "device": torch.cuda.get_device_name(),
        "figures": figures,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
