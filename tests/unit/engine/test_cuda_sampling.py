"""Sampling on CUDA draws by the inverse of the distribution. Without a GPU it runs in Triton's
interpreter.
"""

import os

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the kernels are Triton's")

from slackwater.engine.cuda.sampling import CudaSampler  # noqa: E402
from slackwater.engine.executor import SamplingColumns  # noqa: E402

ROWS, VOCAB = 24, 9000


def test_tokens_are_where_the_running_sum_passes_the_number_and_logprobs_are_theirs() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 2, (ROWS, VOCAB + 8)).astype(np.float32)
    temperature = rng.choice([0.0, 0.5, 1.0, 2.0], ROWS).astype(np.float32)
    uniform = rng.random(ROWS).astype(np.float32)
    uniform[:3] = (0.0, 0.999999, 0.5)
    scores[5, :8500] = scores[6, 4000:] = -np.inf  # whole chunks ruled out
    logits = torch.from_numpy(scores).to(DEVICE)[:, :VOCAB]  # longer in memory, as with adapters
    ones = np.ones(ROWS, np.float32)
    columns = SamplingColumns(temperature, ones, np.zeros(ROWS, np.int64), uniform)
    tokens, logprobs = CudaSampler(torch.device(DEVICE)).sample(logits, columns)
    for row in range(ROWS):
        heat = float(temperature[row]) or 1.0
        exact = scores[row, :VOCAB].astype(np.float64) / heat
        exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
        token = int(tokens[row])
        assert np.isfinite(scores[row, token])
        assert abs(logprobs[row] - exact[token]) < 1e-3
        if temperature[row] == 0:
            assert token == int(exact.argmax())
        else:
            upto = np.cumsum(np.exp(exact))
            assert upto[token] > uniform[row] - 1e-4
            assert token == 0 or upto[token - 1] < uniform[row] + 1e-4
