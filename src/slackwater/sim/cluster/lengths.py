"""How long a job's phases really take: drawn ahead for every iteration, from the scenario's seed
and the job's own number.

Every policy sees the same lengths, whatever it does.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slackwater.model.job import JobSpec
from slackwater.sim.cluster.scenario import ClusterScenario, DriftConfig, LengthConfig

Shares = npt.NDArray[np.float64]

# Responses drawn at once: bounds memory for jobs of many iterations.
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class PhaseShares:
    """Per iteration, as shares of the declared worst case; `tail` is the share of the rollout's
    own length at which the threshold of finished responses is reached.
    """

    rollout: list[float]
    tail: list[float]
    train: list[float]


def draw_shares(spec: JobSpec, number: int, scenario: ClusterScenario) -> PhaseShares:
    """All iterations of one job, the scenario's `number`-th."""
    lengths, drift = scenario.lengths, scenario.drift
    generator = np.random.default_rng([scenario.seed, 1, number])
    growth = _growth(generator, spec.iterations, drift)
    if lengths.kind == "worst":
        ones = np.ones(spec.iterations)
        rollout, tail, train = ones, ones, ones
    else:
        rollout, tail, train = _draw_lengths(
            generator, spec.iterations, lengths, scenario.tail.threshold
        )
    grown_train = 1 + (growth - 1) * drift.train_follows
    return PhaseShares((rollout * growth).tolist(), tail.tolist(), (train * grown_train).tolist())


def mean_shares(lengths: LengthConfig) -> tuple[float, float]:
    """Mean shares of the rollout and of the train phase, without drift."""
    if lengths.kind == "worst":
        return 1.0, 1.0
    rollout, _, train = _draw_lengths(np.random.default_rng(0), 256, lengths, 0.8)
    return float(rollout.mean()), float(train.mean())


def _draw_lengths(
    generator: np.random.Generator, iterations: int, lengths: LengthConfig, threshold: float
) -> tuple[Shares, Shares, Shares]:
    rollout, tail, train = (np.empty(iterations) for _ in range(3))
    kv = lengths.kv_share
    for begin in range(0, iterations, _BLOCK):
        end = min(begin + _BLOCK, iterations)
        share = _response_shares(generator, (end - begin, lengths.responses), lengths)
        mean = share.mean(axis=1)
        whole = (1 - kv) * share.max(axis=1) + kv * mean
        at = np.quantile(share, threshold, axis=1)
        until = (1 - kv) * at + kv * np.minimum(share, at[:, None]).mean(axis=1)
        rollout[begin:end], tail[begin:end], train[begin:end] = whole, until / whole, mean
    return rollout, tail, train


def _response_shares(
    generator: np.random.Generator, size: tuple[int, int], lengths: LengthConfig
) -> Shares:
    """Each response's length over the token limit."""
    if lengths.kind == "quantiles":
        steps = np.linspace(0.0, 1.0, len(lengths.quantiles))
        shares: Shares = np.interp(generator.random(size), steps, lengths.quantiles)
        return shares
    drawn = generator.normal(np.log(lengths.median_share), lengths.sigma, size)
    cut: Shares = np.minimum(np.exp(drawn), 1.0)
    return cut


def _growth(generator: np.random.Generator, iterations: int, drift: DriftConfig) -> Shares:
    """Factor on the rollout per iteration: a saturating rise (or its mirror) at a drawn
    strength.
    """
    strengths = {
        "none": (0.0,),
        "increasing": (0.0, 0.5, 1.0, 1.5),
        "decreasing": (0.0, -0.5, -1.0, -1.5),
        "mixed": (0.0, 0.5, 1.0, 1.5, -0.5, -1.0, -1.5),
    }[drift.setting]
    strength = strengths[int(generator.integers(len(strengths)))]
    life = np.arange(iterations) / max(iterations - 1, 1)
    rise = (1 - np.exp(-3 * life)) / (1 - np.exp(-3.0))
    factor: Shares = np.maximum(1 + strength * drift.growth * rise, 0.1)
    return factor
