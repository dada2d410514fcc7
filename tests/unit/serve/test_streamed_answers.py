"""A streamed answer says what the whole one says: text, echo, log-probs, alternatives, offsets and
bytes.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from slackwater.model.ids import TurnId
from slackwater.model.turn import FinishReason
from slackwater.runtime.executors.turn_results import TurnResult, TurnTokens
from slackwater.serve.openai.answers import ChatAnswers, CompletionAnswers, ResponseWriter
from slackwater.serve.openai.bodies import ChatBody, ChatMessage, CompletionBody, StreamOptions
from slackwater.serve.openai.generation import ChoiceDelta, FinishedChoice
from slackwater.serve.openai.text import TextCodec, TextStream
from slackwater.zoo.tiny import byte_tokenizer

PROMPT = list("né".encode())


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return TextCodec(folder)


def row(token: int) -> list[tuple[int, float]]:
    return [(token, -0.5), ((token + 1) % 256, -1.5)]


def result_of(tokens: Sequence[int]) -> TurnResult:
    return TurnResult(
        TurnId("t"),
        list(tokens),
        [-0.5 - place for place in range(len(tokens))],
        FinishReason.LENGTH,
        "v",
        0,
        [row(token) for token in tokens],
        [None, *[-1.0] * (len(PROMPT) - 1)],
        [None, *[row(token) for token in PROMPT[1:]]],
    )


def streamed(
    answers: ResponseWriter, result: TurnResult, cuts: Sequence[int]
) -> list[dict[str, Any]]:
    """The choices of the chunks, with the tokens in pieces that end at `cuts`."""
    chunks, seen = answers.opening(), 0
    for cut in sorted({cut for cut in cuts if 0 < cut < len(result.tokens)}):
        more = TurnTokens(
            TurnId("t"),
            result.tokens[seen:cut],
            result.logprobs[seen:cut],
            result.topk[seen:cut],
            None if seen else result.prompt_logprobs,
            () if seen else result.prompt_topk,
        )
        chunks += answers.piece(ChoiceDelta(0, more))
        seen = cut
    chunks += answers.end(FinishedChoice(0, result))
    return [chunk["choices"][0] for chunk in chunks]


@given(st.text(min_size=1, max_size=12), st.lists(st.integers(0, 40), max_size=5), st.booleans())
def test_a_streamed_completion_adds_up_to_the_whole_one(
    codec: TextCodec, text: str, cuts: list[int], echo: bool
) -> None:
    body = CompletionBody(model="m", prompt="p", logprobs=2, echo=echo)
    result = result_of(list(text.encode()))
    whole = CompletionAnswers(body, codec, [PROMPT]).whole([result])["choices"][0]
    choices = streamed(CompletionAnswers(body, codec, [PROMPT]), result, cuts)
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        said = [choice["logprobs"][field] for choice in choices if choice["logprobs"]]
        assert [entry for part in said for entry in part or []] == whole["logprobs"][field]
    assert choices[-1]["finish_reason"] == "length"


@given(st.text(min_size=1, max_size=12), st.lists(st.integers(0, 40), max_size=5))
def test_offsets_are_places_in_the_text_and_bytes_spell_it(
    codec: TextCodec, text: str, cuts: list[int]
) -> None:
    tokens = list(text.encode())
    result = result_of(tokens)
    body = CompletionBody(model="m", prompt="p", logprobs=0)
    said = CompletionAnswers(body, codec, [PROMPT]).whole([result])["choices"][0]["logprobs"]
    places = [place for place, letter in enumerate(text) for _ in letter.encode()]
    assert said["text_offset"] == places
    chat = ChatBody(
        model="m", messages=[ChatMessage(role="user", content="x")], logprobs=True, top_logprobs=2
    )
    choices = streamed(ChatAnswers(chat, codec, [PROMPT]), result, cuts)
    content = [
        entry
        for choice in choices
        if choice.get("logprobs")
        for entry in choice["logprobs"]["content"]
    ]
    assert bytes(byte for entry in content for byte in entry["bytes"]) == text.encode()
    assert [[other["bytes"] for other in entry["top_logprobs"]] for entry in content] == [
        [[token], [(token + 1) % 256]] for token in tokens
    ]


def test_tokens_inside_a_character_have_names_of_their_own(codec: TextCodec) -> None:
    assert [codec.token_label(byte) for byte in "é".encode()] == [r"bytes:\xc3", r"bytes:\xa9"]
    assert codec.token_label(256) == "<|endoftext|>"


def test_tokens_with_byte_fallback_are_spelled_too(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "<0xC3>": 1, "<0xA9>": 2, "\u2581hi": 3}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert "ByteFallback" in json.dumps(json.loads((tmp_path / "tokenizer.json").read_text()))
    codec = TextCodec(tmp_path)
    assert [codec.bytes.lookup(token) for token in (1, 2, 3, 4)] == [
        b"\xc3",
        b"\xa9",
        b" hi",
        b"<s>",
    ]


@given(st.text(min_size=1, max_size=12), st.lists(st.integers(0, 40), max_size=5), st.booleans())
def test_plain_text_is_written_as_any_piece_is(
    codec: TextCodec, text: str, cuts: list[int], chat: bool
) -> None:
    def answers() -> ResponseWriter:
        if chat:
            said = [ChatMessage(role="user", content="p")]
            return ChatAnswers(ChatBody(model="m", messages=said), codec, [PROMPT])
        return CompletionAnswers(CompletionBody(model="m", prompt="p"), codec, [PROMPT])

    plain, usual = answers(), answers()
    tokens, seen = list(text.encode()), 0
    for cut in [*sorted({cut for cut in cuts if 0 < cut < len(tokens)}), len(tokens)]:
        more = TurnTokens(TurnId("t"), tokens[seen:cut], [-1.0] * (cut - seen))
        seen = cut
        written, chunks = plain.plain_piece(ChoiceDelta(0, more)), usual.piece(ChoiceDelta(0, more))
        assert written is not None
        events = [json.loads(line[6:]) for line in written.decode().split("\n\n") if line]
        assert [event["choices"] for event in events] == [chunk["choices"] for chunk in chunks]


def test_every_chunk_counts_the_tokens_so_far_if_asked(codec: TextCodec) -> None:
    counted = StreamOptions(include_usage=True, continuous_usage_stats=True)
    body = CompletionBody(model="m", prompt="p", stream=True, stream_options=counted)
    answers, result = CompletionAnswers(body, codec, [PROMPT]), result_of(list(b"tides"))
    more = TurnTokens(TurnId("t"), result.tokens[:2], result.logprobs[:2])
    assert answers.plain_piece(ChoiceDelta(0, more)) is None
    chunks = answers.piece(ChoiceDelta(0, more)) + answers.end(FinishedChoice(0, result))
    chunks += answers.closing()
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [2, 5, 5, 5]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {len(PROMPT)}


@given(st.binary(min_size=1, max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_a_text_is_the_same_however_its_tokens_come(
    codec: TextCodec, spelled: bytes, cuts: list[int]
) -> None:
    whole, pieces, seen = TextStream(codec, ()), TextStream(codec, ()), 0
    whole.feed(list(spelled))
    whole.finish()
    for cut in [*sorted({cut for cut in cuts if 0 < cut < len(spelled)}), len(spelled)]:
        pieces.feed(list(spelled[seen:cut]))
        seen = cut
    pieces.finish()
    assert pieces.text == whole.text


@pytest.mark.parametrize("drawn", [[7], []])
def test_an_echo_without_tokens_is_the_prompt_alone(codec: TextCodec, drawn: list[int]) -> None:
    body = CompletionBody(model="m", prompt="x", max_tokens=0, echo=True, logprobs=1)
    said = CompletionAnswers(body, codec, [PROMPT]).whole([result_of(drawn)])
    (choice,) = said["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("n\u00e9", "length")
    assert len(choice["logprobs"]["tokens"]) == len(PROMPT)
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert said["usage"]["completion_tokens"] == 0
    pieces = streamed(CompletionAnswers(body, codec, [PROMPT]), result_of(drawn), [])
    assert "".join(piece["text"] for piece in pieces) == "n\u00e9"
    assert pieces[-1]["finish_reason"] == "length"


def test_no_tokens_without_an_echo_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="max_tokens: 0 must be at least 1 without echo"):
        CompletionBody(model="m", prompt="x", max_tokens=0)
