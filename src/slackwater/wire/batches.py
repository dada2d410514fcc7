"""Training batches and their results as bytes. The durable log stores exactly what a trainer is
sent.

Arrays are raw little-endian bytes with a dtype of `int64` or `float32` and a shape. A batch stores
its examples one after the other; this module does not interpret losses.
"""

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
    def from_numpy(cls, values: NDArray[np.int64] | NDArray[np.float32]) -> "Array":
        name: DType = "int64" if values.dtype.kind == "i" else "float32"
        return cls(name, values.shape, values.astype(_NUMPY[name], copy=False).tobytes())

    def numpy(self) -> NDArray[np.int64] | NDArray[np.float32]:
        """A NumPy view without a copy; refuses a shape that does not match the bytes."""
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
    """The input of one forward or forward_backward."""

    loss_fn: str
    loss_config: dict[str, float]
    forward_only: bool
    examples: list[Example]


class PassResult(msgspec.Struct, frozen=True):
    """Its result: log-probs of the targets by example, and metrics `name:reduction`."""

    logprobs: list[Array]
    metrics: dict[str, float]


encode_batch = encode_result = encode_metrics = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(PassBatch).decode
decode_result = msgspec.msgpack.Decoder(PassResult).decode
decode_metrics = msgspec.msgpack.Decoder(dict[str, float]).decode
