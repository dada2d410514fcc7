"""Training batches and their results as bytes: the durable log keeps exactly what a trainer was
sent.

Arrays are raw little-endian bytes with a dtype of `int64` or `float32` and a shape. A batch stores
its examples one after the other; nothing here knows what a loss is.
"""

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from slackwater.model.errors import ConfigError

DType: TypeAlias = Literal["int64", "float32"]
_NUMPY: dict[str, str] = {"int64": "<i8", "float32": "<f4"}


class Array(msgspec.Struct, frozen=True, array_like=True):
    """A dense array."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, values: NDArray[np.int64] | NDArray[np.float32]) -> "Array":
        """From NumPy."""
        name: DType = "int64" if values.dtype.kind == "i" else "float32"
        return cls(name, values.shape, values.astype(_NUMPY[name], copy=False).tobytes())

    def numpy(self) -> NDArray[np.int64] | NDArray[np.float32]:
        """To NumPy, without a copy; refuses a shape that the bytes do not fill."""
        values: NDArray[np.int64] | NDArray[np.float32] = np.frombuffer(
            self.data, _NUMPY[self.dtype]
        )
        if any(side < 0 for side in self.shape) or values.size != int(np.prod(self.shape)):
            raise ConfigError.of("array: shape", self.shape, f"does not fit {values.size} values")
        return values.reshape(self.shape)


class Example(msgspec.Struct, frozen=True, array_like=True):
    """One training example: its tokens, and the loss's inputs aligned to them."""

    tokens: Array
    inputs: dict[str, Array]


class PassBatch(msgspec.Struct, frozen=True):
    """What one forward or forward_backward runs on."""

    loss_fn: str
    loss_config: dict[str, float]
    forward_only: bool
    examples: list[Example]


class PassResult(msgspec.Struct, frozen=True):
    """What it gave: per-example log-probs of the targets, and metrics `name:reduction`."""

    logprobs: list[Array]
    metrics: dict[str, float]


_encoder = msgspec.msgpack.Encoder()
encode_batch = encode_result = _encoder.encode
decode_batch = msgspec.msgpack.Decoder(PassBatch).decode
decode_result = msgspec.msgpack.Decoder(PassResult).decode
decode_metrics = msgspec.msgpack.Decoder(dict[str, float]).decode


def encode_metrics(metrics: Mapping[str, float]) -> bytes:
    return _encoder.encode(dict(metrics))
