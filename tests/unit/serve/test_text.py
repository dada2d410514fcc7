"""Text as it streams: the pieces make the whole, no half characters, nothing of a stop string."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slackwater.model.errors import ConfigError, RefusedError
from slackwater.serve.openai.text import TextCodec, TextStream


def byte_model(folder: Path, template: str | None, *, plain: bool = True) -> Path:
    """A tokenizer whose tokens are bytes, which shows only if its decoder is `plain`."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(
        models.BPE(vocab={c: n for n, c in enumerate(sorted(letters))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel() if plain else decoders.Sequence([decoders.ByteLevel()])
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "eos_token": {"content": "!"}})
    )
    return folder


@pytest.fixture(scope="module", params=["plain", "sequence"])
def codec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if messages[0]['role'] == 'robot' %}{{ raise_exception('no robots') }}{% endif %}>"
    )
    plain = request.param == "plain"
    folder = byte_model(tmp_path_factory.mktemp("model"), template, plain=plain)
    found = TextCodec(folder)
    assert found.bytes.are_text == plain
    return found


@given(st.text(max_size=60), st.lists(st.text(min_size=1, max_size=4), max_size=1), st.data())
def test_pieces_make_the_text_up_to_the_first_stop_string(
    codec: TextCodec, text: str, stops: list[str], data: st.DataObject
) -> None:
    tokens = codec.encode(text)
    stream, shown = TextStream(codec, stops), ""
    while tokens:
        cut = data.draw(st.integers(1, len(tokens)))
        piece = stream.feed(tokens[:cut])
        assert "\ufffd" not in piece or "\ufffd" in text
        shown += piece
        tokens = tokens[cut:]
    shown += stream.finish()
    places = [text.find(stop) for stop in stops if stop in text]
    assert shown == stream.text == text[: min(places, default=len(text))]


@given(st.lists(st.integers(0, 260), max_size=24), st.booleans())
def test_tokens_that_are_bytes_give_the_text_that_the_tokenizer_gives(
    codec: TextCodec, tokens: list[int], special: bool
) -> None:
    if codec.bytes.are_text:  # others hold broken characters back for a while only
        stream = TextStream(codec, [], special=special)
        shown = "".join(stream.feed([token]) for token in tokens) + stream.finish()
        assert shown == codec.decode(tokens, special=special)


def test_bytes_that_are_no_text_are_shown_in_the_end(codec: TextCodec) -> None:
    broken = codec.encode("é")[:1]
    stream = TextStream(codec, [])
    assert stream.feed(broken) == ""
    assert stream.finish() == "\ufffd"


def test_a_conversation_is_rendered_by_the_models_own_template(codec: TextCodec) -> None:
    ids = codec.encode(codec.chat_text([{"role": "user", "content": "hi"}]), special=False)
    assert codec.decode(ids) == "user:hi!>"


def test_a_template_that_refuses_is_the_callers_error(codec: TextCodec) -> None:
    with pytest.raises(ConfigError, match="no robots"):
        codec.chat_text([{"role": "robot", "content": "beep"}])


def test_a_model_without_template_or_tokenizer_says_what_to_send(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="token ids"):
        TextCodec(tmp_path)
    with pytest.raises(RefusedError, match="/v1/completions"):
        TextCodec(byte_model(tmp_path, None)).chat_text([{"role": "user", "content": "hi"}])
