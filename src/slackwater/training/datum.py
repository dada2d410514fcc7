"""Input and output of a pass.

All arrays of a datum are aligned to `tokens`: position i predicts `target_tokens[i]` (the caller
has shifted them already), and `weights`, `logprobs` and `advantages` belong to that prediction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slackwater.model.errors import ConfigError
from slackwater.training.losses import Loss


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence and the inputs of its loss: `target_tokens` int64, the others float32."""

    tokens: npt.NDArray[np.int64]
    inputs: Mapping[str, npt.NDArray[np.generic]]

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])


@dataclass(frozen=True, slots=True)
class PassOutput:
    """Log-probs of each datum's targets, in the order of the data, and `name:reduction` metrics."""

    logprobs: tuple[npt.NDArray[np.float32], ...]
    metrics: Mapping[str, float]


def check_data(data: Sequence[Datum], loss: Loss, vocab_size: int, max_tokens: int) -> None:
    """Refuse data that are incomplete, misaligned, not finite or outside the vocabulary."""
    if not data:
        raise ConfigError.of("data", [], "must hold at least one datum")
    for index, datum in enumerate(data):
        where = f"data[{index}]"
        _check_tokens(f"{where}.tokens", datum.tokens, vocab_size)
        if datum.tokens.ndim != 1 or not 0 < datum.num_tokens <= max_tokens:
            raise ConfigError.of(
                f"{where}.tokens", datum.tokens.shape, f"must be a list of 1 to {max_tokens} tokens"
            )
        _check_inputs(where, datum, loss, vocab_size)


def _check_inputs(where: str, datum: Datum, loss: Loss, vocab_size: int) -> None:
    missing = [name for name in ("target_tokens", *loss.inputs) if name not in datum.inputs]
    if missing:
        raise ConfigError.of(
            f"{where}.loss_fn_inputs", sorted(datum.inputs), f"must also hold {', '.join(missing)}"
        )
    targets = datum.inputs["target_tokens"]
    _check_tokens(f"{where}.target_tokens", targets, vocab_size)
    takes_rows = "weights" in loss.inputs
    if (
        not targets.size
        or targets.shape[:1] != (datum.num_tokens,)
        or targets.ndim > (2 if takes_rows else 1)
    ):
        raise ConfigError.of(
            f"{where}.target_tokens",
            targets.shape,
            f"must have shape ({datum.num_tokens},)" + (" or one row of targets each" * takes_rows),
        )
    for name in loss.inputs:
        values = datum.inputs[name]
        if values.dtype != np.float32:
            raise ConfigError.of(f"{where}.{name}", str(values.dtype), "must be float32")
        if values.shape != targets.shape:
            raise ConfigError.of(
                f"{where}.{name}", values.shape, f"must have the targets' shape {targets.shape}"
            )
        if not np.isfinite(values).all():
            position = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
            raise ConfigError.of(
                f"{where}.{name}{list(position)}",
                float(values[position]),
                "must be a finite number",
            )


def _check_tokens(where: str, tokens: npt.NDArray[np.generic], vocab_size: int) -> None:
    if tokens.dtype != np.int64:
        raise ConfigError.of(where, str(tokens.dtype), "must be int64")
    ids = tokens.astype(np.int64, copy=False)
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        value = int(ids[outside][0])
        raise ConfigError.of(where, value, f"must be a token from 0 to {vocab_size - 1}")
