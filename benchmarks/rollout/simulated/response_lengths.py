"""Lengths of reasoning responses, as an input: a log-normal law cut at the longest response
allowed.
"""

from statistics import NormalDist

import numpy as np

from slackwater.sim.inputs.traces import LengthDistribution


def log_normal(median_tokens: float, sigma: float, limit_tokens: float) -> LengthDistribution:
    """A quantile table of the law; what would be longer is cut at the limit, as samplers do."""
    shares = np.linspace(0.0, 1.0, 401)
    scores = [NormalDist().inv_cdf(min(max(share, 0.0005), 0.9995)) for share in shares]
    tokens = np.minimum(median_tokens * np.exp(sigma * np.array(scores)), limit_tokens)
    return LengthDistribution(tuple(shares.tolist()), tuple(tokens.tolist()))
