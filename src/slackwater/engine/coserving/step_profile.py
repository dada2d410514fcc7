"""What an engine's steps cost on this device, measured before it serves."""

import time
from collections.abc import Sequence

import numpy as np

from slackwater.engine.engine import Engine
from slackwater.engine.request import GenerationRequest
from slackwater.model.sampling import Sampling
from slackwater.policy.serving.step_cost import StepCost, StepWork, fit_step_cost

_FIRST_ID = 2**32 - 4096  # no client's request has such a number
_DECODES = 6


def measure_step_cost(
    engine: Engine,
    vocab_size: int,
    sizes: Sequence[int] = (1, 16, 64, 128, 256, 512),
    seed: int = 0,
) -> StepCost:
    """Run prompts of several lengths and one long context through an idle engine; it keeps nothing of them."""
    rng = np.random.default_rng(seed)
    longest = engine.max_context - _DECODES - 2
    wanted = sorted({min(size, longest, engine.config.max_step_tokens) for size in sizes})
    samples = [
        (StepWork(size), _prompt_s(engine, _tokens(rng, vocab_size, size)))
        for size in wanted
        for _ in range(3)
    ]
    if wanted == [1]:
        samples.append((StepWork(2), samples[-1][1]))
    context = min(longest, 8 * engine.config.max_step_tokens, engine.capacity_tokens // 2)
    samples += _long_context(engine, _tokens(rng, vocab_size, context))
    engine.reclaim_pages(engine.arena.mapped_pages)
    return fit_step_cost(samples)


def _tokens(rng: np.random.Generator, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, vocab_size, count).tolist())


def _request(engine: Engine, prompt: tuple[int, ...], tokens: int) -> GenerationRequest:
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(_FIRST_ID, prompt, sampling, engine.config.base_version)


def _prompt_s(engine: Engine, prompt: tuple[int, ...]) -> float:
    engine.add(_request(engine, prompt, 1))
    began_s = time.perf_counter()
    while engine.busy:
        engine.step()
    return time.perf_counter() - began_s


def _long_context(engine: Engine, prompt: tuple[int, ...]) -> list[tuple[StepWork, float]]:
    """The last chunk of a long prompt, and decode steps after it."""
    engine.add(_request(engine, prompt, _DECODES))
    size, done = engine.config.max_step_tokens, 0
    samples: list[tuple[StepWork, float]] = []
    while engine.busy:
        began_s = time.perf_counter()
        engine.step()
        took_s = time.perf_counter() - began_s
        chunk = min(size, len(prompt) - done)
        if chunk == size and done >= 2 * size:
            samples.append((StepWork(chunk, 0.0, chunk * (done + chunk / 2)), took_s))
        elif chunk <= 0:
            samples.append((StepWork(1, float(len(prompt))), took_s))
        done += max(chunk, 1)
    return samples
