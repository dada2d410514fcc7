"""Readers of public traces: when jobs come and how long they run, and how long responses are.

Job traces (Philly, Alibaba and alike) are CSV files, plain or .gz, with at least `arrival_s` and
`duration_s`; `gpus` and `censored` are used if there, other columns passed over. Length traces are
either request files with an `output_tokens` column or tables of quantiles per client and period
(`field`, `requests`, `p1` .. `p100`), as ServeGen's are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slackwater.model.errors import ConfigError, check_above_zero, check_not_negative
from slackwater.sim.inputs.csv_rows import dict_rows, read_rows

_FIELD = "output_tokens"


@dataclass(frozen=True, slots=True)
class TracedJob:
    """One row of a job trace: it came, ran that long alone, on so many GPUs."""

    arrival_s: float
    duration_s: float
    gpus: int = 1
    censored: int = 0

    def __post_init__(self) -> None:
        check_not_negative("", self, "arrival_s", "gpus")
        check_above_zero("", self, "duration_s")


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Response lengths: `tokens[i]` is the quantile at `shares[i]`, linear between."""

    shares: tuple[float, ...]
    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.shares) != len(self.tokens) or len(self.shares) < 2:
            raise ConfigError.of("lengths", len(self.shares), "must be at least 2 quantiles")
        for values, name in ((self.shares, "shares"), (self.tokens, "tokens")):
            if any(b < a for a, b in pairwise(values)):
                raise ConfigError.of(f"lengths: {name}", "a fall", "must never fall")

    @property
    def limit_tokens(self) -> float:
        """The longest response."""
        return self.tokens[-1]

    def shares_of(self, limit_tokens: float, count: int) -> tuple[float, ...]:
        """`count` even quantiles as shares of a token limit, which also caps them."""
        tokens = np.interp(np.linspace(0.0, 1.0, count), self.shares, self.tokens)
        return tuple(np.minimum(tokens / limit_tokens, 1.0).tolist())

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        """`count` lengths, independent."""
        drawn: NDArray[np.float64] = np.interp(rng.random(count), self.shares, self.tokens)
        return drawn


def read_jobs_trace(path: Path, limit: int | None = None) -> tuple[TracedJob, ...]:
    """The first `limit` jobs in order of arrival, the first of them at 0 s; rows cut off by the
    trace's end are left out.
    """
    jobs = [
        job for job in read_rows(path, TracedJob, ignore_other_columns=True) if not job.censored
    ]
    jobs.sort(key=lambda job: job.arrival_s)
    if not jobs:
        raise ConfigError.of("file", str(path), "must hold at least one finished job")
    start_s = jobs[0].arrival_s
    return tuple(
        TracedJob(job.arrival_s - start_s, job.duration_s, job.gpus) for job in jobs[:limit]
    )


def read_lengths(path: Path) -> LengthDistribution:
    """Lengths from either kind of file, told apart by its columns."""
    rows = list(dict_rows(path, []))
    if not rows:
        raise ConfigError.of("file", str(path), "must hold at least one row")
    first = rows[0][1]
    if _FIELD in first:
        return _from_requests([(line, row[_FIELD]) for line, row in rows], path.name)
    if {"field", "requests", "p50", "p100"} <= first.keys():
        return _from_quantiles([(n, row) for n, row in rows if row["field"] == _FIELD], path.name)
    raise ConfigError.of(
        "file", str(path), f"must have a column {_FIELD}, or columns field, requests, p1 .. p100"
    )


def _from_requests(cells: list[tuple[int, str]], name: str) -> LengthDistribution:
    lengths = np.sort([_number(text, f"{name} line {line}: {_FIELD}") for line, text in cells])
    shares = np.linspace(0.0, 1.0, min(len(lengths), 1001) if len(lengths) > 1 else 2)
    tokens = np.quantile(lengths, shares)
    return LengthDistribution(tuple(shares.tolist()), tuple(tokens.tolist()))


def _from_quantiles(rows: Sequence[tuple[int, dict[str, str]]], name: str) -> LengthDistribution:
    """The mixture of all clients and periods, each weighed by its requests."""
    if not rows:
        raise ConfigError.of("file", name, "must hold at least one row of output_tokens")
    columns = [
        key for key in rows[0][1] if key.startswith("p") and key[1:].replace(".", "").isdigit()
    ]
    shares = np.array([float(key[1:]) / 100 for key in columns])
    order = np.argsort(shares)
    grid = np.linspace(0.0, 1.0, 2001)[1:]
    values, weights = [], []
    for line, row in rows:
        at = f"{name} line {line}"
        tokens = np.array([_number(row[columns[i]], f"{at}: {columns[i]}") for i in order])
        if np.any(np.diff(tokens) < 0):
            raise ConfigError(f"{at}: p1 .. p100: fall; write quantiles that never fall")
        values.append(np.interp(grid, shares[order], tokens))
        weights.append(np.full(len(grid), _number(row["requests"], f"{at}: requests") / len(grid)))
    return _mixture(np.concatenate(values), np.concatenate(weights))


def _mixture(values: NDArray[np.float64], weights: NDArray[np.float64]) -> LengthDistribution:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    shares = np.linspace(0.0, 1.0, 1001)
    tokens = values[order][np.searchsorted(reached, shares * reached[-1]).clip(max=len(order) - 1)]
    return LengthDistribution(tuple(shares.tolist()), tuple(tokens.tolist()))


def _number(text: str, at: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError.of(at, text, "must be a number") from None
    if not 0 <= value < float("inf"):
        raise ConfigError.of(at, text, "must not be negative or infinite")
    return value
