"""Co-serving on one GPU: `python -m benchmarks.serving.coserving_gpu --trace conv=FILE` prints one
JSON object.

An 8B-shape service under a trace's arrivals, another 8B-shape model rolling out beside it, in every
mode and in several windows of the trace; and the costs of moving pages and of activating a rollout
model. Arrivals are scaled to what the device serves within its promise (`alone.py`), unless told.
Needs PyTorch, Triton, NumPy and cuda-bindings only.
"""

import argparse
import gc
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine.shapes import LLAMA_8B, QWEN3_8B
from benchmarks.serving.alone import Alone
from benchmarks.serving.arrivals import scaled
from benchmarks.serving.coserving_windows import SLO, Played, pooled
from slackwater.engine.config import EngineConfig
from slackwater.engine.coserving.executor import CoservingExecutor, RequestLatency
from slackwater.engine.coserving.staged_weights import StagedWeights
from slackwater.engine.coserving.step_profile import measure_step_cost
from slackwater.engine.cuda.executor import CudaExecutor
from slackwater.engine.cuda.pages import CudaPagePool
from slackwater.engine.engine import Engine
from slackwater.engine.pages import PageArena
from slackwater.engine.request import GenerationRequest
from slackwater.model.sampling import Sampling
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net
from slackwater.policy.serving.arbiter import Arbiter
from slackwater.policy.serving.modes import find_mode
from slackwater.policy.serving.step_cost import StepCost
from slackwater.sim.serving.serving_trace import Arrival, read_serving_trace

_PAGE = 16 << 20  # of the pool: what a page costs to map is the same for all sizes
_KV_BYTES = 72 << 30
_CONFIG = EngineConfig(
    kv_bytes=_KV_BYTES,
    page_bytes=_PAGE,
    max_running=256,
    max_step_tokens=2048,
    max_context=16384,
    steps_ahead=False,
)
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
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
            source.release(0, 1 << 30)
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
    """Keeps `many` turns of trajectories under way; each turn goes on where the last of its
    trajectory ended.
    """

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
        """The environment answers at once: the next turn's prompt is all that was said, and 200
        tokens more.
        """
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
        self.staged = StagedWeights.from_net(rollout_net, device)
        del rollout_net
        _empty()
        self.figures: dict[str, float] = {}
        self.rollout = self._activated()
        self.service_cost = self._profiled(self.service, QWEN3_8B, "service", _ROWS)
        self.rollout_cost = self._profiled(self.rollout, LLAMA_8B, "rollout", _ROWS[:7])

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
            find_mode(mode),
            SLO,
            self.service_cost,
            self.rollout_cost,
            capacity=self.pool.capacity,
            step_tokens=_CONFIG.max_step_tokens,
        )
        executor = CoservingExecutor(self.service, arbiter, time.perf_counter)
        if find_mode(mode).lends:
            executor.reserve_weight_pages(0)  # its weights lie beside the pool
            executor.lend(self.rollout)
        return executor

    def clear(self, executor: CoservingExecutor) -> None:
        """Abort what is left of both, and keep the engines."""
        for engine in (self.service, self.rollout):
            while (youngest := engine.youngest()) is not None:
                engine.abort(youngest)
        executor.rollout = None

    def play(self, mode: str, arrivals: Sequence[Arrival], seconds: float, many: int) -> Played:
        """One mode against the trace in real time; what the service's users saw, and what was
        rolled out.
        """
        executor = self.executor(mode)
        rollouts = Rollouts(executor, many, 7)
        times: list[RequestLatency] = []
        rng = np.random.default_rng(3)
        prompts = [
            tuple(rng.integers(0, QWEN3_8B.vocab_size, one.prompt_tokens).tolist())
            for one in arrivals
        ]
        place = 0
        stopped_s, last_s = 0.0, 0.0
        begin = time.perf_counter()
        while (now_s := time.perf_counter() - begin) < seconds:
            while place < len(arrivals) and arrivals[place].at_s <= now_s:
                one = arrivals[place]
                params = Sampling(max_tokens=one.output_tokens, seed=place, ignore_eos=True)
                executor.serve(GenerationRequest(place, prompts[place], params, "base"))
                place += 1
            stopped_s += (now_s - last_s) * executor.arbiter.stopped
            last_s = now_s
            if executor.rollout is not None and not executor.arbiter.stopped:
                rollouts.feed()
            step = executor.step()
            times += step.ended
            if step.rolled_out is not None:
                out = step.rolled_out
                rollouts.take(out.request_ids.tolist(), out.tokens.tolist())
                for done in out.finished:
                    rollouts.end(done.request_id)
            for request in step.given_back:
                rollouts.give_back(request)
            if step.served is None and step.rolled_out is None:
                time.sleep(0.0005)
        times += executor.open_requests()  # judged as they stand
        self.clear(executor)
        return Played(
            times,
            seconds,
            executor.serving_s,
            executor.needed_s,
            rollouts.made,
            rollouts.given_back,
            executor.cuts,
            stopped_s,
        )

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


