"""What a quiet owner's turn costs an engine beside a loud owner's many rows, in processor time:
part of `bench tenants`.

`engine_alone_cpu_ms` is a turn of 8 tokens alone, `engine_beside_cpu_ms` the same while 56 rows of
another owner decode, and `engine_unshared_cpu_ms` while they decode as the same owner's, which gets
them no shares; `_p99` likewise. Medians, tiny model, one thread.
"""

import time
from pathlib import Path

import numpy as np

from slackwater.engine.engine import Engine
from slackwater.engine.request import GenerationRequest
from slackwater.model.sampling import Sampling

_ROWS = 56
_VERSION = "base:tiny"


def engine_shares(model: Path, turns: int) -> dict[str, float]:
    """Figures as the module says."""
    import torch

    from slackwater.worker.engine_worker import new_engine

    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for name, owner in (("beside", "loud"), ("unshared", "quiet")):
        engine = new_engine(
            model, device="cpu", kv_mb=256, max_running=_ROWS + 8, base_version=_VERSION
        )
        alone_s = _turns_cpu_s(engine, turns, 1000)
        for row in range(_ROWS):
            engine.add(_loud(row, owner))
        beside_s = _turns_cpu_s(engine, turns, 2000, owner)
        if name == "beside":
            figures["engine_alone_cpu_ms"] = float(np.median(alone_s)) * 1e3
            figures["engine_p50_ratio"] = float(np.median(beside_s) / np.median(alone_s))
            p99 = [float(np.percentile(one, 99)) for one in (beside_s, alone_s)]
            figures["engine_p99_ratio"] = p99[0] / p99[1]
        figures[f"engine_{name}_cpu_ms"] = float(np.median(beside_s)) * 1e3
        engine.close()
    return figures


def _loud(row: int, owner: str) -> GenerationRequest:
    """One that ends when the model's context does."""
    return GenerationRequest(row, (97,), Sampling(10**6, ignore_eos=True), _VERSION, owner=owner)


def _turns_cpu_s(engine: Engine, turns: int, first: int, loud: str = "") -> list[float]:
    """Processor time of each of so many turns, one after the other; some more before, to learn a
    step's cost. Loud rows that end begin again.
    """
    sampling = Sampling(8, temperature=0.0, ignore_eos=True)
    taken_s = []
    for number in range(first, first + turns + 20):
        prompt = tuple(b"hello")
        engine.add(GenerationRequest(number, prompt, sampling, _VERSION, owner="quiet"))
        began_s, over = time.process_time(), False
        while not over:
            for done in engine.step().finished:
                over = over or done.request_id == number
                if done.request_id < _ROWS:
                    engine.add(_loud(done.request_id, loud))
        taken_s.append(time.process_time() - began_s)
    return taken_s[20:]
