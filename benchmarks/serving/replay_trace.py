"""Requests to replay, from any of the public serving traces: rows of requests, or rates to draw
requests by.

| columns | what is replayed | |---|---| | `t_s,prompt_tokens,output_tokens` | each row; with
`hash_ids` prompts share the blocks of 512 tokens that they name | | `t_s,tokens_per_s` | requests
drawn so that so many tokens, of prompts and answers, come in a second | | `t_s,..._req_per_s` |
requests drawn at the rate of the first such column |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slackwater.model.errors import ConfigError
from slackwater.sim.inputs.csv_rows import dict_rows, read_rows
from slackwater.sim.serving.serving_trace import TracedRequest

_BLOCK = 512
_PROMPT_TOKENS, _OUTPUT_TOKENS = 1200, 180  # medians of drawn requests
_MEANS = float(np.exp(0.8**2 / 2))  # of a lognormal of this spread, over its median
# Tokens that every tokenizer has, and none of them ends an answer.
_FIRST_TOKEN, _LAST_TOKEN = 10, 250


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """One request: when it comes, how long it is, and the blocks of its prompt that others may have
    too.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a trace, and how far requests are shortened so that they fit the model's
    context.
    """

    from_s: float
    seconds: float
    most_prompt: int
    most_output: int


def read_replay(path: Path, cut: Cut, seed: int) -> list[ReplayedRequest]:
    """The requests of that part, from second 0 on, by time."""
    columns = _columns(path)
    if {"prompt_tokens", "output_tokens"} <= set(columns):
        found = _rows(path, cut)
    elif "tokens_per_s" in columns:
        mean = _MEANS * (_PROMPT_TOKENS + _OUTPUT_TOKENS)
        found = _drawn(path, "tokens_per_s", 1.0 / mean, cut, seed)
    else:
        rates = [name for name in columns if name.endswith("_req_per_s")]
        if "t_s" not in columns or not rates:
            fix = (
                "must have the columns t_s and prompt_tokens, output_tokens; tokens_per_s; or "
                "*_req_per_s"
            )
            raise ConfigError.of("--trace", str(path), fix)
        found = _drawn(path, rates[0], 1.0, cut, seed)
    if not found:
        to_s = cut.from_s + cut.seconds
        fix = f"must hold a request between second {cut.from_s:g} and {to_s:g}"
        raise ConfigError.of("--trace", str(path), fix)
    return found


def prompt_of(request: ReplayedRequest, number: int, seed: int) -> list[int]:
    """Its tokens: those of its named blocks are the same in every request, the rest are its own."""
    parts = [_tokens(seed, (1, block), _BLOCK) for block in request.blocks]
    known = sum(len(part) for part in parts)
    if known < request.prompt_tokens:
        parts.append(_tokens(seed, (2, number), request.prompt_tokens - known))
    return [token for part in parts for token in part][: request.prompt_tokens]


def _tokens(seed: int, name: tuple[int, int], count: int) -> list[int]:
    rng = np.random.default_rng((seed, *name))
    drawn: list[int] = rng.integers(_FIRST_TOKEN, _LAST_TOKEN, count).tolist()
    return drawn


def _columns(path: Path) -> Sequence[str]:
    for _, row in dict_rows(path, []):
        return list(row)
    raise ConfigError.of("--trace", str(path), "must hold a row")


def _rows(path: Path, cut: Cut) -> list[ReplayedRequest]:
    found = [
        ReplayedRequest(
            row.t_s - cut.from_s,
            min(max(row.prompt_tokens, 1), cut.most_prompt),
            min(max(row.output_tokens, 1), cut.most_output),
            tuple(int(block) for block in row.hash_ids.split()),
        )
        for row in read_rows(path, TracedRequest, ignore_other_columns=True)
        if cut.from_s <= row.t_s < cut.from_s + cut.seconds
    ]
    return sorted(found, key=lambda request: request.at_s)


def _drawn(path: Path, column: str, times: float, cut: Cut, seed: int) -> list[ReplayedRequest]:
    """A Poisson stream by the rates of one column; a rate holds until the next row's moment."""
    rng = np.random.default_rng(seed)
    rows = [(float(row["t_s"]), float(row[column])) for _, row in dict_rows(path, ["t_s", column])]
    end_s = cut.from_s + cut.seconds
    ends = [at_s for at_s, _ in rows[1:]] + [float("inf")]
    moments: list[float] = []
    for (at_s, rate), until_s in zip(rows, ends, strict=True):
        begins_s, stops_s = max(at_s, cut.from_s), min(until_s, end_s)
        if stops_s > begins_s:
            count = int(rng.poisson(rate * times * (stops_s - begins_s)))
            moments += rng.uniform(begins_s, stops_s, count).tolist()
    return [
        ReplayedRequest(
            moment - cut.from_s,
            min(1 + int(rng.lognormal(np.log(_PROMPT_TOKENS), 0.8)), cut.most_prompt),
            min(1 + int(rng.lognormal(np.log(_OUTPUT_TOKENS), 0.8)), cut.most_output),
        )
        for moment in sorted(moments)
    ]
