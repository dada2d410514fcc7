"""The engine on one CPU core, and other engines on the same requests in the same run.

Two models: a small random one and SmolLM2-135M. Tokens per second are output tokens over the time
from the first request in to the last token out, prompts included. All engines, with whatever
processes they start, have one and the same core.
`SLACKWATER_VLLM` names a virtual environment with vLLM's CPU build; without it those figures are
null.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from slackwater.bench.engine_peers import Prompt, TransformersBatching, vllm_server
from slackwater.bench.options import BenchOptions
from slackwater.engine.config import EngineConfig
from slackwater.engine.engine import Engine
from slackwater.engine.request import GenerationRequest, SamplingParams
from slackwater.model.errors import ConfigError
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net
from slackwater.zoo.directory import is_model, models_directory
from slackwater.zoo.tiny import make_model

PROMPT_TOKENS = 32
CONCURRENT = (1, 16, 64)
PEERS_AT = 16
Figures = dict[str, float | None]
Timed = Callable[[Sequence[Prompt], int], float]


class OurEngine:
    """Our engine on a model directory, as the peers are measured."""

    def __init__(self, directory: Path, *, batch_invariant: bool) -> None:
        config = EngineConfig(
            kv_bytes=1 << 30,
            max_running=max(CONCURRENT),
            max_context=1024,
            batch_invariant=batch_invariant,
            prefix_cache=False,
        )
        self._engine = Engine(load_net(directory), config)

    def seconds(self, prompts: Sequence[Prompt], output: int) -> float:
        params = SamplingParams(max_tokens=output, seed=1, ignore_eos=True)
        version = self._engine.config.base_version
        begin = time.perf_counter()
        for number, prompt in enumerate(prompts):
            self._engine.add(GenerationRequest(number, prompt, params, version))
        while self._engine.busy:
            self._engine.step()
        return time.perf_counter() - begin


def run(options: BenchOptions) -> Figures:
    """Figures by model: `<model>.tokens_per_s_16`, `<model>.over_transformers_16` and so on."""
    smollm2 = models_directory() / "smollm2"
    if not is_model(smollm2):
        raise ConfigError.of("smollm2", str(smollm2), "is not there: slackwater model get smollm2")
    figures: Figures = {}
    with one_core(), tempfile.TemporaryDirectory(prefix="slackwater-bench-") as scratch:
        small = Path(scratch) / "small"
        make_model("small", small, options.seed)
        figures |= measure("small", small, 8 if options.quick else 96, options, Path(scratch))
        figures |= measure("smollm2", smollm2, 4 if options.quick else 32, options, Path(scratch))
    return figures


@contextmanager
def one_core() -> Iterator[None]:
    """This process and those it starts on one core, with one thread."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def measure(
    name: str, directory: Path, output: int, options: BenchOptions, scratch: Path
) -> Figures:
    """Our figures at every concurrency; the peers' at 16 and vLLM's at 1 too."""

    def told(what: str, share: float) -> None:
        options.progress(f"{name}: {what}", share / 2 + (0.5 if name == "smollm2" else 0.0))

    prompts = random_prompts(directory, max(CONCURRENT), options.seed)
    repeats = 1 if options.quick else 3
    ours = OurEngine(directory, batch_invariant=True)
    loose = OurEngine(directory, batch_invariant=False)
    peers: list[tuple[str, Timed]] = [("transformers", TransformersBatching(directory).seconds)]
    figures: Figures = {}
    timed: list[tuple[str, Timed]] = [("", ours.seconds), ("not_invariant_", loose.seconds)]
    for count in CONCURRENT:
        for prefix, rate in rates(timed, prompts[:count], output, repeats).items():
            figures[f"{name}.{prefix}tokens_per_s_{count}"] = rate
        strict, free = (figures[f"{name}.{kind}tokens_per_s_{count}"] for kind, _ in timed)
        figures[f"{name}.invariance_cost_{count}"] = (free or 0.0) / (strict or 1.0) - 1
        told(f"{count} requests", 0.2 * (CONCURRENT.index(count) + 1))
    against = compare(ours.seconds, peers, prompts[:PEERS_AT], output, repeats)
    figures |= _named(name, "transformers", PEERS_AT, against["transformers"])
    told("vLLM", 0.8)
    venv = os.environ.get("SLACKWATER_VLLM")
    if venv is None:
        for count in (1, PEERS_AT):
            figures |= _named(name, "vllm", count, None)
        return figures
    with vllm_server(Path(venv), directory, scratch / f"vllm-{name}.log") as server:
        for count in (1, PEERS_AT):
            vllm: list[tuple[str, Timed]] = [("vllm", server.seconds)]
            against = compare(ours.seconds, vllm, prompts[:count], output, repeats)
            figures |= _named(name, "vllm", count, against["vllm"])
    return figures


def compare(
    ours: Timed,
    peers: Sequence[tuple[str, Timed]],
    prompts: Sequence[Prompt],
    output: int,
    repeats: int,
) -> dict[str, tuple[float, float]]:
    """Each peer's tokens per second, and ours over it; taken in turns, so that both see one machine."""
    found = rates([("ours", ours), *peers], prompts, output, repeats)
    return {name: (found[name], found["ours"] / found[name]) for name, _ in peers}


def rates(
    timed: Sequence[tuple[str, Timed]], prompts: Sequence[Prompt], output: int, repeats: int
) -> dict[str, float]:
    """Median tokens per second of each, in turns, after one short round to warm up."""
    for _, seconds in timed:
        seconds(prompts, 2)
    spent: dict[str, list[float]] = {name: [] for name, _ in timed}
    for _ in range(repeats):
        for name, seconds in timed:
            spent[name].append(seconds(prompts, output))
    tokens = len(prompts) * output
    return {name: tokens / statistics.median(times) for name, times in spent.items()}


def random_prompts(directory: Path, count: int, seed: int) -> list[Prompt]:
    """Prompts of one length that share nothing."""
    vocabulary = NetConfig.from_directory(directory).vocab_size
    ids = np.random.default_rng(seed).integers(0, min(vocabulary, 250), (count, PROMPT_TOKENS))
    return [tuple(row) for row in ids.tolist()]


def _named(name: str, peer: str, count: int, found: tuple[float, float] | None) -> Figures:
    rate, ratio = found or (None, None)
    return {
        f"{name}.{peer}_tokens_per_s_{count}": rate,
        f"{name}.over_{peer}_{count}": ratio,
    }