@dataclass(slots=True)
class Trace:
    """The windows of one trace, each as a list of arrivals from 0 on, and what was found in them by
    load and mode.
    """

    name: str
    seconds: float
    windows: list[list[Arrival]]
    density: float | None
    played: dict[tuple[float, str], list[Played]] = field(default_factory=dict)

    @classmethod
    def read(cls, given: str, starts: Sequence[float], seconds: float) -> "Trace":
        """NAME=FILE[@DENSITY]."""
        name, _, rest = given.partition("=")
        file, _, density = rest.partition("@")
        whole = read_serving_trace(Path(file), seconds=max(starts) + seconds, max_tokens=15_000)
        windows = [
            [
                Arrival(one.at_s - start, one.prompt_tokens, one.output_tokens)
                for one in whole
                if start <= one.at_s < start + seconds
            ]
            for start in starts
        ]
        return cls(name, seconds, windows, float(density) if density else None)

    def arrivals(self, window: int, load: float) -> list[Arrival]:
        assert self.density is not None
        return scaled(self.windows[window], load * self.density, self.seconds, window)

    def add(self, load: float, mode: str, play: Played, alone: float) -> dict[str, float]:
        """The figures of all windows of this load and mode so far."""
        plays = self.played.setdefault((load, mode), [])
        plays.append(play)
        found = pooled(plays, self.played[load, "none"][: len(plays)], alone)
        name = f"{self.name}_{load:g}.{mode}"
        sys.stderr.write(f"{name} { {key: round(value, 3) for key, value in found.items()} }\n")
        return {f"{name}.{key}": value for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=FILE[@DENSITY]")
    parser.add_argument("--modes", default="none,ours,dual", help="in every window")
    parser.add_argument("--once", default="ttft,tpot,static", help="in the first window only")
    parser.add_argument("--loads", default="1", help="shares of the load that it bears alone")
    parser.add_argument("--seconds", default="15", help="of a window, one number for each trace")
    parser.add_argument("--starts", default="180", help="seconds of the trace, one for each window")
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--until", type=float, default=1e9, help="begin no window later")
    parser.add_argument("--no-pages", action="store_true", help="do not time pages")
    options = parser.parse_args()
    begin = time.perf_counter()
    figures: dict[str, float] = {}
    for size in () if options.no_pages else (2, 8, 16, 32):
        figures |= pages_ms(size << 20)
    machine = Machine()
    figures |= machine.figures
    alone = machine.alone(10.0, options.rollouts)
    figures["rollout_alone_tokens_per_s"] = alone
    starts = [float(start) for start in options.starts.split(",")]
    lengths = [float(length) for length in options.seconds.split(",")]
    lengths += lengths[-1:] * (len(options.trace) - len(lengths))
    traces = [
        Trace.read(given, starts, length)
        for given, length in zip(options.trace, lengths, strict=True)
    ]
    service = Alone(
        machine.service_cost, SLO, _CONFIG.max_step_tokens, machine.service.capacity_tokens
    )
    for trace in traces:
        if trace.density is None:
            trace.density = service.most_density(trace.windows, trace.seconds)
        figures[f"{trace.name}.density"] = trace.density
        sys.stderr.write(f"{trace.name} density {trace.density}\n")
    loads = [float(load) for load in options.loads.split(",")]
    for window, load, trace in product(range(len(starts)), loads, traces):
        modes = options.modes.split(",") + ([] if window else options.once.split(","))
        for mode in filter(None, modes):
            if time.perf_counter() - begin > options.until:
                break
            arrivals = trace.arrivals(window, load)
            play = machine.play(mode, arrivals, trace.seconds, options.rollouts)
            figures |= trace.add(load, mode, play, alone)
    result = {
        "name": "coserving_gpu",
        "device": torch.cuda.get_device_name(),
        "figures": figures,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
