"""Tokens that a client wants scored at every position of a prompt: a matrix, dense or sparse."""

from itertools import pairwise

from slackwater.model.errors import ConfigError
from slackwater.runtime.store.base_models import BaseModel
from slackwater.runtime.store.op_payloads import TargetTokens
from slackwater.serve.tinker.bodies import TensorBody

_NAME = "target_prompt_logprobs"


def target_tokens(given: TensorBody, rows: int, base: BaseModel) -> TargetTokens:
    """Tokens by position; whatever does not fit the prompt is refused."""
    shape = given.shape or []
    if given.dtype != "int64" or len(shape) != 2 or shape[0] != rows or rows == 0:
        fix = f"must be an int64 tensor of shape [{rows}, K] for this prompt"
        raise ConfigError.of(_NAME, f"{given.dtype} {shape}", fix)
    tokens = [int(token) for token in given.data]
    edges, columns = list(given.sparse_crow_indices or ()), list(given.sparse_col_indices or ())
    bad = [token for token in tokens if not -1 <= token < base.vocab_size]
    if bad:
        raise ConfigError.of(f"{_NAME}: token", bad[0], f"must be below {base.vocab_size}, or -1")
    width = shape[1]
    if given.sparse_crow_indices is None:
        if len(tokens) != rows * width:
            raise ConfigError.of(f"{_NAME}: data", len(tokens), f"must hold {rows * width} values")
        return TargetTokens([tokens[at * width : (at + 1) * width] for at in range(rows)], width)
    return _sparse(tokens, rows, width, edges, columns)


def _sparse(
    tokens: list[int], rows: int, width: int, edges: list[int], columns: list[int]
) -> TargetTokens:
    well_formed = (
        len(columns) == len(tokens)
        and len(edges) == rows + 1
        and edges[0] == 0
        and edges[-1] == len(tokens)
        and all(first <= last for first, last in pairwise(edges))
        and all(0 <= column < width for column in columns)
    )
    if not well_formed:
        fix = "are no CSR matrix of this shape"
        raise ConfigError.of(f"{_NAME}: sparse indices", [rows, width], fix)
    return TargetTokens([tokens[first:last] for first, last in pairwise(edges)], width, columns)
