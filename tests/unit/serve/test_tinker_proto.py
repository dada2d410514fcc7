"""Protobuf bodies: good ones keep every bit, bad ones are refused with the field's name."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.model.errors import ConfigError
from slackwater.runtime.store.op_payloads import SampleResult, SequencePayload
from slackwater.serve.tinker import proto as tinker_proto
from slackwater.serve.tinker.proto import pb
from slackwater.wire.batches import Array, PassResult


def request(**tensors: object) -> object:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    for piece in ([1, 2], [3]):
        datum.model_input.add().encoded_text.tokens = np.array(piece, "<i4").tobytes()
    for name, tensor in tensors.items():
        datum.loss_fn_inputs[name].CopyFrom(tensor)
    return message


def dense(values: list[float], dtype: str = "<f4", shape: tuple[int, ...] | None = None) -> object:
    kind = pb.DTYPE_FLOAT32 if dtype == "<f4" else pb.DTYPE_INT64
    return pb.Tensor(dense=np.array(values, dtype).tobytes(), dtype=kind, shape=shape or [])


def sparse(values: list[int], rows: list[int], columns: list[int], shape: list[int]) -> object:
    csr = pb.SparseCsr(
        values=np.array(values, "<i8").tobytes(),
        crow_indices=np.array(rows, "<i8").tobytes(),
        col_indices=np.array(columns, "<i8").tobytes(),
    )
    return pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_INT64, shape=shape)


def test_chunks_of_a_prompt_are_joined_and_inputs_keep_their_types() -> None:
    batch = tinker_proto.pass_batch(
        request(weights=dense([1.0, math.nan, -2.5]), target_tokens=dense([2, 3, 4], "<i8"))
    )
    (example,) = batch.examples
    assert example.tokens.numpy().tolist() == [1, 2, 3]
    assert example.inputs["target_tokens"].numpy().dtype == np.int64
    assert example.inputs["weights"].numpy()[2] == -2.5


@given(st.sets(st.text("abcdefgh", min_size=1), min_size=3, max_size=8))
def test_a_retry_that_another_process_reads_is_the_same_bytes(names: set[str]) -> None:
    """Every process has another order of a protobuf map."""
    message = request(**{name: dense([1.0, 2.0, 3.0]) for name in names})
    for name in names:
        message.loss_fn_config[name] = 1.0  # type: ignore[attr-defined]  # a protobuf message
    batch = tinker_proto.pass_batch(message)
    assert list(batch.loss_config) == sorted(names)
    assert list(batch.examples[0].inputs) == sorted(names)


def test_a_cross_entropy_without_weights_counts_every_target_once() -> None:
    targets = dense([2, 3, 4], "<i8")
    (example,) = tinker_proto.pass_batch(request(target_tokens=targets)).examples
    assert example.inputs["weights"].numpy().tolist() == [1.0, 1.0, 1.0]
    other = request(target_tokens=targets)
    other.loss_fn = "importance_sampling"  # type: ignore[attr-defined]  # a protobuf message
    assert "weights" not in tinker_proto.pass_batch(other).examples[0].inputs


def test_sparse_targets_become_dense_with_zeros() -> None:
    tensor = sparse([7, 8, 9], [0, 1, 1, 3], [2, 0, 1], [3, 4])
    batch = tinker_proto.pass_batch(request(target_tokens=tensor))
    assert batch.examples[0].inputs["target_tokens"].numpy().tolist() == [
        [0, 0, 7, 0],
        [0, 0, 0, 0],
        [8, 9, 0, 0],
    ]


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (pb.Tensor(dense=b"\0" * 5, dtype=pb.DTYPE_FLOAT32), "whole"),
        (pb.Tensor(dense=b"\0" * 8, dtype=pb.DTYPE_BFLOAT16), "dtype"),
        (pb.Tensor(dense=b"\0" * 8, dtype=pb.DTYPE_FLOAT32, shape=[3]), "shape"),
        (pb.Tensor(dense=b"", dtype=pb.DTYPE_FLOAT32, shape=[-1]), "shape"),
        (pb.Tensor(dense=b"", dtype=pb.DTYPE_FLOAT32, shape=[1 << 20, 1 << 20]), "shape"),
        (sparse([1], [0, 1], [5], [1, 2]), "CSR"),
        (sparse([1], [0, 7], [0], [1, 2]), "CSR"),
        (sparse([1], [0, 1, 1], [0], [1, 2]), "CSR"),
    ],
)
def test_malformed_tensors_are_refused_by_name(tensor: object, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\[0\]: weights.*{said}"):
        tinker_proto.pass_batch(request(weights=tensor))


def test_images_half_tokens_text_settings_and_empty_batches_are_refused() -> None:
    with_image = request()
    with_image.data[0].model_input.add().image.data = b"png"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="encoded_text"):
        tinker_proto.pass_batch(with_image)
    half = request()
    half.data[0].model_input[0].encoded_text.tokens = b"\1\2\3"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="int32"):
        tinker_proto.pass_batch(half)
    worded = request()
    worded.loss_fn_config_v2["mode"].text = "fast"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="mode"):
        tinker_proto.pass_batch(worded)
    with pytest.raises(ConfigError, match="at least one"):
        tinker_proto.pass_batch(pb.ForwardBackwardRequest(model_id="m"))


@given(st.binary(max_size=300))
def test_no_bytes_crash_the_decoder(body: bytes) -> None:
    try:
        tinker_proto.pass_batch(tinker_proto.parse_pass_request(body))
    except ConfigError:
        return


def test_results_come_back_per_example_in_order() -> None:
    arrays = [np.array([-1.0, -2.0], np.float32), np.ones((1, 3), np.float32)]
    result = PassResult([Array.from_numpy(array) for array in arrays], {"loss:sum": 3.0})
    message = pb.ForwardBackwardOutput.FromString(tinker_proto.encode_pass_result(result))
    assert dict(message.metrics) == {"loss:sum": 3.0}
    assert [record.num_datums for record in message.loss_fn_outputs] == [1, 1]
    first = message.loss_fn_outputs[0].fields["logprobs"]
    assert np.frombuffer(first.data, "<f4").tolist() == [-1.0, -2.0]
    assert np.frombuffer(first.offsets, "<i8").tolist() == [0, 8]
    assert list(message.loss_fn_outputs[1].fields["logprobs"].trailing_shape) == [3]


def test_samples_carry_tokens_scores_and_padded_alternatives() -> None:
    tokens, logprobs = np.array([5, 6], "<i4").tobytes(), np.array([-0.5, -1.0], "<f4").tobytes()
    sequence = SequencePayload("length", tokens, logprobs, [[(1, -0.1)], [(2, -0.2), (3, -0.3)]])
    result = SampleResult([sequence], [None, -1.5], [None, [(9, -0.25)]])
    message = pb.SampleResponse.FromString(tinker_proto.encode_sample_result(result))
    assert message.sequences[0].stop_reason == pb.STOP_REASON_LENGTH
    scores = np.frombuffer(message.prompt_logprobs, "<f4")
    assert math.isnan(scores[0]) and scores[1] == -1.5
    top = message.sequences[0].topk_sampled_logprobs
    assert (top.k, top.length) == (2, 2)
    assert np.frombuffer(top.token_ids, "<i4").tolist() == [1, 0, 2, 3]
    assert np.frombuffer(top.logprobs, "<f4")[1] == np.float32(-99999.0)
    prompt_top = message.topk_prompt_logprobs
    assert np.frombuffer(prompt_top.token_ids, "<i4").tolist() == [0, 9]


def test_many_sparse_tensors_may_not_ask_for_more_memory_than_one() -> None:
    rows = 1 << 10
    wide = sparse([], [0] * (rows + 1), [], [rows, 1 << 14])
    message = request(**{f"input{number}": wide for number in range(3)})
    with pytest.raises(ConfigError, match="sparse tensors"):
        tinker_proto.pass_batch(message)
