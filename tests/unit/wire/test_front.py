"""Records of the channel to front ends: what goes in comes out, and nothing else is believed."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.model.sampling import Sampling, sample_seed
from slackwater.wire import front
from slackwater.wire.frames import FrameDecoder, FrameError

GENERATE = front.GenerateChoices(
    7,
    "mine",
    "mine/job",
    "tiny",
    "base:tiny",
    True,
    1.5,
    Sampling(4, stop_token_ids=[1], logit_bias=[(3, 0.5)]),
    2,
    [b"\x01\0\0\0", b"\x02\0\0\0"],
    [4, 3],
)
RECORDS: list[front.FromFront] = [
    GENERATE,
    front.AbandonChoices("mine", 7, 4),
    front.Sample(8, "mine", "ss-1", 3, b"payload"),
    front.AskSession(9, "mine", "ss-1"),
    front.AskModel(10, "mine", "tiny:name"),
    front.AskFuture(11, "mine", "sm-1", 0.5),
]


def frame_of(*records: front.Record) -> bytes:
    return front.join_records([front.encode_record(record) for record in records])


def body_of(records: list[front.FromFront]) -> bytes:
    (frame,) = FrameDecoder().feed(frame_of(*records))
    return frame.body


def test_a_frame_holds_its_records_in_order() -> None:
    found = front.decode_from_front(body_of(RECORDS))
    assert [type(record) for record in found] == [type(record) for record in RECORDS]
    assert found[1:] == RECORDS[1:]
    assert isinstance(found[0], front.GenerateChoices)
    assert found[0].prompts == [b"\x01\0\0\0", b"\x02\0\0\0"]
    assert found[0].sampling.stop_token_ids == [1]


def test_choices_of_a_request_differ_in_seed_and_length_alone() -> None:
    first, *others = [GENERATE.sampling_of(place) for place in range(4)]
    assert first is GENERATE.sampling
    assert [one.max_tokens for one in others] == [4, 3, 3]
    assert [one.seed for one in others] == [sample_seed(0, place) for place in (1, 2, 3)]
    assert all(replace(one, seed=0, max_tokens=4) == first for one in others)


@settings(max_examples=300, deadline=None)
@given(body=st.binary(max_size=200))
def test_any_bytes_are_records_or_refused(body: bytes) -> None:
    try:
        front.decode_from_front(body)
    except FrameError:
        return


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_frame_is_records_or_refused(data: st.DataObject) -> None:
    body = bytearray(body_of(RECORDS))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        front.decode_from_front(bytes(body))
    except FrameError:
        return


def test_what_the_control_plane_says_is_not_believed_of_a_front_end() -> None:
    (frame,) = FrameDecoder().feed(frame_of(front.ChoicesAccepted(1)))
    with pytest.raises(FrameError, match="invalid records from a front end"):
        front.decode_from_front(frame.body)
