"""Frames survive any cutting of the stream; anything else ends in a clear error."""

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.model.sampling import Grammar, Sampling
from slackwater.wire import messages
from slackwater.wire.agent import NodeLeaving
from slackwater.wire.batches import (
    Array,
    Example,
    PassBatch,
    PassResult,
    decode_batch,
    decode_result,
    encode_batch,
    encode_result,
)
from slackwater.wire.frames import Frame, FrameDecoder, FrameError, FrameKind, encode_frame
from slackwater.wire.tokens import TokenColumns, TurnFinished, decode_tokens, encode_tokens

kinds = st.sampled_from(FrameKind)


@given(st.lists(st.tuples(kinds, st.binary(max_size=64)), max_size=8), st.data())
def test_frames_come_out_whole_however_the_stream_is_cut(
    sent: list[tuple[FrameKind, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(encode_frame(kind, body) for kind, body in sent)
    decoder, received = FrameDecoder(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        received += decoder.feed(stream[:cut])
        stream = stream[cut:]
    decoder.finish()
    assert received == [Frame(kind, body) for kind, body in sent]


@given(st.binary(min_size=8, max_size=64).filter(lambda data: data[:2] != b"SW"))
def test_garbage_is_refused_at_its_first_header(garbage: bytes) -> None:
    with pytest.raises(FrameError, match="begins with"):
        FrameDecoder().feed(garbage)


def test_a_message_however_deep_is_refused() -> None:
    with pytest.raises(FrameError, match="cannot be read"):
        messages.decode_from_stranger(b"\x91" * 100_000)
    with pytest.raises(FrameError, match="cannot be read"):
        messages.decode_from_stranger(b"\x81\xa1a" + b"\x91" * 100_000)


def test_an_oversized_length_is_refused_before_its_body_comes() -> None:
    with pytest.raises(FrameError, match="above the limit 10"):
        FrameDecoder(max_bytes=10).feed(struct.pack("<2sBBI", b"SW", 1, 1, 11))


def test_a_foreign_version_and_an_unknown_kind_are_named() -> None:
    with pytest.raises(FrameError, match="version 9"):
        FrameDecoder().feed(struct.pack("<2sBBI", b"SW", 9, 1, 0))
    with pytest.raises(FrameError, match="kind 77"):
        FrameDecoder().feed(struct.pack("<2sBBI", b"SW", 1, 77, 0))


@given(st.binary(min_size=1, max_size=40), st.data())
def test_a_truncated_stream_is_an_error_and_no_message(body: bytes, data: st.DataObject) -> None:
    frame = encode_frame(FrameKind.CONTROL, body)
    decoder = FrameDecoder()
    assert decoder.feed(frame[: data.draw(st.integers(1, len(frame) - 1))]) == []
    with pytest.raises(FrameError, match="ended"):
        decoder.finish()


u32 = st.integers(0, 2**32 - 1)
sampled = st.tuples(u32, st.floats(width=32, allow_nan=False))
rows = st.lists(st.tuples(u32, st.lists(sampled, min_size=1, max_size=4)), max_size=50)


endings = st.builds(TurnFinished, u32, st.sampled_from(["stop", "length"]), u32, st.text())


@given(rows, st.lists(endings, max_size=3))
def test_token_columns_and_endings_survive_the_wire(
    sent: list[tuple[int, list[tuple[int, float]]]], finished: list[TurnFinished]
) -> None:
    made = [one for _, run in sent for one in run]
    columns = TokenColumns(
        np.array([row[0] for row in sent], np.uint32),
        np.array([one[0] for one in made], np.uint32),
        np.array([one[1] for one in made], np.float32),
        [len(run) for _, run in sent],
        finished,
    )
    (frame,) = FrameDecoder().feed(encode_tokens(columns))
    assert frame.kind is FrameKind.TOKENS
    requests, tokens, logprobs, counts, ended = decode_tokens(frame.body)
    assert list(ended) == finished
    assert requests.tolist() == [row[0] for row in sent]
    assert list(zip(tokens, logprobs, strict=True)) == made
    assert list(counts or [1] * len(sent)) == [len(run) for _, run in sent]


@given(st.binary(max_size=40))
def test_a_token_frame_of_the_wrong_size_is_refused(body: bytes) -> None:
    if len(body) >= 8:
        count, tokens = struct.unpack("<II", body[:8])
        if len(body) >= 8 + 4 * count * (1 + (count != tokens)) + 8 * tokens:
            return
    with pytest.raises(FrameError, match="token frame"):
        decode_tokens(body)


@given(rows, st.binary(min_size=1, max_size=40))
def test_endings_that_are_none_are_refused(
    sent: list[tuple[int, list[tuple[int, float]]]], rest: bytes
) -> None:
    singles = [row for row, _ in sent]
    columns = TokenColumns(singles, [1] * len(sent), [0.0] * len(sent))
    (frame,) = FrameDecoder().feed(encode_tokens(columns))
    if rest == b"\x90":  # an empty list
        return
    with pytest.raises(FrameError, match="endings"):
        decode_tokens(frame.body + rest)


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_message_decoders(body: bytes) -> None:
    for decode in (messages.decode_to_worker, messages.decode_from_worker):
        with contextlib.suppress(FrameError):
            decode(body)


def test_every_message_comes_back_as_it_went() -> None:
    sampling = Sampling(
        max_tokens=5,
        top_p=0.9,
        min_p=0.1,
        seed=2**63,
        stop_token_ids=[1, 2],
        stop_strings=["\n"],
        repetition_penalty=1.5,
        logit_bias=[(3, -4.5)],
        allowed_token_ids=[],
        bad_words=[],
        grammar=Grammar("regex", "a+"),
        prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_logprobs=2,
        target_prompt_tokens=[[3, -1]],
        prompt_alternatives=2,
    )
    to_worker = messages.Generate(7, "v1", b"\1\0\0\0", b"", sampling)
    (frame,) = FrameDecoder().feed(messages.encode(to_worker))
    assert messages.decode_to_worker(frame.body) == to_worker
    from_worker = messages.OpFailed(3, "no", "user", False)
    (frame,) = FrameDecoder().feed(messages.encode(from_worker))
    assert messages.decode_from_worker(frame.body) == from_worker


def test_a_message_of_the_other_direction_is_refused() -> None:
    (frame,) = FrameDecoder().feed(messages.encode(messages.Stop()))
    with pytest.raises(FrameError, match="cannot be read"):
        messages.decode_from_worker(frame.body)


def test_batches_and_results_keep_every_bit() -> None:
    tokens = np.arange(5, dtype=np.int64)
    weights = np.array([[0.5, np.nan]] * 5, np.float32)
    batch = PassBatch(
        "ppo",
        {"clip": 0.2},
        False,
        [Example(Array.from_numpy(tokens), {"w": Array.from_numpy(weights)})],
    )
    got = decode_batch(encode_batch(batch))
    assert got == batch
    assert got.examples[0].inputs["w"].numpy().tobytes() == weights.tobytes()
    assert got.examples[0].inputs["w"].numpy().shape == (5, 2)
    result = PassResult([Array.from_numpy(weights)], {"loss:sum": 1.5})
    assert decode_result(encode_result(result)) == result


def test_an_array_whose_shape_does_not_fit_its_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        Array("float32", (3,), b"\0" * 8).numpy()
    with pytest.raises(ValueError, match="shape"):
        Array("float32", (-2, -1), b"\0" * 8).numpy()


@pytest.mark.parametrize("leaves_in_s", [float("nan"), float("inf"), -1.0])
def test_a_node_cannot_put_a_moment_that_never_comes_into_the_controllers_clock(
    leaves_in_s: float,
) -> None:
    (frame,) = FrameDecoder().feed(messages.encode(NodeLeaving(leaves_in_s)))
    with pytest.raises(FrameError):
        messages.decode_from_worker(frame.body)
