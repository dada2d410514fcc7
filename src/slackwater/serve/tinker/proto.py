"""Converts protobuf bodies of the Tinker API to and from the service's types."""

import importlib.util
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from slackwater.model.errors import ConfigError, RefusedError
from slackwater.runtime.store.op_payloads import SampleResult, TargetScores
from slackwater.wire.batches import Array, Example, PassBatch, PassResult

_MODULE = "slackwater_tinker_public_pb2"


def load_schema() -> Any:
    """The generated module `tinker.proto.tinker_public_pb2`."""
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    package = importlib.util.find_spec("tinker")
    if package is None or package.origin is None:
        raise RefusedError("the package tinker is missing: pip install 'slackwater[serve]'")
    file = Path(package.origin).parent / "proto" / "tinker_public_pb2.py"
    spec = importlib.util.spec_from_file_location(_MODULE, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise RefusedError(f"the installed tinker has no {file.name}: install tinker>=0.36")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_MODULE] = module
    return module


pb = load_schema()
MEDIA_TYPE = "application/x-protobuf"
_MAX_DENSE_VALUES = 1 << 25
_DTYPES: dict[int, str] = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8"}
_NO_TOKEN, NO_LOGPROB = 0, -99999.0


def parse_pass_request(body: bytes) -> Any:
    """A `ForwardBackwardRequest`."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ConfigError.of("body", f"{len(body)} bytes", f"is no protobuf: {error}") from None
    return message


def pass_batch(message: Any) -> PassBatch:
    """The batch for the trainer, which checks the values; this checks the structure.

    Names are sorted because the order of a protobuf map differs between processes: a retry that
    another process handles must produce the same bytes.
    """
    config = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "text":
            raise ConfigError.of(f"loss_fn_config: {name}", value.text, "must be a number")
        config[name] = value.number
    if not all(math.isfinite(value) for value in config.values()):
        raise ConfigError.of("loss_fn_config", config, "must be finite")
    if not message.data:
        raise ConfigError.of("data", "[]", "must hold at least one datum")
    _refuse_too_large(message)
    examples = [_example(place, datum) for place, datum in enumerate(message.data)]
    if message.loss_fn == "cross_entropy":
        examples = [_add_default_weights(example) for example in examples]
    config = dict(sorted(config.items()))
    return PassBatch(message.loss_fn, config, message.forward_only, examples)


def _refuse_too_large(message: Any) -> None:
    """Limit the dense size of all sparse tensors: a few bytes can declare any shape."""
    total = 0
    for place, datum in enumerate(message.data):
        for name, tensor in datum.loss_fn_inputs.items():
            if tensor.WhichOneof("encoding") == "sparse_csr":
                total += math.prod(max(side, 0) for side in tensor.shape)
            if total > _MAX_DENSE_VALUES:
                field = f"data[{place}]: {name}: shape"
                fix = f"gives this request's sparse tensors more than {_MAX_DENSE_VALUES} values"
                raise ConfigError.of(field, tuple(tensor.shape), fix)


def _example(place: int, datum: Any) -> Example:
    tokens: list[NDArray[np.int64]] = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ConfigError.of(f"data[{place}]: chunk", kind, "must be encoded_text: text only")
        packed = chunk.encoded_text.tokens
        if len(packed) % 4:
            raise ConfigError.of(f"data[{place}]: tokens", f"{len(packed)} bytes", "must be int32s")
        tokens.append(np.frombuffer(packed, "<i4").astype(np.int64))
    if not tokens:
        raise ConfigError.of(f"data[{place}]: model_input", "[]", "must hold tokens")
    inputs = {
        name: Array.from_numpy(_tensor(f"data[{place}]: {name}", datum.loss_fn_inputs[name]))
        for name in sorted(datum.loss_fn_inputs)
    }
    return Example(Array.from_numpy(np.concatenate(tokens)), inputs)


def _add_default_weights(example: Example) -> Example:
    """Add weights of 1 to targets without weights, as other services of this API do."""
    targets = example.inputs.get("target_tokens")
    if targets is None or "weights" in example.inputs:
        return example
    ones = Array.from_numpy(np.ones(targets.shape, "<f4"))
    return Example(example.tokens, {**example.inputs, "weights": ones})


def _tensor(field: str, tensor: Any) -> NDArray[np.int64] | NDArray[np.float32]:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ConfigError.of(f"{field}: dtype", tensor.dtype, "must be FLOAT32 (1) or INT64 (2)")
    shape = tuple(tensor.shape)
    if len(shape) > 2 or any(side < 0 for side in shape):
        raise ConfigError.of(f"{field}: shape", shape, "must be [T] or [T, K]")
    if tensor.WhichOneof("encoding") == "sparse_csr":
        return _dense(field, tensor.sparse_csr, dtype, shape)
    values = _values(field, tensor.dense, dtype)
    shape = shape or (values.size,)
    if values.size != math.prod(shape):
        raise ConfigError.of(f"{field}: shape", shape, f"must hold {values.size} values")
    return values.reshape(shape)


def _values(field: str, data: bytes, dtype: str) -> NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise ConfigError.of(
            f"{field}: data", f"{len(data)} bytes", f"must be whole {dtype} values"
        )
    return np.frombuffer(data, dtype)


def _dense(field: str, csr: Any, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Cells that are not listed become 0; so do their weights, so the token is irrelevant."""
    values = _values(field, csr.values, dtype)
    rows = _values(field, csr.crow_indices, "<i8")
    columns = _values(field, csr.col_indices, "<i8")
    well_formed = (
        len(shape) == 2
        and rows.size == shape[0] + 1
        and rows[0] == 0
        and rows[-1] == values.size == columns.size
        and bool((np.diff(rows) >= 0).all())
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not well_formed:
        raise ConfigError.of(f"{field}: sparse_csr", shape, "is not a CSR matrix of this shape")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def encode_pass_result(result: PassResult) -> bytes:
    """A `ForwardBackwardOutput`: runs of examples with equal trailing shape, in request order."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=result.metrics)
    for _, run in itertools.groupby(result.logprobs, key=lambda array: array.shape[1:]):
        _add_record(message, list(run))
    encoded: bytes = message.SerializeToString()
    return encoded


def _add_record(message: Any, arrays: list[Array]) -> None:
    record = message.loss_fn_outputs.add(num_datums=len(arrays))
    field = record.fields["logprobs"]
    field.data = b"".join(array.data for array in arrays)
    sizes = np.array([len(array.data) for array in arrays], "<i8")
    field.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype("<i8").tobytes()
    field.dtype = pb.DTYPE_FLOAT32
    field.trailing_shape.extend(arrays[0].shape[1:])


def encode_sample_result(result: SampleResult) -> bytes:
    """A `SampleResponse`."""
    message = pb.SampleResponse()
    for sequence in result.sequences:
        reason = pb.STOP_REASON_STOP if sequence.reason == "stop" else pb.STOP_REASON_LENGTH
        added = message.sequences.add(
            stop_reason=reason, tokens=sequence.tokens, logprobs=sequence.logprobs
        )
        if any(sequence.topk):
            _fill_topk(added.topk_sampled_logprobs, list(sequence.topk))
    if result.prompt_logprobs is not None:
        scores = [math.nan if score is None else score for score in result.prompt_logprobs]
        message.prompt_logprobs = np.asarray(scores, "<f4").tobytes()
    if any(result.prompt_topk):
        _fill_topk(message.topk_prompt_logprobs, result.prompt_topk)
    if (targets := result.targets) is not None:
        _fill_targets(message.target_prompt_logprobs, targets)
    if result.alternatives:
        pairs = np.array(result.alternatives, np.float64)
        drawn = message.prompt_alt_tokens
        _fill_dense(drawn.tokens, pairs[:, :, 0].astype("<i8"), pb.DTYPE_INT64)
        _fill_dense(drawn.logprobs, pairs[:, :, 1].astype("<f4"), pb.DTYPE_FLOAT32)
    encoded: bytes = message.SerializeToString()
    return encoded


def _fill_dense(message: Any, values: NDArray[Any], dtype: int) -> None:
    message.dense, message.dtype = values.tobytes(), dtype
    message.shape.extend(values.shape)


def _fill_targets(message: Any, targets: TargetScores) -> None:
    """Write scores in the layout of the request: dense, or the same sparse cells."""
    values = np.array([value for row in targets.rows for value in row], "<f4")
    message.dtype = pb.DTYPE_FLOAT32
    message.shape.extend((len(targets.rows), targets.width))
    if targets.columns is None:
        message.dense = values.tobytes()
        return
    sizes = np.array([len(row) for row in targets.rows], "<i8")
    sparse = message.sparse_csr
    sparse.values = values.tobytes()
    sparse.crow_indices = np.concatenate([[0], np.cumsum(sizes)]).astype("<i8").tobytes()
    sparse.col_indices = np.array(targets.columns, "<i8").tobytes()


def _fill_topk(message: Any, rows: "list[list[tuple[int, float]] | None] | list[Any]") -> None:
    k = max(len(row) for row in rows if row)
    tokens = np.full((len(rows), k), _NO_TOKEN, "<i4")
    logprobs = np.full((len(rows), k), NO_LOGPROB, "<f4")
    for place, row in enumerate(rows):
        if row:
            tokens[place, : len(row)], logprobs[place, : len(row)] = zip(*row, strict=True)
    message.token_ids, message.logprobs = tokens.tobytes(), logprobs.tobytes()
    message.k, message.length = k, len(rows)
