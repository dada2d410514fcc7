"""Large JSON bodies are read in a process of their own, by the rules by which small ones are."""

import json
import os
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.runtime.services.helper_processes import HelperProcesses
from slackwater.serve.http.body_reader import MAX_VALUES, InvalidBody, read_body
from slackwater.serve.openai.bodies import ChatBody, CompletionBody
from slackwater.serve.openai.event_stream import encode_sliced_json
from slackwater.serve.tinker.bodies import SampleBody
from slackwater.serve.tinker.pass_reader import JSON_FORWARD, read_pass


@pytest.fixture(scope="module")
def helpers() -> Iterator[HelperProcesses]:
    found = HelperProcesses()
    yield found
    found.close()


def body_of(kind: type[Any], **fields: Any) -> BaseModel | InvalidBody:
    return read_body(kind, json.dumps(fields).encode())


def test_a_helper_gives_back_the_checked_body(helpers: HelperProcesses) -> None:
    raw = json.dumps({"model": "tiny", "prompt": [[1, 2], list(range(5000))], "n": 2}).encode()
    for _ in range(2):
        found = helpers.run(read_body, CompletionBody, raw)
        assert isinstance(found, CompletionBody)
        assert found.n == 2
        assert [list(prompt) for prompt in found.prompts()] == [[1, 2], list(range(5000))]


def test_token_ids_come_as_arrays_wherever_they_stand() -> None:
    tokens = list(range(100))
    found = body_of(CompletionBody, model="m", prompt=tokens)
    assert isinstance(found, CompletionBody)
    assert all(isinstance(prompt, array) for prompt in found.prompts())
    sample = body_of(SampleBody, prompt={"chunks": [{"tokens": tokens}]})
    assert isinstance(sample, SampleBody)
    assert list(sample.prompt.chunks[0].tokens) == tokens


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"model": "m"', "JSON decode error"),
        (b"[" * 100_000, "cannot be parsed as JSON"),
        (b'{"model": "m", "prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"model": "m", "prompt": "\xed\xa0\x80"}', "send UTF-8"),
        ('{"model": "m", "prompt": "a"}'.encode("utf-16"), "send UTF-8"),
        (b'{"model": "m"}', "Field required"),
        (b'{"model": "m", "prompt": "a", "n": 1000}', "less than or equal to 128"),
    ],
)
def test_what_is_wrong_is_said_as_for_small_bodies(raw: bytes, said: str) -> None:
    found = read_body(CompletionBody, raw)
    assert isinstance(found, InvalidBody)
    assert said in found.errors[0]["msg"]
    assert found.errors[0]["loc"][0] == "body"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":' * 100_000,
        b'{"model_id":"m","seq_id":1,"forward_input":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model_id":"m","seq_id":1,"forward_input":{"data":' + b"[" * 900 + b"]" * 900 + b"}}",
    ],
)
def test_a_batch_however_deep_is_refused_and_its_helper_lives(raw: bytes) -> None:
    try:
        head, _ = read_pass(raw, JSON_FORWARD)
    except ConfigError as error:
        assert "cannot be read" in str(error)
    else:
        assert isinstance(head.error, ConfigError)


def test_a_body_of_too_many_small_things_is_refused_and_one_of_many_tokens_is_not() -> None:
    messages = [{"role": "user", "content": "a"}] * MAX_VALUES
    found = body_of(ChatBody, model="m", messages=messages)
    assert isinstance(found, InvalidBody)
    assert "must be at most" in found.errors[0]["msg"]
    many = body_of(CompletionBody, model="m", prompt=[7] * 200_000)
    assert isinstance(many, CompletionBody)


def test_a_wrong_operation_is_still_known_by_its_number() -> None:
    found = body_of(ChatBody, model_id="mine", seq_id=3, messages="x" * 50)
    assert isinstance(found, InvalidBody)
    assert found.named == {"model_id": "mine", "seq_id": 3}


def test_an_error_of_the_work_is_raised_here_and_its_helper_lives(
    helpers: HelperProcesses,
) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot be read"):
            helpers.run(read_pass, b"{", JSON_FORWARD)


def test_a_helper_gives_way_before_it_has_started() -> None:
    found = HelperProcesses()
    helper = found._helper()
    try:
        ours = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, helper.pid) == min(ours + 10, 19)
    finally:
        helper.kill()
        helper.communicate()


def test_a_helper_that_dies_loses_one_question_alone(helpers: HelperProcesses) -> None:
    with pytest.raises(UnavailableError, match="try again"):
        helpers.run(os._exit, 1)
    raw = b'{"model": "m", "messages": [{"role": "user"}]}'
    assert isinstance(helpers.run(read_body, ChatBody, raw), ChatBody)


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"a": []},
        {"choices": [{"text": "é\n", "logprobs": {"content": [{"top": [1, 2]}] * 70}}]},
        {"tokens": list(range(200)), "none": None, "deep": [[[[[[[[1]]]]]]]]},
        [[], {}, "x"],
        {"1": {"2": [True, 1.5]}},
    ],
)
def test_an_answer_written_in_pieces_is_the_same_json(value: Any) -> None:
    assert json.loads(encode_sliced_json(value)) == value
