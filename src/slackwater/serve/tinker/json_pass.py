"""JSON training batches of older SDKs, converted to protobuf so that `proto.py` checks both."""

from typing import Annotated, Any

import msgspec
import numpy as np

from slackwater.model.errors import ConfigError
from slackwater.serve.tinker.proto import pb
from slackwater.wire.frames import UNREADABLE

MEDIA_TYPE = "application/json"
_Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Head(msgspec.Struct, frozen=True):
    """The operation's identity; `/forward` has another name for its input."""

    model_id: str
    seq_id: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    forward_backward_input: msgspec.Raw = msgspec.Raw()
    forward_input: msgspec.Raw = msgspec.Raw()


class _Chunk(msgspec.Struct, frozen=True):
    """Chunks of other types have their own fields."""

    tokens: list[_Int32] = []
    type: str = "encoded_text"


class _ModelInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    chunks: list[_Chunk]


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    data: msgspec.Raw
    dtype: str
    shape: list[_Int64] | None = None
    sparse_crow_indices: list[_Int64] | None = None
    sparse_col_indices: list[_Int64] | None = None


class _Datum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model_input: _ModelInput
    loss_fn_inputs: dict[str, _Tensor]


class _Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    data: list[_Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


_heads = msgspec.json.Decoder(_Head)
_inputs = msgspec.json.Decoder(_Input)
_ints = msgspec.json.Decoder(list[_Int64])
_floats = msgspec.json.Decoder(list[float])


def parse_head(body: bytes, *, forward_only: bool) -> tuple[Any, bytes]:
    """A `ForwardBackwardRequest` without its data, and the JSON of the data."""
    try:
        head = _heads.decode(body)
    except UNREADABLE as error:
        raise ConfigError.of(
            "body", f"{len(body)} bytes of JSON", f"cannot be read: {error}"
        ) from None
    data = head.forward_input if forward_only else head.forward_backward_input
    message = pb.ForwardBackwardRequest(
        model_id=head.model_id, seq_id=head.seq_id, forward_only=forward_only
    )
    return message, bytes(data)


def fill_data(message: Any, data: bytes) -> None:
    """Add the data, the loss and its configuration."""
    if not data:
        name = "forward_input" if message.forward_only else "forward_backward_input"
        raise ConfigError.of(name, None, "must be given")
    try:
        found = _inputs.decode(data)
        message.loss_fn = found.loss_fn
        for name, value in (found.loss_fn_config or {}).items():
            if isinstance(value, str):
                raise ConfigError.of(f"loss_fn_config: {name}", value, "must be a number")
            message.loss_fn_config[name] = value
        for datum in found.data:
            _fill_datum(message.data.add(), datum)
    except UNREADABLE as error:
        raise ConfigError.of("data", f"{len(data)} bytes of JSON", str(error)) from None


def _fill_datum(message: Any, datum: _Datum) -> None:
    for chunk in datum.model_input.chunks:
        if chunk.type != "encoded_text":
            raise ConfigError.of("data: chunk", chunk.type, "must be encoded_text: text only")
        packed = np.array(chunk.tokens, "<i4").tobytes()
        message.model_input.add().encoded_text.tokens = packed
    for name, tensor in datum.loss_fn_inputs.items():
        _fill_tensor(message.loss_fn_inputs[name], name, tensor)


def _fill_tensor(message: Any, name: str, tensor: _Tensor) -> None:
    match tensor.dtype:
        case "int64":
            message.dtype = pb.DTYPE_INT64
            values = np.array(_ints.decode(tensor.data), "<i8").tobytes()
        case "float32":
            message.dtype = pb.DTYPE_FLOAT32
            values = np.array(_floats.decode(tensor.data), "<f4").tobytes()
        case other:
            raise ConfigError.of(f"data: {name}: dtype", other, "must be int64 or float32")
    message.shape.extend(tensor.shape or ())
    rows, columns = tensor.sparse_crow_indices, tensor.sparse_col_indices
    if rows is None and columns is None:
        message.dense = values
        return
    message.sparse_csr.values = values
    message.sparse_csr.crow_indices = np.array(rows or (), "<i8").tobytes()
    message.sparse_csr.col_indices = np.array(columns or (), "<i8").tobytes()
