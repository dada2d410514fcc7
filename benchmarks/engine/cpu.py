"""The engine on one CPU core, and other engines on the same requests in the same run.

Two models: a small random one and SmolLM2-135M. Tokens per second are output tokens over the time
from the first request in to the last token out, prompts included. All engines, with whatever
processes they start, have one and the same core. `..._per_cpu_s` are the same ratios over CPU time,
which other work on the machine disturbs less.
`SLACKWATER_VLLM` names a virtual environment with vLLM's CPU build; without it those figures are
null.
"""

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine.peers import (
    Prompt,
    Spent,
    Stopwatch,
    TransformersBatching,
    vllm_server,
)
from benchmarks.options import BenchOptions
from slackwater.engine.config import EngineConfig
from slackwater.engine.engine import Engine
from slackwater.engine.request import GenerationRequest
from slackwater.model.errors import ConfigError
from slackwater.model.sampling import Sampling
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net
from slackwater.zoo.sources import is_model, models_directory
from slackwater.zoo.tiny import make_model

PROMPT_TOKENS = 32
CONCURRENT = (1, 16, 64)
PEERS_AT = 16
Figures = dict[str, float | None]
Timed = Callable[[Sequence[Prompt], int], Spent]


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

    def seconds(self, prompts: Sequence[Prompt], output: int) -> Spent:
        params = Sampling(max_tokens=output, seed=1, ignore_eos=True)
        version = self._engine.config.base_version
        watch = Stopwatch()
        for number, prompt in enumerate(prompts):
            self._engine.add(GenerationRequest(number, prompt, params, version))
        while self._engine.busy:
            self._engine.step()
        return watch.spent()


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
    """Our figures and vLLM's at every concurrency, transformers' at 16."""

    def told(what: str, share: float) -> None:
        options.progress(f"{name}: {what}", share / 2 + (0.5 if name == "smollm2" else 0.0))

    prompts = random_prompts(directory, max(CONCURRENT), options.seed)
    repeats = 1 if options.quick else 3
    ours = OurEngine(directory, batch_invariant=True).seconds
    loose = OurEngine(directory, batch_invariant=False).seconds
    figures: Figures = {}
    for count in CONCURRENT:
        told(f"{count} requests", 0.2 * CONCURRENT.index(count))
        found = in_turns({"ours": ours, "loose": loose}, prompts[:count], output, repeats)
        figures[f"{name}.tokens_per_s_{count}"] = count * output / found["ours"].wall_s
        cost = found["ours"].cpu_s / found["loose"].cpu_s - 1
        figures[f"{name}.invariance_cost_{count}"] = cost
    told("transformers", 0.6)
    peer = TransformersBatching(directory).seconds
    found = in_turns({"ours": ours, "peer": peer}, prompts[:PEERS_AT], output, repeats)
    figures |= compared(name, "transformers", PEERS_AT, output, found)
    told("vLLM", 0.8)
    venv = os.environ.get("SLACKWATER_VLLM")
    if venv is None:
        for count in CONCURRENT:
            figures |= compared(name, "vllm", count, output, None)
        return figures
    with vllm_server(Path(venv), directory, scratch / f"vllm-{name}.log") as server:
        for count in CONCURRENT:
            both = {"ours": ours, "peer": server.seconds}
            found = in_turns(both, prompts[:count], output, repeats)
            figures |= compared(name, "vllm", count, output, found)
    return figures


def in_turns(
    engines: Mapping[str, Timed], prompts: Sequence[Prompt], output: int, repeats: int
) -> dict[str, Spent]:
    """Median time of each, taken in turns so that all see one machine, after a short warm-up."""
    for seconds in engines.values():
        seconds(prompts, 2)
    spent: dict[str, list[Spent]] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, seconds in engines.items():
            spent[name].append(seconds(prompts, output))
    return {
        name: Spent(
            statistics.median(one.wall_s for one in times),
            statistics.median(one.cpu_s for one in times),
        )
        for name, times in spent.items()
    }


def compared(
    name: str, peer: str, count: int, output: int, found: Mapping[str, Spent] | None
) -> Figures:
    """A peer's tokens per second, and ours over it; null where it was not measured."""
    keys = (
        f"{name}.{peer}_tokens_per_s_{count}",
        f"{name}.over_{peer}_{count}",
        f"{name}.over_{peer}_{count}_per_cpu_s",
    )
    if found is None:
        return dict.fromkeys(keys)
    ours, other = found["ours"], found["peer"]
    rate = count * output / other.wall_s
    return dict(
        zip(keys, (rate, other.wall_s / ours.wall_s, other.cpu_s / ours.cpu_s), strict=True)
    )


def random_prompts(directory: Path, count: int, seed: int) -> list[Prompt]:
    """Prompts of one length that share nothing."""
    vocabulary = NetConfig.from_directory(directory).vocab_size
    ids = np.random.default_rng(seed).integers(0, min(vocabulary, 250), (count, PROMPT_TOKENS))
    return [tuple(row) for row in ids.tolist()]
