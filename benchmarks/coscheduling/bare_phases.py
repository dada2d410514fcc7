"""What two cores give when nothing is between: an engine on one and a trainer on the other, with no
service, no permits and no driver.

    python -m benchmarks.coscheduling.bare_phases CORE KIND MODEL ANSWERS TOKENS

is one of the two; for every line with seconds that it reads it works so long and writes how much it
did a second. They work apart and side by side in turns, so that a machine whose speed drifts does
not count.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from slackwater.model.errors import UnavailableError

_MODULE = "benchmarks.coscheduling.bare_phases"
_PROMPT_TOKENS = 16
_RANK = 8
_LIMIT_S = 300.0


def machine_ceiling(
    cores: tuple[int, int], model: Path, answers: int, tokens: int, seconds: float, rounds: int
) -> float:
    """What two jobs could reach together over one after the other if nothing were lost but what the
    cores take from each other: 2 if that is nothing. Rollout on the first core, training on the
    second.
    """
    workers: list[subprocess.Popen[str]] = []
    overdue = threading.Timer(_LIMIT_S, _end, [workers])
    overdue.start()
    try:
        for core, kind in zip(cores, ("rollout", "train"), strict=True):
            command = [sys.executable, "-m", _MODULE, str(core), kind, str(model)]
            workers.append(
                subprocess.Popen(
                    [*command, str(answers), str(tokens)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
            )
        _rates(workers, 0.0)  # built up, and warm
        shares: list[float] = []
        for _ in range(rounds):
            apart = [_rates([worker], seconds)[0] for worker in workers]
            together = _rates(workers, seconds)
            shares += [b / a for a, b in zip(apart, together, strict=True)]
        return 2 * mean(shares)
    finally:
        overdue.cancel()
        _end(workers)


def _end(workers: Sequence["subprocess.Popen[str]"]) -> None:
    for worker in workers:
        worker.kill()
        worker.wait()


def _rates(workers: Sequence["subprocess.Popen[str]"], seconds: float) -> list[float]:
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(f"{seconds}\n")
        worker.stdin.flush()
    found = []
    for worker in workers:
        assert worker.stdout is not None
        said = worker.stdout.readline()
        if not said:
            raise UnavailableError("a process on one of two cores ended before it was measured")
        found.append(float(said))
    return found


def main(core: int, kind: str, model: Path, answers: int, tokens: int) -> None:
    """One of the two."""
    import torch

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {core})
    work = _rollout(model, answers, tokens) if kind == "rollout" else _train(model, tokens)
    for _ in range(3):
        work()
    for line in sys.stdin:
        began_s, done = time.perf_counter(), 0.0
        until_s = began_s + float(line)
        while not done or time.perf_counter() < until_s:
            done += work()
        sys.stdout.write(f"{done / (time.perf_counter() - began_s)}\n")
        sys.stdout.flush()


def _rollout(model: Path, answers: int, tokens: int) -> Callable[[], float]:
    """One step of an engine that always has so many answers under way."""
    from slackwater.engine.request import GenerationRequest
    from slackwater.model.sampling import Sampling
    from slackwater.worker.engine_worker import new_engine

    engine = new_engine(model, device="cpu", kv_mb=512, max_running=64, base_version="base")
    numbers = iter(range(1 << 60))

    def step() -> float:
        if not engine.busy:
            for number in range(answers):
                prompt = (*range(32, 31 + _PROMPT_TOKENS), 32 + number)
                wish = Sampling(max_tokens=tokens, seed=number, ignore_eos=True)
                engine.add(GenerationRequest(next(numbers), prompt, wish, "base"))
        engine.step()
        return 1.0

    return step


def _train(model: Path, tokens: int) -> Callable[[], float]:
    """One answer's share of a pass."""
    import numpy as np
    import numpy.typing as npt

    from slackwater.nets.lora import LoraSpec
    from slackwater.training.datum import Datum
    from slackwater.training.trainer import Trainer

    trainer = Trainer.create(model, LoraSpec(_RANK, seed=0), 0, dtype="float32", device="cpu")
    length = _PROMPT_TOKENS + tokens - 1
    row = np.random.default_rng(0).integers(32, 127, length)
    ones = np.ones(length, np.float32)
    inputs: dict[str, npt.NDArray[np.generic]]
    inputs = {"target_tokens": row, "logprobs": -ones, "advantages": ones}

    def one_pass() -> float:
        trainer.forward_backward([Datum(row, inputs)], "importance_sampling", {})
        trainer.discard_gradient()
        return 1.0

    return one_pass


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
