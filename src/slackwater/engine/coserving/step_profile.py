"""Measures what an engine's steps cost on this device, before it serves."""

import time
from collections.abc import Sequence

import numpy as np

from slackwater.engine.engine import Engine
from slackwater.engine.request import GenerationRequest
from slackwater.model.errors import RefusedError
from slackwater.model.sampling import Sampling
from slackwater.policy.serving.step_cost import StepCost, StepWork, fit_step_cost, step_work

_FIRST_ID = 2**32 - 4096  # no client's request has such a number
_DECODES = 6
_BATCHES = (1, 4, 16, 64)
_EMPTY_STEPS = 3  # in a row: nothing runs, and nothing will


def measure_step_cost(
    engine: Engine,
    vocab_size: int,
    prompts: Sequence[int] = (16, 64, 128, 256, 512),
) -> StepCost:
    """Run prompts, batches and one long context of several sizes through an idle engine."""
    rng = np.random.default_rng(0)
    config, longest = engine.config, engine.max_context - _DECODES - 2
    sizes = sorted({min(size, longest, config.max_step_tokens) for size in prompts})
    batches = sorted({min(batch, config.max_running) for batch in _BATCHES})
    prompted: list[tuple[StepWork, float]] = []
    decoded: list[tuple[StepWork, float]] = []
    for tokens in (*sizes, *sizes, *sizes):
        _run(engine, [_tokens(rng, vocab_size, tokens)], 1, prompted, decoded)
    for batch in batches:
        _run(engine, [_tokens(rng, vocab_size, 8) for _ in range(batch)], _DECODES, [], decoded)
    context = min(longest, 8 * config.max_step_tokens, engine.capacity_tokens // 2)
    _run(engine, [_tokens(rng, vocab_size, context)], _DECODES, prompted, decoded)
    engine.reclaim_pages(engine.arena.mapped_pages)
    return fit_step_cost(prompted, decoded)


def _tokens(rng: np.random.Generator, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, vocab_size, count).tolist())


def _abort_measurement(engine: Engine) -> None:
    """Fail: the measurement's requests find no memory, and nothing else would free any."""
    while (youngest := engine.youngest()) is not None:
        engine.abort(youngest)
    raise RefusedError("KV memory: too little to measure the steps of the model; raise --kv-mb")


def _run(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    prompted: list[tuple[StepWork, float]],
    decoded: list[tuple[StepWork, float]],
) -> None:
    """Run requests from the first to the last step, and record each step's work and time."""
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        request = GenerationRequest(
            _FIRST_ID + number, prompt, sampling, engine.config.base_version
        )
        engine.add(request)
    empty = 0
    while engine.busy:
        load = engine.load()
        before = engine.tokens_computed
        began_s = time.perf_counter()
        output = engine.step()
        took_s = time.perf_counter() - began_s
        rows = engine.tokens_computed - before
        empty = 0 if rows or output.finished else empty + 1
        if empty > _EMPTY_STEPS:
            _abort_measurement(engine)
        if load.prompts and len(prompts) == 1 and rows:
            computed = load.prompts[0].computed
            # Not a long prompt's last piece.
            if not computed or rows == engine.config.max_step_tokens:
                prompted.append((step_work(0, 0, rows, computed), took_s))
        elif not load.prompts and rows:
            decoded.append((StepWork(rows, float(load.context)), took_s))
