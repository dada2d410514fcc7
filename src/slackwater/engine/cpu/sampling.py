"""Sampling on the CPU: one uniform number per row picks a token by the inverse of the
distribution.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slackwater.engine.cpu.compiled import compiled, exp_of, lane_max, lane_sum
from slackwater.engine.executor import SamplingColumns

_CHUNK = 64
_FIRST_CANDIDATES = 512


@compiled
def pick(weights: Any, count: int, aim: Any) -> int:
    """The first index at which the running sum of `weights[:count]` exceeds `aim`."""
    reached, last = np.float32(0), count - 1
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        part = lane_sum(weights[start:], size)
        if reached + part > aim:
            for j in range(start, start + size):
                reached += weights[j]
                if reached > aim:
                    return j
            return start + size - 1
        reached += part
    while last > 0 and weights[last] == 0:
        last -= 1
    return last


@compiled
def weigh_row(row: Any, heat: Any, weights: Any) -> Any:
    """`weights = exp((row - max) / heat)`; the likeliest token and the sum of the weights."""
    top = lane_max(row, row.shape[0])
    best = 0
    while row[best] != top and best + 1 < row.shape[0]:
        best += 1
    for j in range(row.shape[0]):
        weights[j] = exp_of((row[j] - top) / heat)
    return best, lane_sum(weights, row.shape[0])


@compiled
def sample_rows(
    logits: Any, temperature: Any, uniform: Any, chosen: Any, tokens: Any, logprobs: Any
) -> None:
    """A token and its log-prob for each row, or the log-prob of `chosen` where that is not -1."""
    vocab = logits.shape[1]
    weights = np.empty(vocab, np.float32)
    for n in range(logits.shape[0]):
        row = logits[n]
        heat = temperature[n] if temperature[n] > 0 else np.float32(1)
        token, total = weigh_row(row, heat, weights)
        top = row[token]
        if chosen[n] >= 0:
            token = chosen[n]
        elif temperature[n] > 0:
            token = pick(weights, vocab, uniform[n] * total)
        tokens[n] = token
        logprobs[n] = (row[token] - top) / heat - np.log(total)


def kept_tokens(weights: NDArray[np.float32], top_p: float, top_k: int) -> NDArray[np.int64]:
    """Ids that survive top-k and then top-p, heaviest first; of equal weights the lower id."""
    most = min(top_k, len(weights)) if top_k > 0 else len(weights)
    total = float(weights.sum(dtype=np.float64)) if top_k == 0 else 0.0
    candidates = most if top_k > 0 else min(_FIRST_CANDIDATES, len(weights))
    while True:
        edge = np.partition(weights, len(weights) - candidates)[len(weights) - candidates]
        ids = np.nonzero(weights >= edge)[0]
        ids = ids[np.argsort(-weights[ids], kind="stable")][:most]
        mass = np.cumsum(weights[ids], dtype=np.float64)
        enough = int(np.searchsorted(mass, top_p * (total or mass[-1]))) + 1
        if enough <= len(ids) or len(ids) >= most:
            return ids[:enough]
        candidates = len(weights)


def _chosen_by_truncation(
    logits: NDArray[np.float32], columns: SamplingColumns
) -> NDArray[np.int64]:
    """The tokens of rows with top-k or top-p; -1 for the others."""
    chosen = np.full(len(logits), -1, np.int64)
    cut = (columns.temperature > 0) & ((columns.top_k > 0) | (columns.top_p < 1))
    vocab = logits.shape[1]
    weights = np.empty(vocab, np.float32)
    for n in np.nonzero(cut)[0].tolist():
        weigh_row(logits[n], columns.temperature[n], weights)
        ids = kept_tokens(weights, float(columns.top_p[n]), int(columns.top_k[n]))
        left = weights[ids]
        aim = columns.uniform[n] * lane_sum(left, len(left))
        chosen[n] = ids[pick(left, len(left), aim)]
    return chosen


def sample(
    logits: NDArray[np.float32], columns: SamplingColumns
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Tokens and log-probs, row by row; a log-prob is from before top-k and top-p."""
    tokens = np.empty(logits.shape[0], np.int64)
    logprobs = np.empty(logits.shape[0], np.float32)
    chosen = _chosen_by_truncation(logits, columns)
    sample_rows(logits, columns.temperature, columns.uniform, chosen, tokens, logprobs)
    return tokens, logprobs
